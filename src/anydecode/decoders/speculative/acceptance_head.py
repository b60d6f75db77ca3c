"""A head on a draft model's last hidden state that predicts whether a draft is accepted (Huang et
al., "SpecDec++", arXiv:2405.19715), trained while texts are generated, or before (`anydecode train
acceptance-head`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from anydecode.decoders.speculative.draft_correction import Adam, normed
from anydecode.kernels.arithmetic import softmax
from anydecode.models.acceptance_head import AcceptanceWeights

#: The residual block is applied this often, as in the head that the paper's code releases.
NUM_LAYERS = 3
#: Weight of rejections in the loss; that of acceptances is 1.
REJECTION_WEIGHT = 6.0
#: Number of new examples that start a run of training, of the last ones that it reads, and of its
#: steps.
BATCH, MEMORY, STEPS = 32, 256, 16


class AcceptanceHead:
    """x + silu(W x + b) three times with the same W, then two logits: of rejection and acceptance.

    Args:
        hidden_size: Of the draft model.
        rate: Learning rate of Adam.
        parameters: The trained ones, which are copied; None: random ones.
    """

    def __init__(
        self, hidden_size: int, rate: float, parameters: Mapping[str, np.ndarray] | None = None
    ) -> None:
        bound = hidden_size**-0.5
        uniform = np.random.default_rng(0).uniform
        self.parameters = {
            "block": uniform(-bound, bound, (hidden_size, hidden_size)).astype(np.float32),
            "block_bias": uniform(-bound, bound, hidden_size).astype(np.float32),
            "output": uniform(-bound, bound, (2, hidden_size)).astype(np.float32),
            "output_bias": np.zeros(2, np.float32),
        }
        if parameters is not None:
            self.parameters = {name: parameters[name].copy() for name in self.parameters}
        self.adam = Adam(self.parameters, rate)

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """The acceptance probabilities, `[...]`, of drafts with the states `hidden` `[...,
        hidden_size]`."""
        return softmax(self._logits(self._states(hidden)[-1]))[..., 1]

    def train(self, hidden: np.ndarray, labels: np.ndarray, steps: int) -> list[float]:
        """Minimise the weighted cross-entropy.

        Args:
            hidden: The states of the examples, float32 `[n, hidden_size]`.
            labels: The probabilities that they are accepted, float32 `[n]`.
            steps: Number of steps.

        Returns:
            The loss before each step.
        """
        weights = np.stack([REJECTION_WEIGHT * (1 - labels), labels], -1)
        weights /= weights.sum()
        losses = []
        for _ in range(steps):
            states = self._states(hidden)
            probabilities = softmax(self._logits(states[-1]))
            losses.append(-float((weights * np.log(np.maximum(probabilities, 1e-30))).sum()))
            errors = weights.sum(-1, keepdims=True) * probabilities - weights
            self.adam.step(self._gradients(states, errors))
        return losses

    def _states(self, hidden: np.ndarray) -> list[np.ndarray]:
        """The normed states, then the output of every block."""
        p, states = self.parameters, [normed(hidden)]
        for _ in range(NUM_LAYERS):
            z = states[-1] @ p["block"].T + p["block_bias"]
            states.append(states[-1] + z * _sigmoid(z))
        return states

    def _logits(self, state: np.ndarray) -> np.ndarray:
        logits: np.ndarray = state @ self.parameters["output"].T + self.parameters["output_bias"]
        return logits

    def _gradients(self, states: list[np.ndarray], errors: np.ndarray) -> dict[str, np.ndarray]:
        """The gradients of the parameters; `errors` is that of the logits `[n, 2]`."""
        p = self.parameters
        gradients = {
            "block": np.zeros_like(p["block"]),
            "block_bias": np.zeros_like(p["block_bias"]),
            "output": errors.T @ states[-1],
            "output_bias": errors.sum(0),
        }
        back = errors @ p["output"]
        for x in reversed(states[:-1]):
            z = x @ p["block"].T + p["block_bias"]
            s = _sigmoid(z)
            inner = back * (s + z * s * (1 - s))
            gradients["block"] += inner.T @ x
            gradients["block_bias"] += inner.sum(0)
            back = back + inner @ p["block"]
        return gradients


def _sigmoid(z: np.ndarray) -> np.ndarray:
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * z))
    return result


class OnlineHead:
    """An `AcceptanceHead` with the examples that it learns from. It is None before the first run of
    training, unless it begins with stored weights; `rate` 0 leaves it as it is."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.head: AcceptanceHead | None = None
        self.examples: deque[tuple[np.ndarray, float]] = deque(maxlen=MEMORY)
        self.num_new = 0

    def begin(self, stored: AcceptanceWeights) -> None:
        """Begin with stored weights, unless there is a head."""
        if self.head is None:
            parameters = stored.parameters
            self.head = AcceptanceHead(len(parameters["block"]), self.rate, parameters)

    def add(self, hidden: np.ndarray, label: float) -> None:
        """Store a draft's state, float32 `[hidden_size]`, and the probability that it is
        accepted."""
        self.examples.append((hidden, label))
        self.num_new += 1

    def train(self) -> None:
        """Train if there are enough new examples."""
        if not self.rate or self.num_new < BATCH:
            return
        hidden = np.stack([state for state, _ in self.examples])
        labels = np.array([label for _, label in self.examples], np.float32)
        if self.head is None:
            self.head = AcceptanceHead(hidden.shape[1], self.rate)
        self.head.train(hidden, labels, STEPS)
        self.num_new = 0

    @property
    def num_bytes(self) -> int:
        """The estimated memory of examples and parameters with their moments, in bytes."""
        examples = sum(state.nbytes for state, _ in self.examples)
        arrays = () if self.head is None else self.head.parameters.values()
        return examples + 3 * sum(array.nbytes for array in arrays)
