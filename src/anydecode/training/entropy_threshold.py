"""The entropy threshold of AdaDec: learned from how often a model's most probable token is that of
a known solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.sampling.truncation import entropy, log_probabilities
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.teacher_forcing import score_tokens
from anydecode.training.logistic import fit_logistic


@dataclass(frozen=True)
class EntropyThreshold:
    """A learned threshold.

    Attributes:
        threshold: In nats.
        accuracy: How often "the most probable token is right below the threshold, and wrong above"
            holds.
        num_tokens: How many tokens it was learned from.
        share_above: The share of tokens with an entropy of at least the threshold.
    """

    threshold: float
    accuracy: float
    num_tokens: int
    share_above: float


class _Reader(Decoder):
    """Generates nothing; computes the entropy before each token of the prompt from `first` on, and
    whether the token was the most probable one."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.entropies: list[float] = []
        self.hits: list[bool] = []

    def decode(self, sequence: Sequence) -> Decoding:
        def on_row(row: np.ndarray, token: int) -> None:
            self.entropies.append(entropy(*log_probabilities(row)))
            self.hits.append(int(row.argmax()) == token)

        yield from score_tokens(sequence, sequence.prompt, self.first, on_row)
        sequence.finish_reason = "length"


def learn_threshold(
    llm: LLM, pairs: list[tuple[str, str]], report: Callable[[int], None] = lambda done: None
) -> EntropyThreshold:
    """The threshold of a model, from prompts and their solutions.

    Args:
        llm: The model.
        pairs: Prompts and solutions.
        report: Called with the number of pairs that have been read.
    """
    entropies: list[float] = []
    hits: list[bool] = []
    for number, (prompt, solution) in enumerate(pairs, start=1):
        begin = llm.tokenizer.encode(prompt)
        tokens = begin + llm.tokenizer.encode(solution, special=False)
        if begin and len(tokens) > len(begin):
            reader = _Reader(len(begin))
            llm.generate(tokens, decoder=reader, max_tokens=1)
            entropies += reader.entropies
            hits += reader.hits
        report(number)
    return fit_threshold(np.array(entropies), np.array(hits))


def fit_threshold(entropies: np.ndarray, hits: np.ndarray) -> EntropyThreshold:
    """Logistic regression of the hits on the entropies with balanced classes, then the cut of its
    probability, in hundredths, with the best accuracy.

    Args:
        entropies: In nats, float64 `[tokens]`.
        hits: Whether the most probable token was right, bool `[tokens]`.

    Raises:
        InvalidRequestError: All tokens are hits or none is, or hits are not rarer where the entropy
            is higher.
    """
    if not len(hits) or hits.all() or not hits.any():
        raise InvalidRequestError(
            f"no threshold can be learned from {len(hits)} tokens of which {int(hits.sum())} are"
            " the most probable ones: give more solutions"
        )
    [weight], bias = fit_logistic(entropies[:, None], hits, 1.0, is_balanced=True)
    if weight >= 0:
        raise InvalidRequestError(
            "no threshold can be learned: the model is not wrong more often where it is uncertain"
        )
    probabilities = 1 / (1 + np.exp(-(weight * entropies + bias)))
    cuts = np.arange(1, 100) / 100
    accuracies = [float(((probabilities >= cut) == hits).mean()) for cut in cuts]
    best = int(np.argmax(accuracies))
    threshold = float((np.log(cuts[best] / (1 - cuts[best])) - bias) / weight)
    share = float((entropies >= threshold).mean())
    return EntropyThreshold(threshold, accuracies[best], len(hits), share)
