"""The catalogue of methods: one card per method, and building a method from its key."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
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
EXACTNESS = ("token-exact", "greedy-exact", "distribution-exact", "lossy")
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
        if inspect.isclass(build):
            build.card = card  # type: ignore[attr-defined]
        return build

    return add


@cache
def _load() -> None:
    """Import every module that registers methods: those of the package, then entry points."""
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    for point in entry_points(group=_GROUP):
        point.load()


def entries() -> dict[str, Entry]:
    """All methods by key."""
    _load()
    return _entries


def cards(family: str | None = None) -> list[Card]:
    """The cards of all methods or of one family, sorted by family and key."""
    found = [entry.card for entry in entries().values() if family in (None, entry.card.family)]
    return sorted(found, key=lambda card: (FAMILIES.index(card.family), card.key))


def build(key: str, /, **parameters: Any) -> Any:
    """Build the method `key`.

    Args:
        key: Key in the catalogue.
        **parameters: Parameters of the method's factory.

    Raises:
        InvalidRequestError: If the key or a parameter is unknown, or a value has a wrong type.
    """
    if key not in entries():
        from difflib import get_close_matches

        close = get_close_matches(str(key), _entries, 3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; see `anydecode methods`"
        raise InvalidRequestError(f"no decoding method is called {key!r}{hint}")
    method = _entries[key].build
    kinds = _kinds(method)
    try:
        inspect.signature(method).bind(**parameters)
    except TypeError as error:
        raise InvalidRequestError(f"method {key!r}: {error}") from None
    for name, value in parameters.items():
        if not _fits(value, kinds.get(name, ())):
            allowed = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds[name])
            raise InvalidRequestError(f"method {key!r}: {name} takes {allowed}, not {value!r}")
    return method(**parameters)


def kind_of(key: str) -> type | None:
    """The class of the method `key`, if it can be determined without building it."""
    method = entries()[key].build if key in entries() else None
    kind = method if inspect.isclass(method) else _hints(method).get("return")
    return kind if isinstance(kind, type) else None


def text_parameters(key: str) -> frozenset[str]:
    """The parameters of method `key` that accept texts but no numbers."""
    kinds = _kinds(entries()[key].build) if key in entries() else {}
    numbers = {bool, int, float}
    return frozenset(
        name
        for name, found in kinds.items()
        if {str, Path} & set(found) and not numbers & set(found)
    )


def file_parameters(key: str) -> frozenset[str]:
    """The parameters of method `key` that name files: those whose type allows a `Path`."""
    kinds = _kinds(entries()[key].build) if key in entries() else {}
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
