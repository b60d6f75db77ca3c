"""Oracle test of mtp (arXiv:2412.19437): the chains that follow from the module's tensors and the
target's states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.eagle import Cache, Drafting
from anydecode.certification.oracles.speculative.state_drafters import (
    Drafter,
    Oracle,
    Path,
    TargetStates,
    compare_trees,
)
from anydecode.certification.rounds import plain_token
from anydecode.certification.tiny_heads import MTP_LAYOUTS, MTP_PARTS, mtp_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    layout: partial(mtp_checkpoint, layout=layout) for layout in MTP_LAYOUTS
}


class Module(Drafting):
    """A module in float64, row by row, from its tensors."""

    def __init__(self, checkpoint: Checkpoint, target: Network) -> None:
        found = (n for n, names in MTP_LAYOUTS.items() if _has(checkpoint, names[1] + names[2]))
        self.layout = next(found)
        layer, tensors = MTP_LAYOUTS[self.layout][0], dict(checkpoint.tensors)
        for part, other in MTP_PARTS.get(self.layout, {}).items():
            for name in [one for one in tensors if one.startswith(f"{layer}{other}.")]:
                tensors[name.replace(f"{layer}{other}.", f"{layer}{part}.")] = tensors[name]
        super().__init__(replace(checkpoint, tensors=tensors), target)

    def row(
        self, cache: Cache, token: int, state: np.ndarray, position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds a row to the cache; returns its logits and the module's state."""
        layer, prefix, *norms, projection, last = MTP_LAYOUTS[self.layout]
        embedded = self.target.weights.embedding.data[token].astype(np.float64)
        pair = [
            self._norm(x, prefix + name) for x, name in zip((embedded, state), norms, strict=True)
        ]
        cache.positions.append(position)
        joined = np.concatenate(pair[::-1] if self.layout == "mimo" else pair)
        x = self.tensors[f"{prefix}{projection}.weight"] @ joined
        name = layer.rstrip(".")
        x = self._layer(cache, 0, name, x, self._norm(x, f"{name}.input_layernorm"))
        y = self._norm(x, prefix + last)
        return self.target.weights.head.data.astype(np.float64) @ y, y


def _has(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.weight" in checkpoint.tensors


def drafted_by(size: int) -> Oracle:
    """The paths of a chain of `size` tokens."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        module, forward, cache = Module(checkpoint, target), TargetStates(target), Cache()
        states = [forward.normed(forward.states(token)[-1]) for token in text[:-1]]
        for position, (token, before) in enumerate(zip(text[1:], states, strict=True), 1):
            logits, state = module.row(cache, token, before, position)
        chain = [plain_token(logits.astype(np.float32), len(text), temperature)]
        while len(chain) < size:
            position = len(text) + len(chain)
            logits, state = module.row(cache, chain[-1], state, position - 1)
            chain.append(plain_token(logits.astype(np.float32), position, temperature))
        return [tuple(chain[: count + 1]) for count in range(size)]

    return paths


@oracle_test("mtp")
def mtp() -> Iterator[Check]:
    """The chains equal the oracle's in every layout."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "mtp", drafter, drafted_by(3))
    drafter, key = mtp_checkpoint, "mtp:size=1"
    yield from compare_trees("nextn", key, drafter, drafted_by(1), is_accepted=False)
