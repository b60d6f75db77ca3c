"""A correction of a draft model's logits that is trained while texts are generated: shared code of
the methods that adapt their drafter online."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: From logits `[n, vocab_size]` to a loss and its gradient in them.
Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

#: Adam's decay rates of the moments, and the number added to the denominator.
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Steps of Adam (Kingma and Ba, arXiv:1412.6980) on `parameters`, in place, with the learning
    rate `rate`.

    Attributes:
        moments: The averages of each parameter's gradients and of their squares.
        num_steps: Number of steps so far.
    """

    def __init__(self, parameters: dict[str, np.ndarray], rate: float) -> None:
        self.parameters, self.rate = parameters, rate
        self.moments = {
            name: (np.zeros_like(value), np.zeros_like(value)) for name, value in parameters.items()
        }
        self.num_steps = 0

    def step(self, gradients: dict[str, np.ndarray]) -> None:
        """One step along the gradients of all parameters."""
        self.num_steps += 1
        for name, gradient in gradients.items():
            first, second = self.moments[name]
            first += (1 - _BETA1) * (gradient - first)
            second += (1 - _BETA2) * (gradient * gradient - second)
            mean = first / (1 - _BETA1**self.num_steps)
            variance = second / (1 - _BETA2**self.num_steps)
            self.parameters[name] -= self.rate * mean / (np.sqrt(variance) + _EPSILON)


def normed(hidden: np.ndarray) -> np.ndarray:
    """Hidden states `[..., hidden_size]` over the root of their mean square."""
    result: np.ndarray = hidden / np.sqrt((hidden * hidden).mean(-1, keepdims=True) + 1e-6)
    return result


class Correction:
    """A correction added to the draft model's logits: a low-rank function of its last hidden state,
    zero before training. Trained by `Adam`."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, rate: float) -> None:
        bound = hidden_size**-0.5
        uniform = np.random.default_rng(0).uniform
        self.parameters = {
            "down": uniform(-bound, bound, (rank, hidden_size)).astype(np.float32),
            "down_bias": uniform(-bound, bound, rank).astype(np.float32),
            "up": np.zeros((vocab_size, rank), np.float32),
            "up_bias": np.zeros(vocab_size, np.float32),
        }
        self._adam = Adam(self.parameters, rate)

    @property
    def num_bytes(self) -> int:
        """The memory of the parameters with their moments, in bytes."""
        return 3 * sum(array.nbytes for array in self.parameters.values())

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """The correction of the logits, `[..., vocab_size]`, for `hidden` `[..., hidden_size]`."""
        p = self.parameters
        return self._low_rank(normed(hidden)) @ p["up"].T + p["up_bias"]

    def _low_rank(self, x: np.ndarray) -> np.ndarray:
        low: np.ndarray = x @ self.parameters["down"].T + self.parameters["down_bias"]
        return low

    def train(self, hidden: np.ndarray, logits: np.ndarray, loss: Loss, steps: int) -> list[float]:
        """Minimise `loss` of the corrected logits.

        Args:
            hidden: The last hidden states of the examples, float32 `[n, hidden_size]`.
            logits: Their logits, float32 `[n, vocab_size]`.
            loss: From corrected logits to the loss and its gradient in them.
            steps: Number of steps.

        Returns:
            The loss before each step.
        """
        losses = []
        for _ in range(steps):
            value, errors = loss(logits + self(hidden))
            losses.append(value)
            self._step(hidden, errors)
        return losses

    def _step(self, hidden: np.ndarray, errors: np.ndarray) -> None:
        """One step of Adam; `errors` is the gradient of the loss in the corrected logits."""
        x = normed(hidden)
        back = errors @ self.parameters["up"]
        gradients = {
            "down": back.T @ x,
            "down_bias": back.sum(0),
            "up": errors.T @ self._low_rank(x),
            "up_bias": errors.sum(0),
        }
        self._adam.step(gradients)
