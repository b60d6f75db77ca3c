"""A logits processor outside the package: it lowers the logit of the token that was just generated.

anydecode generate --sampler no-echo --prompt "ha ha ha"
anydecode certify no_echo:no_echo
"""

from __future__ import annotations

import numpy as np

from anydecode import Candidates, Card, LogitsProcessor, SamplerPreset, register


class NoEcho(LogitsProcessor):
    """Subtracts `penalty` from the logit of the last generated token."""

    is_stateful = True  # `apply` depends on the text, so every branch of it gets a `fork`

    def __init__(self, penalty: float, last: int | None = None) -> None:
        self.penalty = penalty
        self.last = last

    def apply(self, candidates: Candidates) -> Candidates:
        if self.last is not None:
            index, _ = candidates.positions(np.array([self.last]))
            candidates.writable()[index] -= np.float32(self.penalty)
        return candidates

    def advance(self, token: int) -> None:
        self.last = token

    def fork(self) -> NoEcho:
        return NoEcho(self.penalty, self.last)


@register(
    Card(
        "no-echo",
        "sampling",
        paper="an example",
        exactness="lossy",
        summary="Makes the token that was just generated less likely.",
    )
)
def no_echo(penalty: float = 2.0) -> SamplerPreset:
    """Sampling with `NoEcho`.

    Args:
        penalty: What is subtracted from the logit of the last token.
    """
    return SamplerPreset(
        "no-echo", {"logits_processors": [NoEcho(penalty)]}, needs_temperature=False
    )
