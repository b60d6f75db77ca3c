"""Superposed decoding (Shen et al., "Superposed Decoding: Multiple Generations from a Single
Autoregressive Inference Pass", arXiv:2405.18400).

Several texts grow with one row per token: the model reads the mean of their last tokens'
embeddings, and n-grams tell which of the predicted tokens fits which text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.branches import TextStopChecker
from anydecode.decoders.search.beam import emit_ranked
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.candidates import descending, largest
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

#: The weights of the n-grams behind contexts of 1 to 5 tokens.
WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
#: How many of the most probable tokens are considered, for each text.
TOKENS_PER_TEXT = 3
#: What a text loses, in nats, where no n-gram fits.
UNKNOWN = 200.0


class Ngrams:
    """How often tokens follow contexts of up to five tokens."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = {}

    def add(self, tokens: Seq[int]) -> None:
        """Count the n-grams of a text."""
        for end in range(1, len(tokens)):
            for size in range(1, min(len(WEIGHTS), end) + 1):
                context = tuple(tokens[end - size : end])
                self.counts.setdefault(context, Counter())[tokens[end]] += 1


@dataclass
class Draft:
    """A text, and the sum of its tokens' interpolated log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    score: float = 0.0


@dataclass
class Drafts:
    """What a restart needs. Changed at the end of a pass only.

    Attributes:
        live: The texts that go on, the best first.
        finished: The best texts that have ended.
        inputs: The mean embeddings that the model has read behind the prompt, or will read next,
            float32 `[hidden_size]` each.
    """

    live: list[Draft] = field(default_factory=lambda: [Draft()])
    finished: list[Draft] = field(default_factory=list)
    inputs: list[np.ndarray] = field(default_factory=list)


_STATE: StateKey[Drafts] = StateKey("superposed", "drafts")


@register(
    Card(
        "superposed",
        "search",
        paper="Superposed Decoding: Multiple Generations from a Single Autoregressive Inference"
        " Pass (arXiv:2405.18400)",
        exactness="lossy",
        summary="Several texts from one row per token: the model reads the mean of their tokens,"
        " and n-grams tell the texts apart.",
        works_with=("batches", "adapters"),
        deviations=(
            "the n-grams are those of the prompt, and of the file `texts`; the paper's are those of"
            " 100,000 documents of RedPajama",
            "the text is emitted when all texts have ended, not while they grow",
            "the search ends when `k` texts have ended",
            "long texts are not reset to one of them from time to time",
        ),
        remote={"k": Range(1, 10), "alpha": Range(0, 1), "temperature": Range(0.02, 10)},
    )
)
class Superposed(Decoder):
    """`k` texts for the price of one.

    The model reads the mean of the embeddings of the texts' last tokens, each with the share of its
    text's probability. Of the predicted distribution, at the temperature, the `3 * k` most probable
    tokens count. In each text a token has the log-probability `(1 - alpha) * ln p(model) + alpha *
    ln p(n-grams)`, where the n-grams behind the text's last 1 to 5 tokens are mixed; one that no
    n-gram has is left out, unless none has any. The `k` best texts go on.

    The request's temperature and truncations are ignored. A request with `n` above 1 receives the
    `n` best texts, whose scores are these sums. With `k` 1 and `alpha` 0 the text is that of greedy
    decoding.

    Args:
        k: How many texts grow, and the largest `n`.
        alpha: The share of the n-grams.
        temperature: The temperature of the model's distribution.
        texts: A file with text whose n-grams count too.
    """

    def __init__(
        self,
        k: int = 3,
        alpha: float = 0.54,
        temperature: float = 0.06,
        texts: str | Path | None = None,
    ) -> None:
        if k < 1 or not 0 <= alpha <= 1 or not temperature > 0:
            raise InvalidRequestError(
                "superposed needs k of at least 1, alpha from 0 to 1 and a temperature above 0, not"
                f" {k}, {alpha} and {temperature}"
            )
        self.k = k
        self.alpha = alpha
        self.temperature = temperature
        self.text = None if texts is None else _read(Path(texts))
        self._of_text: Ngrams | None = None
        self.requirements = Requirements(can_sample=False, max_texts=k)

    @property
    def num_bytes(self) -> int:
        known = self._of_text.counts if self._of_text else {}
        return 200 * len(known)

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if constraint_of(sampler) is not None or sampler.pre_temperature:
            raise UnsupportedCombinationError(
                "superposed predicts the tokens of several texts at once: it works with no"
                " constraint and no penalties"
            )
        if sequence.companion_prompts or sequence.compute_logprobs is not None:
            raise UnsupportedCombinationError(
                "superposed mixes several texts: it works with no second prompt, and its tokens"
                " have no log-probabilities of their own"
            )
        if not hasattr(sequence.model(), "embed"):
            raise UnsupportedCombinationError(
                "superposed needs a model whose embeddings can be read"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.setdefault(_STATE, Drafts())
        own = Ngrams()
        own.add(sequence.prompt)
        tables = [own, self._ngrams(sequence.tokenizers[TARGET])]
        sequence.kv_cache()
        branch = sequence.fork()
        scores = yield branch.score()
        num_read = 0
        while state.live and len(state.finished) < self.k:
            if new := state.inputs[num_read:]:
                num_read = len(state.inputs)
                scores = yield branch.score([-1] * len(new), embeddings=np.stack(new))
            self._grow(sequence, state, scores.row(-1), tables)
        branch.release()
        ranked = sorted([*state.finished, *state.live], key=lambda one: -one.score)[: self.k]
        emit_ranked(sequence, [RankedText(one.score, one.tokens, []) for one in ranked])

    def _ngrams(self, tokenizer: Tokenizer) -> Ngrams:
        """Those of the file."""
        if self._of_text is None:
            self._of_text = Ngrams()
            if self.text is not None:
                self._of_text.add(tokenizer.encode(self.text, special=False))
        return self._of_text

    def _grow(
        self, sequence: Sequence, state: Drafts, row: np.ndarray, tables: list[Ngrams]
    ) -> None:
        """Let every text grow by one token, and mix the next input."""
        scaled = row.astype(np.float64) / self.temperature
        tokens = largest(scaled, TOKENS_PER_TEXT * self.k)
        tokens = tokens[descending(scaled[tokens])]
        logs = scaled[tokens] - scaled[tokens].max()
        logs -= np.log(np.exp(logs).sum())
        longer = [
            Draft([*draft.tokens, int(token)], draft.score + float(score))
            for draft in state.live
            for token, score in zip(
                tokens, self._scores(sequence.prompt, draft, tokens, logs, tables), strict=True
            )
            if score > -math.inf
        ]
        longer = sorted(longer, key=lambda one: -one.score)[: 2 * self.k]
        ended = [one for one in longer if _has_ended(sequence, one)]
        state.live = [one for one in longer if one not in ended][: self.k]
        finished = sorted([*state.finished, *ended], key=lambda one: -one.score)
        state.finished = finished[: self.k]
        if state.live:
            state.inputs.append(self._mixed(sequence, state.live))

    def _scores(
        self,
        prompt: list[int],
        draft: Draft,
        tokens: np.ndarray,
        logs: np.ndarray,
        tables: list[Ngrams],
    ) -> np.ndarray:
        """The interpolated log-probabilities of `tokens` behind a text, -inf for those that no
        n-gram has."""
        if self.alpha == 0:
            return logs
        seen = [*prompt, *draft.tokens][-len(WEIGHTS) :]
        shares = np.zeros(len(tokens))
        for size, weight in enumerate(WEIGHTS[: len(seen)], start=1):
            context = tuple(seen[-size:])
            counts = [one.counts[context] for one in tables if context in one.counts]
            total = sum(sum(count.values()) for count in counts)
            for i, token in enumerate(tokens.tolist()):
                found = sum(count[token] for count in counts)
                shares[i] += weight * found / total if total else 0.0
        scores: np.ndarray = (1 - self.alpha) * logs
        if not shares.any():
            return scores - UNKNOWN
        with np.errstate(divide="ignore"):
            return scores + self.alpha * np.log(shares)

    @staticmethod
    def _mixed(sequence: Sequence, live: list[Draft]) -> np.ndarray:
        """The mean embedding of the last tokens, float32 `[hidden_size]`."""
        model: Any = sequence.model()
        scores = np.array([one.score for one in live])
        weights = np.exp(scores - scores.max())
        vectors = np.asarray(model.embed(np.array([one.tokens[-1] for one in live])), np.float64)
        mixed: np.ndarray = (weights / weights.sum()) @ vectors
        return mixed.astype(np.float32)


def _has_ended(sequence: Sequence, draft: Draft) -> bool:
    """Whether a text ends with its last token."""
    checker = cast(TextStopChecker, sequence.stop_checker).fork()
    _, reason = checker.push(draft.tokens)
    return reason is not None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"superposed: {path} cannot be read as text: {error}") from None
