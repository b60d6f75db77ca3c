"""Resolves decoders, samplers, constraints and schedules that a user names. Each is an object, a
catalogue key, or "key:name=value,name=value"."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

from anydecode import catalogue
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, quoted
from anydecode.models.families.weights import DTYPES
from anydecode.sampling.constrained import ConstraintState
from anydecode.sampling.preset import SamplerPreset

if TYPE_CHECKING:
    from anydecode.models.opening import WeightFormat

Kind = TypeVar("Kind")

#: Maximum number of decoders (by key, parameters, files and namespace) whose state is kept.
MAX_DECODERS = 256
#: Maximum memory of what all decoders have learned, in bytes.
MAX_LEARNED_BYTES = 256 << 20


class Methods:
    """The decoders in use; safe for threads. A decoder keeps what it learns from requests,
    separately per namespace. It is built again when a file that a parameter names has changed.

    Args:
        max_learned_bytes: Maximum memory of what all decoders have learned, in bytes.
    """

    def __init__(self, max_learned_bytes: int = MAX_LEARNED_BYTES) -> None:
        self.max_learned_bytes = max_learned_bytes
        self._decoders: dict[tuple[str, Hashable, Hashable], Decoder] = {}
        self._lock = threading.Lock()  # of `_decoders`

    def find(
        self, choice: str | Decoder | SamplerPreset | Constraint, namespace: Hashable = None
    ) -> Decoder | SamplerPreset | Constraint:
        """The method that `choice` names: a decoder, or a sampler or constraint, which mean
        autoregressive decoding with it."""
        if not isinstance(choice, str):
            if not isinstance(choice, Decoder | SamplerPreset | Constraint):
                raise InvalidRequestError(
                    f"decoder is {quoted(choice)}; it must be a key of the catalogue, a Decoder, a"
                    " SamplerPreset or a Constraint"
                )
            return choice
        key = choice, namespace, catalogue.file_versions(choice)
        with self._lock:
            found = self._decoders.pop(key, None)
            if found is None:
                built = build_decoder(choice)
                if not isinstance(built, Decoder):
                    return built
                found = built
            self._decoders[key] = found  # the most recently used is the last
            num_bytes = self._learned_bytes()
            while self._decoders and (
                len(self._decoders) > MAX_DECODERS or num_bytes > self.max_learned_bytes
            ):
                num_bytes -= self._decoders.pop(next(iter(self._decoders))).num_bytes
            return found

    @property
    def learned_bytes(self) -> int:
        """The estimated memory of what all decoders have learned, in bytes."""
        with self._lock:
            return self._learned_bytes()

    def _learned_bytes(self) -> int:
        return sum(decoder.num_bytes for decoder in self._decoders.values())

    def decoder(self, choice: str | Decoder, namespace: Hashable = None) -> Decoder:
        """The decoder that `choice` names. Raises `InvalidRequestError` for other methods."""
        found = self.find(choice, namespace)
        if isinstance(found, SamplerPreset):
            raise InvalidRequestError(
                f"{found.key!r} is a sampler, not a decoder; pass it as sampler="
            )
        if isinstance(found, Constraint):
            raise InvalidRequestError(
                f"{choice!r} is a constraint, not a decoder; pass it as constraint="
            )
        return found

    def resolve(
        self,
        choice: str | Decoder | SamplerPreset | Constraint,
        samplers: Seq[str | SamplerPreset],
        constraint: str | Constraint | ConstraintState | None,
        namespace: Hashable,
    ) -> tuple[Decoder, list[SamplerPreset], Constraint | ConstraintState | None]:
        """The decoder, sampler presets and constraint of a request."""
        found = self.find(choice, namespace)
        if isinstance(found, SamplerPreset):
            samplers = [*samplers, found]
            found = self.decoder("autoregressive", namespace)
        elif isinstance(found, Constraint):
            if constraint is not None:
                name = choice if isinstance(choice, str) else type(choice).__name__
                raise InvalidRequestError(
                    f"decoder={name} is a constraint, but constraint= is set too; set only one"
                )
            constraint = found
            found = self.decoder("autoregressive", namespace)
        if isinstance(constraint, str):
            constraint = build_as(constraint, Constraint)  # type: ignore[type-abstract]
        return found, [build_as(sampler, SamplerPreset) for sampler in samplers], constraint

    def clear(self) -> None:
        """Drop all decoders with what they have learned."""
        with self._lock:
            self._decoders.clear()


_EXPECTED = {
    "Constraint": "a constraint",
    "FfnSplit": "a split of attention and FFNs",
    "ModelSplit": "a split of models",
    "PlacementSearch": "a search of placements",
    "RoleControl": "a control of roles",
    "SamplerPreset": "a sampler",
    "Schedule": "a schedule",
    "ServerGoodput": "a draft policy",
    "WeightFormat": "a weight format",
}


def build_decoder(choice: str) -> Decoder | SamplerPreset | Constraint:
    """The decoder that `choice` names, or the sampler or constraint.

    Raises:
        InvalidRequestError: It names another method or none, or a parameter is wrong.
    """
    built: Decoder | SamplerPreset | Constraint = catalogue.build_as(
        choice, "a decoder", Decoder, SamplerPreset, Constraint
    )
    return built


def build_as(choice: Any, kind: type[Kind]) -> Kind:
    """`choice` itself, or the object of type `kind` that it names in the catalogue."""
    expected = _EXPECTED.get(kind.__name__, f"of kind {kind.__name__}")
    if isinstance(choice, str):
        built: Kind = catalogue.build_as(choice, expected, kind)
        return built
    if not isinstance(choice, kind):
        raise InvalidRequestError(f"{choice!r} is a {type(choice).__name__}, not {expected}")
    return choice


def weight_format(choice: str | WeightFormat | None) -> str | WeightFormat | None:
    """The weight format that a dtype names in the catalogue; other dtypes unchanged."""
    if not isinstance(choice, str) or choice in DTYPES:
        return choice
    if catalogue.lookup(choice.partition(":")[0]) is None:
        return choice
    from anydecode.models.opening import WeightFormat

    return build_as(choice, WeightFormat)  # type: ignore[type-abstract]
