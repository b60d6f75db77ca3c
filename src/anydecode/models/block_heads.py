"""What a block drafter computes slot by slot after its pass (DSpark: arXiv:2607.05147): a bias of
the logits that depends on the token before, and the probability that the slot's token is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anydecode.kernels.host import to_host
from anydecode.models.network import BlockHeads, MarkovHead, Network


class SlotStep(NamedTuple):
    """What the heads say of one slot.

    `bias` is float32 `[num_logits]`, to be added to the slot's logits, or None. `confidence` is the
    predicted probability of acceptance, 1 without a confidence head. `state` is given to the step
    of the next slot.
    """

    bias: np.ndarray | None
    confidence: float
    state: np.ndarray | None


class SlotHeads:
    """The heads of a block drafter.

    Args:
        heads: Their weights.
        executor: Makes the executor of a network.

    Attributes:
        reads_hidden: Whether `step` needs the slot's hidden state.
        has_confidence: Whether `step` predicts the probability of acceptance.
    """

    def __init__(self, heads: BlockHeads, executor: Callable[[Network], Any]) -> None:
        markov = heads.markov
        self._heads = heads
        self._markov: Any = None if markov is None else executor(markov.network)
        self.has_confidence = heads.confidence is not None
        self.reads_hidden = self.has_confidence or (markov is not None and markov.kind != "vanilla")

    def step(
        self, token: int, hidden: np.ndarray | None, state: np.ndarray | None = None
    ) -> SlotStep:
        """The bias and the confidence of one slot.

        Args:
            token: The token before that of the slot.
            hidden: The slot's hidden state after the final norm, float32 `[hidden_size]`.
            state: That of the step before, None for the first slot.
        """
        previous, bias = None, None
        markov = self._heads.markov
        if markov is not None:
            previous = to_host(self._markov.embed(np.array([token], np.int32)))[0]
            latent, state = _latent(markov, previous, hidden, state)
            bias = to_host(self._markov.head(latent[None]))[0]
        return SlotStep(bias, self._confidence(previous, hidden), state)

    def _confidence(self, previous: np.ndarray | None, hidden: np.ndarray | None) -> float:
        confidence = self._heads.confidence
        if confidence is None:
            return 1.0
        assert hidden is not None
        features = hidden
        if confidence.weight.size > hidden.size:
            assert previous is not None
            features = np.concatenate([hidden, previous])
        return float(_sigmoid(features @ confidence.weight + confidence.bias))


def _latent(
    markov: MarkovHead,
    previous: np.ndarray,
    hidden: np.ndarray | None,
    state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """What the second matrix multiplies, float32 `[rank]`, and the next state."""
    if markov.kind == "vanilla":
        return previous, None
    assert hidden is not None and markov.mix is not None and markov.mix_bias is not None
    if markov.kind == "gated":
        inputs = np.concatenate([hidden, previous])
        return _sigmoid(markov.mix @ inputs + markov.mix_bias) * previous, None
    state = np.zeros_like(previous) if state is None else state
    mixed = markov.mix @ np.concatenate([state, previous, hidden]) + markov.mix_bias
    gate, candidate, output = np.split(mixed, 3)
    gate = _sigmoid(gate)
    return np.tanh(output), gate * state + (1 - gate) * np.tanh(candidate)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result
