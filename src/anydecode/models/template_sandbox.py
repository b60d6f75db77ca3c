"""The sandbox in which chat templates run: Jinja's for immutable values, with limits on time and on
the size of everything that is computed.

Every operation that can make a value larger than its operands is bounded before it runs: those of a
template that could not be are replaced when it is parsed. Filters and methods that are not listed
here do not exist. What is computed counts towards a limit of the whole rendering.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from itertools import count
from math import inf
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: Limits of one rendering; seconds are those of the processor.
MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
#: Maximum size of all values that a rendering computes, in bytes.
MAX_COMPUTED_BYTES = 1 << 28
#: Maximum number of items of a list, with those of the lists in it.
_MAX_ITEMS = 1 << 18
#: Maximum width, precision, indentation and number of columns.
_MAX_WIDTH = 1024
#: Maximum size of an integer, and of an operand of a power.
_MAX_BITS, _MAX_OPERAND = 1 << 16, 1024
#: The memory of an item of a list, in bytes.
_ITEM_BYTES = 64
#: Loops over fewer items check the time only when they start.
_FEW_ITEMS = 1024
#: A conversion of printf-style formatting, without nested parentheses.
_CONVERSION = re.compile(
    r"%(?:\([^()]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.?)", re.DOTALL | re.ASCII
)
_NUMBER = re.compile(r"\d+")

#: The methods of builtin types that a template may call.
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha"
        " isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle"
        " isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex"
        " rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
        " zfill".split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
    set: frozenset("copy difference intersection issubset issuperset union".split()),
}
#: Filters whose results are not larger than their values, or lazy.
_PLAIN_FILTERS = frozenset(
    "abs attr count d default dictsort filesizeformat first float groupby int items last length"
    " list map max min random reject rejectattr reverse select selectattr sort unique".split()
)
#: Filters that make text of their values.
_TEXT_FILTERS = frozenset(
    "capitalize e escape forceescape lower safe string striptags title trim truncate upper"
    " urlencode wordcount".split()
)


class TimeoutInTemplateError(Exception):
    """Raised in a template that has passed its time limit."""


class LimitInTemplateError(TemplateError):
    """Raised by a template through `raise_exception`, or by an exceeded limit."""


@dataclass
class _Rendering:
    """One rendering: the processor time of its thread at which it ends, its time limit, and the
    bytes that it has computed."""

    deadline: float = inf
    seconds: float = inf
    num_bytes: int = 0


#: The rendering of this thread. Threads share the environments.
_rendering: ContextVar[_Rendering] = ContextVar("rendering", default=_Rendering())  # noqa: B039


@contextmanager
def rendering(seconds: float) -> Iterator[None]:
    """The limits of one rendering of at most `seconds` of processor time."""
    token = _rendering.set(_Rendering(time.thread_time() + seconds, seconds))
    try:
        yield
    finally:
        _rendering.reset(token)


def check_time() -> None:
    """Raises `TimeoutInTemplateError` if the rendering has passed its time limit."""
    current = _rendering.get()
    if time.thread_time() > current.deadline:
        raise TimeoutInTemplateError(f"it ran for more than {current.seconds:g} seconds")


def _check_length(length: float) -> None:
    if length > MAX_CHARACTERS:
        raise LimitInTemplateError(
            f"a text is too long: it has {length:g} characters, the maximum is {MAX_CHARACTERS}"
        )


def _check_items(num_items: float) -> None:
    if num_items > _MAX_ITEMS:
        raise LimitInTemplateError(
            f"a list is too long: it has {num_items:g} items, the maximum is {_MAX_ITEMS}"
        )


def _check_widths(arguments: Iterable[Any]) -> int:
    """The largest of the numbers among `arguments`, which must be allowed widths."""
    widths = [abs(value) for value in arguments if isinstance(value, int)]
    width = max(widths, default=0)
    if width > _MAX_WIDTH:
        raise LimitInTemplateError(f"a width is too large: it is {width}, not {_MAX_WIDTH} at most")
    return width


def _computed(value: Any) -> Any:
    """`value`, which counts towards the limits of the rendering."""
    if isinstance(value, (str, bytes)):
        _check_length(len(value))
        num_bytes = sys.getsizeof(value)
    elif isinstance(value, (list, tuple, dict, set)):
        _check_items(len(value))
        num_bytes = _ITEM_BYTES * (1 + len(value))
    else:
        return value
    current = _rendering.get()
    current.num_bytes += num_bytes
    if current.num_bytes > MAX_COMPUTED_BYTES:
        raise LimitInTemplateError(
            f"it computes more than {MAX_COMPUTED_BYTES >> 20} MiB of texts and lists"
        )
    return value


def _text_size(value: Any, indent: int = 0) -> int:
    """An upper bound of the length of `value` as text, indented by `indent` per level. Raises
    `LimitInTemplateError` beyond the limits."""
    if isinstance(value, str):
        return len(value)
    size, num_items = 0, 0
    stack: list[tuple[Any, int]] = [(value, 0)]
    for step in count():
        if not stack:
            break
        if step % 4096 == 4095:
            check_time()
        node, depth = stack.pop()
        if isinstance(node, (str, bytes)):
            size += 4 * len(node)
        elif isinstance(node, int):
            size += node.bit_length() // 3 + 2
        elif isinstance(node, Mapping):
            num_items += len(node)
            stack += ((part, depth + 1) for pair in node.items() for part in pair)
        elif isinstance(node, (list, tuple, set, frozenset)) or type(node).__name__ in _VIEWS:
            num_items += len(node)
            stack += ((part, depth + 1) for part in node)
        size += 32 + depth * indent
        _check_items(num_items)
        if size > 4 * MAX_CHARACTERS:
            _check_length(size)
    return size


_VIEWS = frozenset(("dict_items", "dict_keys", "dict_values"))


def _join_size(separator: str, values: Any) -> None:
    _check_length(_text_size(values) + len(separator) * len(values))


def _replace_size(text: str, old: str, new: str) -> None:
    num_found = text.count(old) if old else len(text) + 1
    _check_length(len(text) + num_found * len(new))


def _printf_size(form: str, arguments: Any) -> None:
    """Checks the length of `form % arguments`."""
    num_values = 0
    for width, precision, kind in _CONVERSION.findall(form):
        if "*" in (width, precision) or kind == "(":
            raise LimitInTemplateError("a format takes its width from a value, or nests its names")
        _check_widths(int(number[:9]) for number in (width, precision) if number)
        num_values += kind != "%"
    _check_length(len(form) + num_values * (_largest(arguments) + 2 * _MAX_WIDTH))


def _format_size(form: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Checks the length of `form.format(*arguments, **named)`."""
    num_values = 0
    for _, name, spec, _ in Formatter().parse(form):
        if spec and "{" in spec:
            raise LimitInTemplateError("a format takes its width from a value")
        _check_widths(int(number[:9]) for number in _NUMBER.findall(spec or ""))
        num_values += name is not None
    largest = max(_largest(arguments), _largest(named))
    _check_length(len(form) + num_values * (largest + 2 * _MAX_WIDTH))


def _largest(values: Any) -> int:
    """The largest size of one of `values` as text."""
    if isinstance(values, Mapping):
        values = tuple(values.values())
    elif not isinstance(values, tuple):
        return _text_size(values)
    return max(map(_text_size, values), default=0)


def _method_size(method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Checks the size of the result of a string's method; the arguments to call it with."""
    text, name = method.__self__, method.__name__
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_widths(arguments)
    elif name == "join" and arguments:
        arguments = (_listed(arguments[0]), *arguments[1:])
        _join_size(text, arguments[0])
    elif name == "replace" and len(arguments) > 1:
        _replace_size(text, arguments[0], arguments[1])
    elif name == "format":
        _format_size(text, arguments, named)
    elif name == "format_map" and arguments:
        _format_size(text, (), arguments[0])
    return arguments


def _listed(values: Any) -> Any:
    """`values`, in a list if their number is not known."""
    if hasattr(values, "__len__"):
        return values
    result = []
    for value in values:
        check_time()
        result.append(value)
        _check_items(len(result))
    return result


def _check_filter(name: str, value: Any, arguments: list[Any]) -> Any:
    """Checks the size of the result of a filter; returns the value to apply it to."""
    if name in _TEXT_FILTERS:
        _check_length(_text_size(value))
    elif name == "join":
        value = _listed(value)
        separator = next((one for one in arguments if isinstance(one, str)), "")
        _join_size(separator, value)
    elif name == "replace":
        texts = [str(one) for one in arguments if not isinstance(one, int)]
        _check_length(_text_size(value))
        if len(texts) > 1:
            _replace_size(str(value), texts[0], texts[1])
    elif name == "format":
        _printf_size(str(value), arguments[0] if len(arguments) == 1 else tuple(arguments))
    elif name == "tojson":
        indents = [len(one) for one in arguments if isinstance(one, str)]
        _check_length(_text_size(value, _check_widths([*arguments, *indents])))
    elif name == "sum":
        if any(isinstance(one, (list, tuple)) for one in arguments):
            raise LimitInTemplateError("it sums lists; join them with + instead")
    elif name not in _PLAIN_FILTERS:  # batch, center, indent, round, slice, wordwrap
        width = _check_widths(arguments)
        length = max([width, *(len(one) for one in arguments if isinstance(one, str))])
        if name in ("center", "indent", "wordwrap"):
            num_parts = str(value).count("\n") if name == "indent" else 1
            num_parts = _text_size(value) if name == "wordwrap" else num_parts
            _check_length(_text_size(value) + (1 + num_parts) * (1 + length))
    return value


_SIZED_FILTERS = frozenset(
    "batch center format indent join replace round slice sum tojson wordwrap".split()
)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose results are checked, before and after."""
    num_contexts = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        check_time()
        contexts, rest = arguments[:num_contexts], arguments[num_contexts:]
        value = rest[0] if rest else None
        value = _check_filter(name, value, [*rest[1:], *named.values()])
        return _computed(function(*contexts, value, *rest[1:], **named))

    return limited


class _Namespace(Namespace):
    """A namespace whose text does not contain its values."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks assistant text for training; only its
    body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Checked(NodeTransformer):
    """Replaces what Jinja compiles to plain Python operations by calls of the environment."""

    def _call(self, name: str, arguments: list[Any], line: int) -> nodes.Expr:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concatenated", node.nodes, node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call("iterated", [node.iter], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        arguments = [bound or nodes.Const(None) for bound in bounds]
        return self._call("sliced", [node.node, *arguments], node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._call("built", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._call("built", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else self._call("built", [node], node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # which passes through `finalize`


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,  # compiling, which has no limits, must compute no constants
            finalize=_output,
        )
        self.filters["tojson"] = _tojson
        names = _PLAIN_FILTERS | _TEXT_FILTERS | _SIZED_FILTERS
        self.filters = {
            name: _limited_filter(name, function)
            for name, function in self.filters.items()
            if name in names
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Checked().visit(super()._parse(source, name, filename))
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if not callable(value) or type(obj).__module__ not in ("builtins", "markupsafe"):
            return True
        kind = next((kind for kind in _METHODS if isinstance(obj, kind)), None)
        return kind is not None and attr in _METHODS[kind]

    def getattr(self, obj: Any, attribute: str) -> Any:
        check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_time()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        check_time()
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(getattr(method, "__self__", None), str):
            args = _method_size(method, args, kwargs)
        for argument in args:
            if isinstance(argument, tuple):  # such as the `varargs` of a macro
                _text_size(argument)
        result = super().call(__context, __obj, *args, **kwargs)
        if __obj is dict:
            _text_size(result)
        return _computed(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_time()
        if operator == "**" and max(_magnitude(left), _magnitude(right)) > _MAX_OPERAND:
            raise LimitInTemplateError("it computes too large a power")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, (str, bytes)):
            _printf_size(str(left), right)
        return _computed(super().call_binop(context, operator, left, right))

    def concatenated(self, *values: Any) -> str:
        """The texts of `values`, one after the other."""
        _check_length(sum(map(_text_size, values)))
        return "".join(map(str, values))

    def iterated(self, values: Any) -> Any:
        """`values` for a loop that ends at the time limit."""
        if hasattr(values, "__len__") and len(values) < _FEW_ITEMS:
            return values
        return _checked_items(values)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """A slice of `value`."""
        return value[start:stop:step]

    def built(self, value: Any) -> Any:
        """`value`, a list, tuple or dict that a template has written down."""
        _text_size(value)
        return value


def _checked_items(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        check_time()
        yield value


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise LimitInTemplateError("it computes too large a number")
        return
    for sized, factor in ((left, right), (right, left)):
        if isinstance(factor, int) and isinstance(sized, (str, bytes)):
            _check_length(len(sized) * factor)
        elif isinstance(factor, int) and isinstance(sized, (list, tuple)):
            _check_items(len(sized) * factor)


def _magnitude(value: Any) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


@pass_context
def _output(context: Context, value: Any) -> Any:
    """`value`, which a template writes. As it depends on the context, outputs are not computed
    while a template is compiled."""
    check_time()
    if not isinstance(value, str):
        _check_length(_text_size(value))
        value = str(value)
    return _computed(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise LimitInTemplateError(message)


def _strftime_now(form: str) -> str:
    """The time, in the format `form`."""
    if len(form) > _MAX_WIDTH or _NUMBER.search(form.partition("%")[2]):
        raise LimitInTemplateError("the format of the time is too long, or has widths")
    return datetime.now().strftime(form)
