"""AdaDec (He et al., "Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance",
arXiv:2506.08980).

Decoding is greedy where the model is certain. Where it is not, the most probable tokens are
continued by a few, and the one with the most probable continuation is taken.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import entropy, log_probabilities
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "adadec",
        "search",
        paper="Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance"
        " (arXiv:2506.08980)",
        exactness="lossy",
        summary="Decodes greedily, but where the model is uncertain, continues the most probable"
        " tokens by a few and takes the one with the most probable continuation.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the default threshold was learned for smollm2-135m-instruct on solutions of"
            " HumanEval; the paper's are for other models, on those of BigCodeBench",
            "continuations end where the text would end; that a function ends is said by stop"
            " strings, not known to the method",
            "one text; the authors' code can also keep several",
        ),
        remote={"threshold": Range(0, 64), "k": Range(1, 10), "length": Range(0, 64)},
    )
)
class AdaDec(Decoder):
    """Where the entropy of the next token is below `threshold`, takes the most probable token.
    Otherwise continues each of the `k` most probable tokens greedily by up to `length` tokens, and
    takes the one for which the mean log-probability of the token and its continuation is highest.

    The entropy is that of the model's distribution at temperature 1, without penalties and the
    constraint. Temperature and truncations of the request are ignored. With a large threshold or
    `k` 1 the output is that of greedy decoding. `anydecode train adadec` learns the threshold of a
    model.

    Args:
        threshold: In nats.
        k: How many tokens are continued.
        length: Maximum number of tokens of a continuation.
    """

    requirements = Requirements(can_sample=False, forks_text=True, max_texts=1)

    def __init__(self, threshold: float = 1.75, k: int = 3, length: int = 5) -> None:
        if threshold < 0 or k < 1 or length < 0:
            raise InvalidRequestError(
                "adadec needs threshold and length of at least 0 and k of at least 1, not"
                f" {threshold}, {length} and {k}"
            )
        self.threshold = threshold
        self.k = k
        self.length = length

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        sequence.sampler = Sampler(0.0, sampler.pre_temperature, combiner=sampler.combiner)

    def decode(self, sequence: Sequence) -> Decoding:
        looking = Looking(self.k, self.length, temperature=0.0, reads_logprobs=True)
        while not sequence.finished:
            scores = yield sequence.score()
            row = scores.row(-1)
            if self.is_certain(row):
                sequence.emit([scores.sampled[-1]])
                continue
            row = row.copy()
            found = yield from looking.ahead(sequence, scores)
            before = len(sequence.tokens)
            sums = found.logprobs + [
                text.logprob - total for text, total in zip(found.texts, found.totals, strict=True)
            ]
            means = sums / [text.num_tokens - before for text in found.texts]
            looking.emit(sequence, found, int(means.argmax()), row)

    def is_certain(self, row: np.ndarray) -> bool:
        """Whether the most probable token after logits float32 `[vocab_size]` is taken."""
        return entropy(*log_probabilities(row[row > -np.inf])) < self.threshold
