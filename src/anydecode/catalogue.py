"""The catalogue of methods: one card per method, and building a method from its key."""

from __future__ import annotations

import importlib
import inspect
import keyword
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from anydecode.errors import InvalidRequestError

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
    "anydecode.quantization",
)


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
    parameter without a default has the default ""."""

    name: str
    type: str
    default: str
    description: str


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
        from difflib import get_close_matches

        close = get_close_matches(str(key), _entries, 3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; see `anydecode methods`"
        raise InvalidRequestError(f"no decoding method is called {key!r}{hint}")
    return entry


def parameters(key: str) -> list[Parameter]:
    """The parameters of the method `key`, described by the `Args:` of its docstring or, for a
    class, of those of its bases."""
    method = find(key).build
    descriptions: dict[str, str] = {}
    for owner in reversed(method.__mro__) if inspect.isclass(method) else (method,):
        descriptions.update(_descriptions(inspect.cleandoc(owner.__doc__ or "")))
    return [
        Parameter(
            name,
            inspect.formatannotation(one.annotation).strip("'"),
            "" if one.default is one.empty else repr(one.default),
            descriptions.get(name, ""),
        )
        for name, one in inspect.signature(method).parameters.items()
    ]


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
        InvalidRequestError: If the key or a parameter is unknown, or a value has a wrong type.
    """
    entry = find(key)
    method = entry.build
    kinds = _kinds(method)
    try:
        inspect.signature(method).bind(**parameters)
    except TypeError as error:
        raise InvalidRequestError(f"method {key!r}: {error}") from None
    for name, value in parameters.items():
        if not _fits(value, kinds.get(name, ())):
            allowed = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds[name])
            raise InvalidRequestError(f"method {key!r}: {name} takes {allowed}, not {value!r}")
    built = method(**parameters)
    if getattr(built, "card", None) is not entry.card:
        # The class that a factory builds has no card, or another method's. It may be frozen.
        object.__setattr__(built, "card", entry.card)
    return built


def kind_of(key: str) -> type | None:
    """The class of the method `key`, if it can be determined without building it."""
    entry = lookup(key)
    method = None if entry is None else entry.build
    kind = method if inspect.isclass(method) else _hints(method).get("return")
    return kind if isinstance(kind, type) else None


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


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether `value` may be passed for a parameter of `kinds`. Integers are accepted as floats,
    NaN is not accepted. Objects of classes that the parameter does not name are not checked."""
    if not kinds:
        return True
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, (int, float)):
        whole = isinstance(value, int)
        return value == value and bool({float, *([int] if whole else [])} & set(kinds))
    return any(isinstance(value, kind) for kind in kinds) or not isinstance(
        value, (str, type(None), list, dict)
    )
