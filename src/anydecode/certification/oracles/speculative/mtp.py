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

#: The layout whose modules read states before the target's norm, and draft one token each.
MIMO = "mimo v2"
#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    **{layout: partial(mtp_checkpoint, layout=layout) for layout in MTP_LAYOUTS},
    f"{MIMO}, three modules": partial(mtp_checkpoint, layout=MIMO, modules=3),
}


class Module(Drafting):
    """Module `number` in float64, row by row, from its tensors."""

    def __init__(self, checkpoint: Checkpoint, target: Network, number: int = 0) -> None:
        self.layout = _layout(checkpoint)
        layer = MTP_LAYOUTS[self.layout][0]
        own = layer.replace(".0.", f".{number}.")
        tensors = {
            name.replace(own, layer): tensor
            for name, tensor in checkpoint.tensors.items()
            if not number or name.startswith(own)
        }
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
        state = x if self.layout == MIMO else y
        return self.target.weights.head.data.astype(np.float64) @ y, state


def _layout(checkpoint: Checkpoint) -> str:
    found = (n for n, names in MTP_LAYOUTS.items() if _has(checkpoint, names[1] + names[2]))
    return next(found)


def _has(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.weight" in checkpoint.tensors


def drafted_by(size: int) -> Oracle:
    """The paths of a chain of `size` tokens."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        forward = TargetStates(target)
        states = [forward.states(token)[-1] for token in text[:-1]]
        if f"{MTP_LAYOUTS[MIMO][0].replace('.0.', '.1.')}eh_proj.weight" in checkpoint.tensors:
            chain = _of_modules(checkpoint, target, text, states, temperature)[:size]
            return [tuple(chain[: count + 1]) for count in range(len(chain))]
        module, cache = Module(checkpoint, target), Cache()
        if module.layout != MIMO:
            states = [forward.normed(state) for state in states]
        for position, (token, before) in enumerate(zip(text[1:], states, strict=True), 1):
            logits, state = module.row(cache, token, before, position)
        chain = [plain_token(logits.astype(np.float32), len(text), temperature)]
        while len(chain) < size:
            position = len(text) + len(chain)
            logits, state = module.row(cache, chain[-1], state, position - 1)
            chain.append(plain_token(logits.astype(np.float32), position, temperature))
        return [tuple(chain[: count + 1]) for count in range(size)]

    return paths


def _of_modules(
    checkpoint: Checkpoint,
    target: Network,
    text: list[int],
    states: list[np.ndarray],
    temperature: float,
) -> list[int]:
    """The token of each of three modules: a row of module i has a token and the state of the target
    i + 1 positions before it."""
    tokens = list(text)
    for number in range(3):
        module, cache = Module(checkpoint, target, number), Cache()
        for position in range(number + 1, len(tokens)):
            before = states[position - number - 1]
            logits, _ = module.row(cache, tokens[position], before, position)
        tokens.append(plain_token(logits.astype(np.float32), len(tokens), temperature))
    return tokens[len(text) :]


@oracle_test("mtp")
def mtp() -> Iterator[Check]:
    """The chains equal the oracle's in every layout, and of several modules of MiMo-V2 each drafts
    the token that it predicts from the target's states."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "mtp", drafter, drafted_by(3))
    drafter, key = mtp_checkpoint, "mtp:size=1"
    yield from compare_trees("nextn", key, drafter, drafted_by(1), is_accepted=False)
