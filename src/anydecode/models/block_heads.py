"""What a block drafter computes slot by slot after its pass: a bias of the logits that depends on
the token before (DSpark: arXiv:2607.05147; DFlash2, by z-lab) or on all tokens before (Domino:
arXiv:2605.29707), and the probability that the slot's token is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.host import to_host
from anydecode.kernels.library import top_k
from anydecode.models.network import BlockHeads, MarkovHead, Network, PrefixHead, SelectorHead


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
        embed: The drafter's embeddings of tokens `[n]`, float32 `[n, hidden_size]`.

    Attributes:
        reads_hidden: Whether `step` needs the slot's hidden state.
        has_confidence: Whether `step` predicts the probability of acceptance.
    """

    def __init__(
        self,
        heads: BlockHeads,
        executor: Callable[[Network], Any],
        embed: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        markov, prefix = heads.markov, heads.prefix
        self._heads = heads
        self._embed = embed
        self._markov: Any = None if markov is None else executor(markov.network)
        self._prefix: Any = None if prefix is None else executor(prefix.network)
        self.has_confidence = heads.confidence is not None
        self.reads_hidden = (
            self.has_confidence
            or prefix is not None
            or heads.selector is not None
            or (markov is not None and markov.kind != "vanilla")
        )

    def step(
        self,
        token: int,
        hidden: np.ndarray | None,
        state: np.ndarray | None = None,
        slot: int = 0,
        logits: np.ndarray | None = None,
    ) -> SlotStep:
        """The bias and the confidence of one slot.

        Args:
            token: The token before that of the slot.
            hidden: The slot's hidden state after the final norm, float32 `[hidden_size]`.
            state: That of the step before, None for the first slot.
            slot: The number of the slot, from 0.
            logits: Those of the slot, float32 `[num_logits]`.
        """
        previous, bias = None, None
        markov, prefix = self._heads.markov, self._heads.prefix
        if prefix is not None:
            state = _advanced(prefix, self._embed(np.array([token], np.int32))[0], state)
            if slot >= prefix.num_free:
                assert hidden is not None
                mixed = prefix.mix @ np.concatenate([hidden, state])
                bias = to_host(self._prefix.head((mixed * _sigmoid(mixed))[None]))[0]
        if markov is not None:
            previous = to_host(self._markov.embed(np.array([token], np.int32)))[0]
            latent, state = _latent(markov, previous, hidden, state)
            bias = to_host(self._markov.head(latent[None]))[0]
        if self._heads.selector is not None:
            assert hidden is not None and logits is not None
            bias = _selection(self._heads.selector, token, hidden, logits)
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


def _selection(
    selector: SelectorHead, token: int, hidden: np.ndarray, logits: np.ndarray
) -> np.ndarray:
    """What is added to the logits of a slot, float32 `[num_logits]`: minus infinity for the tokens
    that are left out."""
    candidates = top_k(logits[None], selector.top_k)[0][0]
    before = dequantize_rows(selector.predecessors, [token])[0] * (selector.hidden @ hidden)
    bias = np.full(len(logits), -np.inf, np.float32)
    bias[candidates] = dequantize_rows(selector.successors, candidates) @ before
    return bias


def _advanced(prefix: PrefixHead, embedding: np.ndarray, state: np.ndarray | None) -> np.ndarray:
    """The state of the gated recurrent unit after one more token, float32 `[width]`."""
    if state is None:
        state = np.zeros(prefix.states.shape[1], np.float32)
    inputs, own = np.split(prefix.inputs @ embedding, 3), np.split(prefix.states @ state, 3)
    reset, update = (_sigmoid(inputs[gate] + own[gate]) for gate in range(2))
    result: np.ndarray = (1 - update) * np.tanh(inputs[2] + reset * own[2]) + update * state
    return result


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result
