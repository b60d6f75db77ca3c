"""Sampler presets: named sampling rules of the catalogue, and the options they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anydecode.errors import InvalidRequestError

#: `Card.works_with` of all samplers.
WORKS_WITH = (
    "speculation", "constraints", "penalties", "guidance", "logprobs", "batches", "adapters",
)  # fmt: skip
#: The option that several presets may set.
_PROCESSORS = "logits_processors"


@dataclass(frozen=True)
class SamplerPreset:
    """A sampling rule with its parameters.

    Args:
        key: Key of the catalogue.
        options: Fields of `SamplingParams` that the preset sets.
        needs_temperature: Whether the rule only has an effect at a temperature above 0; the default
            temperature is then 1.
    """

    key: str
    options: Mapping[str, Any]
    needs_temperature: bool = True

    def apply(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The request's options `given`, extended by those of this preset. Its logits processors
        run after the given ones.

        Raises:
            InvalidRequestError: If another option is set by both, or if the temperature is 0 and
                the rule would have no effect.
        """
        for name in self.options:
            if name in given and name != _PROCESSORS:
                raise InvalidRequestError(
                    f"{name} is set by the request and by the sampler {self.key!r}; set it once"
                )
        combined = {**given, **self.options}
        if _PROCESSORS in self.options and isinstance(earlier := given.get(_PROCESSORS), Sequence):
            combined[_PROCESSORS] = [*earlier, *self.options[_PROCESSORS]]
        if self.needs_temperature:
            combined.setdefault("temperature", 1.0)
            if combined["temperature"] == 0:
                raise InvalidRequestError(f"{self.key} needs a temperature above 0")
        return combined
