"""What a user names: decoders, sampling rules, constraints and schedules. Each is an object, a key
of the catalogue, or "key:name=value,name=value"."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

from anydecode import catalogue
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.engine.goodput import ServerGoodput
from anydecode.engine.schedule import Schedule
from anydecode.errors import InvalidRequestError
from anydecode.sampling.preset import SamplerPreset

if TYPE_CHECKING:
    from anydecode.models.opening import WeightFormat

Kind = TypeVar("Kind")

#: How many decoders (key, parameters and namespace) keep what they have learned.
MOST_DECODERS = 256


class Methods:
    """The decoders that were asked for; each keeps what it learns from the requests of a namespace.
    `drafting` says how much all of them together may draft."""

    def __init__(self, drafting: ServerGoodput | None = None) -> None:
        self.drafting = drafting
        self._decoders: dict[tuple[str, Hashable], Decoder] = {}

    def find(
        self, choice: str | Decoder | SamplerPreset, namespace: Hashable = None
    ) -> Decoder | SamplerPreset | Constraint:
        """What `choice` names; a sampler or a constraint stands for plain decoding under it."""
        if not isinstance(choice, str):
            return choice
        found = self._decoders.pop((choice, namespace), None)
        if found is None:
            built: Decoder | SamplerPreset | Constraint = _built(
                choice, "a decoder", Decoder, SamplerPreset, Constraint
            )
            if not isinstance(built, Decoder):
                return built
            found = built if self.drafting is None else self.drafting.over(built)
        self._decoders[choice, namespace] = found  # the most recently used stands last
        if len(self._decoders) > MOST_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        return found

    def decoder(self, choice: str | Decoder, namespace: Hashable = None) -> Decoder:
        """The decoder that `choice` names, and nothing else."""
        found = self.find(choice, namespace)
        if isinstance(found, SamplerPreset):
            raise InvalidRequestError(f"{found.key!r} is a sampler, not a decoder: sampler=")
        if isinstance(found, Constraint):
            raise InvalidRequestError(f"{choice!r} is a constraint, not a decoder: constraint=")
        return found

    def resolve(
        self,
        choice: str | Decoder | SamplerPreset,
        rules: Seq[str | SamplerPreset],
        constraint: Any,
        namespace: Hashable,
    ) -> tuple[Decoder, list[SamplerPreset], Any]:
        """What decodes, under which sampling rules and which constraint."""
        found = self.find(choice, namespace)
        if isinstance(found, SamplerPreset):
            rules = [*rules, found]
            found = self.decoder("autoregressive", namespace)
        elif isinstance(found, Constraint):
            if constraint is not None:
                name = choice if isinstance(choice, str) else type(choice).__name__
                raise InvalidRequestError(f"{name} is a constraint, and there is another one")
            constraint = found
            found = self.decoder("autoregressive", namespace)
        if isinstance(constraint, str):
            constraint = build_as(constraint, Constraint)  # type: ignore[type-abstract]
        return found, [build_as(rule, SamplerPreset) for rule in rules], constraint

    def clear(self) -> None:
        """Forget what decoders have learned."""
        self._decoders.clear()


def build_as(choice: Any, kind: type[Kind]) -> Kind:
    """`choice`, or what it names in the catalogue."""
    wanted = "a schedule" if kind is Schedule else f"of kind {kind.__name__}"
    if isinstance(choice, str):
        built: Kind = _built(choice, wanted, kind)
        return built
    if not isinstance(choice, kind):
        raise InvalidRequestError(f"'it' is a {type(choice).__name__}, not {wanted}")
    return choice


def weight_format(choice: str | WeightFormat | None) -> str | WeightFormat | None:
    """The number format that a dtype names in the catalogue; any other dtype as it is."""
    if not isinstance(choice, str) or choice.partition(":")[0] not in catalogue.entries():
        return choice
    from anydecode.models.opening import WeightFormat

    return build_as(choice, WeightFormat)  # type: ignore[type-abstract]


def _built(choice: str, wanted: str, *kinds: type) -> Any:
    """What `choice` names, if it is of one of `kinds`. Another kind is refused before it is built,
    for building may open files, and after it where only that tells."""
    key, _, rest = choice.partition(":")
    given = parameters(rest, catalogue.text_parameters(key))
    declared = catalogue.kind_of(key)
    if declared is not None and not any(
        issubclass(declared, kind) or issubclass(kind, declared) for kind in kinds
    ):
        raise InvalidRequestError(f"{key!r} is a {declared.__name__}, not {wanted}")
    built = catalogue.build(key, **given)
    if not isinstance(built, kinds):
        raise InvalidRequestError(f"{key!r} is a {type(built).__name__}, not {wanted}")
    return built


def parameters(text: str, texts: Collection[str] = ()) -> dict[str, Any]:
    """`size=5,name=abc` as keyword arguments; numbers, true/false and null are read as such, of the
    names in `texts` null alone."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequestError(f"{part!r} is no name=value")
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = value.strip()
        found[name.strip()] = value.strip() if name.strip() in texts and read is not None else read
    return found
