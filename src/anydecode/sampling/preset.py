"""A sampling rule as a user names it: a key of the catalogue, and the options it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anydecode.errors import InvalidRequestError

#: What every sampler goes together with; each of its cards says so.
WORKS_WITH = (
    "speculation", "constraints", "penalties", "guidance", "logprobs", "batches", "adapters",
)  # fmt: skip


@dataclass(frozen=True)
class SamplerPreset:
    """`options` are fields of `SamplingParams`. `draws`: the rule shapes what is drawn from, so it
    needs a temperature above 0 (1 where the request says none)."""

    key: str
    options: Mapping[str, Any]
    needs_temperature: bool = True

    def apply(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` options with this rule's. Raises `InvalidRequestError` where both set one, or
        where the rule could have no effect."""
        for name in self.options:
            if name in given:
                raise InvalidRequestError(f"{name} is given twice: by itself and by {self.key!r}")
        settled = {**given, **self.options}
        if self.needs_temperature:
            settled.setdefault("temperature", 1.0)
            if settled["temperature"] == 0:
                raise InvalidRequestError(f"{self.key} needs a temperature above 0")
        return settled
