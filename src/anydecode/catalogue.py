"""The catalogue of methods: one card per method, and building a method from its key."""

from __future__ import annotations

import importlib
import inspect
import json
import keyword
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import entry_points
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from anydecode.errors import InvalidRequestError, one_line, quoted

FAMILIES = (
    "speculative",
    "depth",
    "diffusion",
    "constraint",
    "sampling",
    "search",
    "alignment",
    "serving",
)
#: What each exactness claims.
CLAIMS = {
    "token-exact": "the tokens of plain decoding, at every temperature",
    "greedy-exact": "the tokens of plain decoding at temperature 0",
    "distribution-exact": "the distribution of plain decoding, with other random choices",
    "lossy": "the text may differ from that of plain decoding",
}
EXACTNESS = tuple(CLAIMS)
_GROUP = "anydecode.decoders"
_PACKAGES = (
    "anydecode.decoders",
    "anydecode.sampling",
    "anydecode.constraints",
    "anydecode.engine",
    "anydecode.api",
    "anydecode.cluster.control",
    "anydecode.quantization",
    "anydecode.models.families",
    "anydecode.training.recipes",
)


@dataclass(frozen=True)
class Range:
    """Numbers from `min` to `max`, both included."""

    min: float
    max: float

    def __str__(self) -> str:
        ends = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.min, self.max))
        return " to ".join(ends)

    def allows(self, value: object) -> bool:
        """Whether `value` is a number of this range."""
        return _is_number(value) and self.min <= value <= self.max  # type: ignore[operator]


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def __str__(self) -> str:
        return "true or false"

    def allows(self, value: object) -> bool:
        """Whether `value` is a boolean."""
        return isinstance(value, bool)


@dataclass(frozen=True)
class Words:
    """One of several texts."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(self.words)

    def allows(self, value: object) -> bool:
        """Whether `value` is one of the texts."""
        return value in self.words


@dataclass(frozen=True)
class Text:
    """Texts of up to `max_length` characters, which do not name files."""

    max_length: int

    def __str__(self) -> str:
        return f"up to {self.max_length} characters"

    def allows(self, value: object) -> bool:
        """Whether `value` is such a text. A number is the text that it was written as."""
        return len(str(value)) <= self.max_length


@dataclass(frozen=True)
class Nested:
    """Up to `max_count` other methods, joined with "+". Their own parameters are checked too."""

    max_count: int = 1

    def __str__(self) -> str:
        several = "" if self.max_count == 1 else f', up to {self.max_count} joined with "+"'
        return f"methods with parameters that requests may set{several}"

    def allows(self, value: object) -> bool:
        """Whether `value` names up to `max_count` methods that a remote caller may select."""
        is_list = self.max_count > 1  # else a "+" is part of the key
        keys = [key for key in str(value).split("+") if key] if is_list else [str(value)]
        if len(keys) > self.max_count:
            return False
        for key in keys:
            check_remote(key)
        return True


#: The default bounds of integers that requests may not set: above the length of any context.
_OPERATOR_BOUNDS = Range(0, 1 << 20)

Bounds = Range | Flag | Words | Text | Nested


@dataclass(frozen=True)
class Card:
    """Description of a method.

    `exactness` compares with autoregressive decoding of the same model. Sampling rules and guidance
    are "lossy", since they change the distribution by design. Their certificates test another
    claim: the distribution is that of the rule's own definition (its oracle), and with the rule
    exact decoders generate the same tokens as autoregressive decoding.

    Args:
        key: Key in the catalogue.
        family: One of `FAMILIES`.
        paper: The source, with its arXiv number if it has one.
        exactness: One of `EXACTNESS`.
        summary: One sentence.
        bibtex: Citation; by default derived from `paper`.
        needs: Requirements: "draft model", "trained heads", "diffusion model", ...
        works_with: What the method can be combined with.
        deviations: Every difference from the paper.
        use: How a method that is no decoder, sampler or constraint is selected.
        missing: The parts of the paper's distinguishing idea that are not implemented. With any,
            the method is partial; without, it is complete.
        measured: What the method saves or costs, with the model, the machine and the command, where
            the paper's gain depends on them.
        bounds: The numbers that anyone may set parameters to, where they differ from the default.
            By default integers of `remote` have its lower bound, and 16 times its upper bound, at
            least 1024; other integers may be 0 to 2**20; and other numbers any finite number.
        remote: The parameters that a remote caller (a request to the server) may set, with the
            values allowed to it: those whose cost is small. Booleans are always allowed, and
            parameters that name files never.
    """

    key: str
    family: str
    paper: str
    exactness: str
    summary: str = ""
    bibtex: str = ""
    needs: tuple[str, ...] = ()
    works_with: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    use: str = ""
    bounds: Mapping[str, Range] = field(default_factory=dict, hash=False)
    remote: Mapping[str, Bounds] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"the family is {self.family!r}; allowed are {', '.join(FAMILIES)}")
        if self.exactness not in EXACTNESS:
            raise ValueError(
                f"the exactness is {self.exactness!r}; allowed are {', '.join(EXACTNESS)}"
            )

    @property
    def citation(self) -> str:
        """BibTeX: the card's own, or one entry per arXiv number in `paper`."""
        if self.bibtex:
            return self.bibtex
        found = re.findall(r"(?:([^;()]*?)[ ,(]*)?arXiv:(\d{4}\.\d{4,5})", self.paper)
        return "\n".join(
            f"@misc{{arxiv{number.replace('.', '_')}, title = {{{title.strip(' ,)')}}}, "
            f"year = {{20{number[:2]}}}, eprint = {{{number}}}, archivePrefix = {{arXiv}}}}"
            for title, number in found
        )

    def to_dict(self) -> dict[str, Any]:
        """The card as JSON-compatible values."""
        return {**asdict(self), "bibtex": self.citation}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method: its name, type and default value as text, and a description. A
    parameter without a default has the default "". `bounds` are the numbers that it may be, ""
    if it is no integer and has no bounds of its own. `remote` are the values that requests to a
    server may give it, "" if none."""

    name: str
    type: str
    default: str
    description: str
    bounds: str = ""
    remote: str = ""


@dataclass(frozen=True)
class Entry:
    """A card and the callable that builds the method from keyword parameters."""

    card: Card
    build: Callable[..., Any]


_entries: dict[str, Entry] = {}


def register(card: Card) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a class or factory function: adds a method to the catalogue under the key of
    its card. Raises `ValueError` if another method has that key."""

    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        existing = _entries.get(card.key)
        if existing is not None and existing.build is not build:
            raise ValueError(f"another method is already registered as {card.key!r}")
        _entries[card.key] = Entry(card, build)
        build.card = card  # type: ignore[attr-defined]
        return build

    return add


@cache
def _load() -> None:
    """Import every module that registers methods: those of the package, then entry points. An entry
    point that fails is left out, with a warning."""
    for names in _modules().values():
        for name in names:
            importlib.import_module(name)
    for point in entry_points(group=_GROUP):
        try:
            point.load()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(f"{_GROUP} entry point {point.value!r} failed: {reason}", stacklevel=2)


@cache
def _modules() -> dict[str, list[str]]:
    """All modules that may register methods, by their last name. None is imported."""
    found: dict[str, list[str]] = {}
    root = Path(__file__).parent
    for package in _PACKAGES:
        folder = root.joinpath(*package.split(".")[1:])
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] != "__init__":
                found.setdefault(parts[-1], []).append(".".join(("anydecode", *parts)))
    return found


def module_name(key: str) -> str:
    """The name of the module that registers the method `key`."""
    name = key.replace("-", "_").replace("+", "p")
    return f"{name}_" if keyword.iskeyword(name) else name


def lookup(key: str) -> Entry | None:
    """The method `key`, or None. Of this package's methods, only its module is imported."""
    if key not in _entries:
        for name in _modules().get(module_name(key), ()):
            importlib.import_module(name)
    if key not in _entries:
        _load()
    return _entries.get(key)


def entries() -> dict[str, Entry]:
    """All methods by key."""
    _load()
    return _entries


def cards(family: str | None = None) -> list[Card]:
    """The cards of all methods or of one family, sorted by family and key."""
    found = [entry.card for entry in entries().values() if family in (None, entry.card.family)]
    return sorted(found, key=lambda card: (FAMILIES.index(card.family), card.key))


def find(key: str) -> Entry:
    """The method `key`. Raises `InvalidRequestError`, with similar keys, if there is none."""
    entry = lookup(key)
    if entry is None:
        hint = _similar(key, _entries) or "; see `anydecode methods`"
        raise InvalidRequestError(f"no decoding method is called {one_line(repr(key))}{hint}")
    return entry


def _similar(key: str, keys: Iterable[str]) -> str:
    """The end of an error that names those of `keys` that are similar to `key`, if any are."""
    from difflib import get_close_matches

    known = list(keys)
    parts = [one for one in known if str(key) in one.split("-")]  # a part of a longer key
    close = list(dict.fromkeys([*parts, *get_close_matches(str(key), known, 3)]))[:3]
    return f"; did you mean {', '.join(close)}?" if close else ""


def parameters(key: str) -> list[Parameter]:
    """The parameters of the method `key`, described by the `Args:` of its docstring or, for a
    class, of those of its bases."""
    entry = find(key)
    method = entry.build
    descriptions: dict[str, str] = {}
    for owner in reversed(method.__mro__) if inspect.isclass(method) else (method,):
        descriptions.update(_descriptions(inspect.cleandoc(owner.__doc__ or "")))
    return [
        Parameter(
            name,
            inspect.formatannotation(one.annotation).strip("'"),
            "" if one.default is one.empty else repr(one.default),
            descriptions.get(name, ""),
            str(bounds(entry, name) or ""),
            str(_remote_bounds(entry, name) or ""),
        )
        for name, one in inspect.signature(method).parameters.items()
    ]


def bounds(entry: Entry, name: str) -> Range | None:
    """The numbers that anyone may set a parameter to: see `Card.bounds`. None if it is no number,
    or any finite number is allowed."""
    declared, remote = entry.card.bounds.get(name), entry.card.remote.get(name)
    if declared is not None or int not in _kinds(entry.build).get(name, ()):
        return declared
    if isinstance(remote, Range):
        return Range(remote.min, max(1024, 16 * remote.max))
    return _OPERATOR_BOUNDS


def _remote_bounds(entry: Entry, name: str) -> Bounds | None:
    """What remote callers may set a parameter to: what its card says, or its type if that is a
    boolean; None if they may not set it."""
    is_flag = set(_kinds(entry.build).get(name, ())) in ({bool}, {bool, type(None)})
    return entry.card.remote.get(name, Flag() if is_flag else None)


def _descriptions(docstring: str) -> dict[str, str]:
    """The texts of the `Args:` of a docstring, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in docstring.partition("\nArgs:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        begin = re.fullmatch(r" {4}(\w+): (.*)", line)
        if begin is not None:
            name, found[begin[1]] = begin[1], begin[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return found


def build(key: str, /, **parameters: Any) -> Any:
    """Build the method `key`.

    Args:
        key: Key in the catalogue.
        **parameters: Parameters of the method's factory.

    Raises:
        InvalidRequestError: If the key or a parameter is unknown, or a value has a wrong type or is
            out of bounds.
    """
    entry = find(key)
    method = entry.build
    kinds = _kinds(method)
    _check_names(entry, parameters)
    try:
        inspect.signature(method).bind(**parameters)
    except TypeError as error:
        raise InvalidRequestError(f"method {key!r}: {error}") from None
    for name, value in parameters.items():
        if not _fits(value, kinds.get(name, ())):
            allowed = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds[name])
            raise InvalidRequestError(
                f"method {key!r}: {name} takes {allowed}, not {quoted(value)}"
            )
        range = bounds(entry, name)
        if range is not None and _is_number(value) and not range.allows(value):
            raise InvalidRequestError(f"{key!r}: {name} is {quoted(value)}; allowed are {range}")
    built = method(**parameters)
    if getattr(built, "card", None) is not entry.card:
        # The class that a factory builds has no card, or another method's. It may be frozen.
        object.__setattr__(built, "card", entry.card)
    return built


def parse(choice: str) -> tuple[str, dict[str, Any]]:
    """The key and parameters that `key:name=value,name=value` names. Values that are numbers, true,
    false or null in JSON are converted; for parameters that accept texts but no numbers, only null
    is.

    Raises:
        InvalidRequestError: If a part is not of the form name=value.
    """
    key, _, rest = choice.partition(":")
    texts = text_parameters(key)
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequestError(f"{part!r} is not of the form name=value")
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value.strip()
        is_text = name.strip() in texts and parsed is not None
        found[name.strip()] = value.strip() if is_text else parsed
    return key, found


def check_kind(key: str, expected: str, *kinds: type) -> None:
    """Raise `InvalidRequestError` if the method `key` declares another kind than `kinds`.

    Nothing is built: building may open files or start threads.

    Args:
        key: Key in the catalogue.
        expected: `kinds` in words.
        *kinds: The accepted classes.
    """
    declared = kind_of(key)
    if declared is not None and not any(
        issubclass(declared, kind) or issubclass(kind, declared) for kind in kinds
    ):
        raise InvalidRequestError(_other_kind(key, expected))


def _keys_of(*kinds: type) -> list[str]:
    """The keys of all methods of one of `kinds`."""
    return [card.key for card in cards() if issubclass(kind_of(card.key) or object, kinds)]


def _other_kind(key: str, expected: str) -> str:
    use = find(key).card.use
    return f"{key!r} is not {expected}" + (f"; it is selected by {use}" if use else "")


def build_as(choice: str, expected: str, *kinds: type) -> Any:
    """Build the method that `choice` ("key" or "key:name=value,name=value") names.

    Args:
        choice: Key, and parameters.
        expected: `kinds` in words.
        *kinds: The accepted classes.

    Raises:
        InvalidRequestError: If the method is not of one of `kinds`, or as in `build`.
    """
    key, given = parse(choice)
    if lookup(key) is None:
        known = _keys_of(*kinds)
        if len(known) <= _MAX_NAMED:
            hint = _similar(key, known) or f"; choose from {', '.join(known)}"
            raise InvalidRequestError(f"{quoted(key)} is not {expected}{hint}")
    check_kind(key, expected, *kinds)
    built = build(key, **given)
    if not isinstance(built, kinds):
        raise InvalidRequestError(_other_kind(key, expected))
    return built


def check_remote(choice: str) -> None:
    """Check that a remote caller may select `choice` ("key" or "key:name=value,name=value"): its
    parameters, and those of the methods that it names, are within the bounds of their cards.
    Nothing is built.

    Raises:
        InvalidRequestError: If the method reads files, or a parameter is unknown or not allowed.
    """
    key, given = parse(choice)
    entry, files, kind = find(key), file_parameters(key), kind_of(key)
    if kind is None:
        raise InvalidRequestError(f"{key!r} does not declare what it returns: {_OPERATOR_ONLY}")
    if getattr(kind, "reads_files", False):
        raise InvalidRequestError(f"{key!r} reads files of this machine: {_OPERATOR_ONLY}")
    if not given:
        return  # the most common case, for every request
    _check_names(entry, given)
    for name, value in given.items():
        if name in files:
            raise InvalidRequestError(f"{key!r}: {name} names a file: {_OPERATOR_ONLY}")
        if value is None and type(None) in _kinds(entry.build).get(name, ()):
            continue
        allowed = _remote_bounds(entry, name)
        if allowed is None:
            raise InvalidRequestError(f"{key!r} has the parameter {name}: {_OPERATOR_ONLY}")
        if not allowed.allows(value):
            raise InvalidRequestError(
                f"{key!r}: {name} is {quoted(value)}; requests to a server may set {allowed}"
            )


def _check_names(entry: Entry, names: Iterable[str]) -> None:
    """Raise `InvalidRequestError` unless the method has parameters of all `names`."""
    found = inspect.signature(entry.build).parameters
    if any(one.kind is one.VAR_KEYWORD for one in found.values()):
        return
    for name in names:
        if name not in found:
            known = ", ".join(found) or "it has none"
            raise InvalidRequestError(
                f"method {entry.card.key!r} has no parameter {name!r}; known: {known}"
            )


def kind_of(key: str) -> type | None:
    """The class of the method `key`, if it can be determined without building it."""
    entry = lookup(key)
    method = None if entry is None else entry.build
    kind = method if inspect.isclass(method) else _hints(method).get("return")
    return None if _is_open(kind) else kind


def text_parameters(key: str) -> frozenset[str]:
    """The parameters of method `key` that accept texts but no numbers."""
    kinds = _kinds_of(key)
    numbers = {bool, int, float}
    return frozenset(
        name
        for name, found in kinds.items()
        if {str, Path} & set(found) and not numbers & set(found)
    )


def file_parameters(key: str) -> frozenset[str]:
    """The parameters of method `key` that name files: those whose type allows a `Path`."""
    kinds = _kinds_of(key)
    return frozenset(name for name, found in kinds.items() if Path in found)


def file_versions(choice: str) -> tuple[tuple[int, int, int], ...]:
    """The time of change in nanoseconds, the inode and the size of each file that the parameters of
    `choice` name and that exists, in their order.

    Raises:
        InvalidRequestError: As in `parse`.
    """
    if ":" not in choice:
        return ()
    key, given = parse(choice)
    files = file_parameters(key)
    found = []
    named = [str(given[name]) for name in given if name in files and given[name] is not None]
    for file in [part for value in named for part in dict.fromkeys([value, *value.split("+")])]:
        try:
            status = os.stat(file)
        except (OSError, ValueError):
            continue
        found.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)


_OPERATOR_ONLY = "only the server's own options may use that, not requests"

#: Maximum number of methods of a kind that an error names.
_MAX_NAMED = 24

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a file",
    type(None): "none",
}


@cache
def _hints(method: Callable[..., Any] | None) -> dict[str, Any]:
    try:
        return get_type_hints(method.__init__ if inspect.isclass(method) else method)
    except (NameError, TypeError):  # no hints, or names imported only for type checking
        return {}


def _kinds_of(key: str) -> dict[str, tuple[type, ...]]:
    entry = lookup(key)
    return {} if entry is None else _kinds(entry.build)


@cache
def _kinds(method: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """The parameters of `method` with the classes that they accept, if `isinstance` can check
    them."""
    found = {}
    for name, hint in _hints(method).items():
        kinds = (hint,) if get_origin(hint) not in (Union, UnionType) else get_args(hint)
        classes = tuple(get_origin(kind) or kind for kind in kinds)
        if not any(_is_open(kind) for kind in classes):
            found[name] = classes
    return found


def _is_open(kind: Any) -> bool:
    """Whether `isinstance` cannot check for `kind`."""
    return kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether `value` may be passed for a parameter of `kinds`. Integers are accepted as floats,
    NaN and infinity are not accepted. Objects of classes that the parameter does not name are not
    checked."""
    if not kinds:
        return True
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, (int, float)):
        whole = isinstance(value, int)
        return abs(value) < float("inf") and bool({float, *([int] if whole else [])} & set(kinds))
    return any(isinstance(value, kind) for kind in kinds) or not isinstance(
        value, (str, type(None), list, dict)
    )
