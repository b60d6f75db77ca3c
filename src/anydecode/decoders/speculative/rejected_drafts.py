"""What online speculative decoding learns from: rejected drafts, and the updates of a draft model's
weights that follow from them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.decoders.speculative.draft_correction import Adam, Loss
from anydecode.models.transformer import Transformer
from anydecode.models.weight_training import TrainedWeights


@dataclass(eq=False)
class RejectedDraft:
    """A training example from a rejected draft: the draft model's last hidden state `[hidden_size]`
    and logits `[vocab_size]`, and the target's most probable tokens with their probabilities.

    `request` numbers the request, and `text` has the last tokens before the draft,
    which is at `position`.
    """

    hidden: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray
    request: int = 0
    text: Seq[int] = ()
    position: int = 0


def cross_entropy(examples: Seq[RejectedDraft]) -> Loss:
    """The forward cross-entropy to the target's distributions of `examples`, in nats. Tokens that a
    drafter's reduced vocabulary lacks, whose logits are -inf, are left out of them."""
    targets = np.zeros((len(examples), len(examples[0].logits)), np.float32)
    for row, example in zip(targets, examples, strict=True):
        row[example.tokens] = example.probabilities

    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        shifted = logits - logits.max(-1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        learned = np.where(np.isneginf(logits), 0, targets)
        mass = learned.sum(-1, keepdims=True)
        value = float(-(learned * np.where(learned, log_probabilities, 0)).sum(-1).mean())
        return value, (mass * np.exp(log_probabilities) - learned) / len(examples)

    return loss


class WeightUpdates:
    """The weights of a draft model, trained by `Adam` with a learning rate of `rate`."""

    def __init__(self, model: Transformer, rate: float) -> None:
        self.trained = TrainedWeights(model)
        self._adam = Adam(self.trained.parameters, rate)

    @property
    def num_bytes(self) -> int:
        return 4 * sum(array.nbytes for array in self.trained.parameters.values())

    def train(self, examples: Seq[RejectedDraft], steps: int) -> list[float]:
        """Minimise the forward cross-entropy of the draft model to the target at the rejected
        drafts, and let the model run with the result. Returns the loss before each step."""
        groups = grouped(examples)
        losses = []
        for _ in range(steps):
            total = 0.0
            gradients: dict[str, np.ndarray] = {}
            for group in groups:
                value, found = self._gradients(group)
                total += value * len(group)
                for name, gradient in found.items():
                    share = gradient * np.float32(len(group) / len(examples))
                    gradients[name] = gradients[name] + share if name in gradients else share
            losses.append(total / len(examples))
            self._adam.step(gradients)
        self.trained.publish()
        return losses

    def reset(self) -> None:
        """Restore the weights from before the training."""
        self.trained.reset()

    def _gradients(self, group: Seq[RejectedDraft]) -> tuple[float, dict[str, np.ndarray]]:
        """The mean loss of examples of one text, and its gradients."""
        last = max(group, key=lambda example: example.position)
        first = last.position - len(last.text)
        tape, output = self.trained.logits(np.asarray(last.text), first)
        rows = [example.position - first - 1 for example in group]  # predict the next position
        size = min(output.data.shape[1], len(last.logits))
        value, errors = cross_entropy(group)(_fitted(output.data[rows], len(last.logits)))
        gradient = np.zeros_like(output.data)
        np.add.at(gradient[:, :size], rows, errors[:, :size].astype(np.float32))
        tape.backward(output, gradient)
        return value, self.trained.gradients(tape)


def grouped(examples: Seq[RejectedDraft]) -> list[list[RejectedDraft]]:
    """The examples by request. Those whose position is before the text that the last one keeps are
    left out."""
    requests: dict[int, list[RejectedDraft]] = {}
    for example in examples:
        requests.setdefault(example.request, []).append(example)
    groups = []
    for group in requests.values():
        last = max(group, key=lambda example: example.position)
        first = last.position - len(last.text)
        groups.append([example for example in group if example.position > first])
    return groups


def _fitted(rows: np.ndarray, size: int) -> np.ndarray:
    """Logits of another vocabulary size: cut, or with very small ones for further tokens."""
    rows = rows[:, :size]
    return np.pad(rows, ((0, 0), (0, size - rows.shape[1])), constant_values=-1e4)
