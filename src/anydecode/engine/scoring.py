"""Log-probabilities of given text: of a continuation, and of a request's own prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.sampling.logprobs import TokenLogprobs, token_logprobs
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Rows scored at a time, so that logits of a long text never stand in memory at once.
CHUNK = 64
#: Where a sequence's state keeps the log-probabilities of its prompt's tokens, but the first.
PROMPT_KEY = "prompt_logprobs"


@dataclass(frozen=True)
class Likelihood:
    """Natural logarithms. `greedy` tells whether the text is what greedy decoding would say."""

    total: float
    tokens: list[int]
    logprobs: list[float]
    greedy: bool


class Scoring(Decoder):
    """Scores the tokens of `continuation` behind `prompt`."""

    def __init__(self, prompt: list[int], continuation: list[int]) -> None:
        if not prompt or not continuation:
            raise InvalidRequestError("score needs a prompt and a continuation, both not empty")
        self.prompt = prompt
        self.continuation = continuation

    @property
    def tokens(self) -> list[int]:
        """What the sequence's prompt is: everything but the last token is scored."""
        return self.prompt + self.continuation

    def decode(self, sequence: Sequence) -> Decoding:
        logprobs: list[float] = []
        greedy: list[bool] = []

        def take(row: np.ndarray, token: int) -> None:
            logprobs.append(token_logprobs(row, token).logprob)
            greedy.append(int(np.argmax(row)) == token)

        yield from score_tokens(sequence, self.tokens, len(self.prompt), take)
        self._found = Likelihood(float(np.sum(logprobs)), self.continuation, logprobs, all(greedy))

    def likelihood(self) -> Likelihood:
        """The result, once the engine has run it."""
        return self._found


class PromptScored(Decoder):
    """Scores the prompt's own tokens, with `count` alternatives each, before `inner` decodes."""

    def __init__(self, inner: Decoder, count: int) -> None:
        self.inner = inner
        self.count = count

    def decode(self, sequence: Sequence) -> Decoding:
        found: list[TokenLogprobs] = sequence.state.setdefault(PROMPT_KEY, [])

        def take(row: np.ndarray, token: int) -> None:
            found.append(token_logprobs(row, token, self.count))

        if len(found) < len(sequence.prompt) - 1:
            yield from score_tokens(sequence, sequence.prompt, len(found) + 1, take)
        yield from self.inner.decode(sequence)


class Silent(Decoder):
    """Generates nothing: what a request for 0 tokens runs."""

    causal = None

    def decode(self, sequence: Sequence) -> Decoding:
        sequence.finish_reason = "length"
        yield from ()


def score_tokens(
    sequence: Sequence,
    tokens: list[int],
    first: int,
    take: Callable[[np.ndarray, int], None],
) -> Decoding:
    """Teacher forcing: calls `take(logits, token)` for each of `tokens[first:]`, with the logits
    `[vocab_size]` of the position before it. These rows are computed even where the prefix cache
    holds them; only positions before `first - 1` may come from it. Afterwards the context holds all
    of `tokens` but the last."""
    context = sequence.context()
    context.truncate(min(context.length, first - 1))
    if context.length < first - 1:
        yield sequence.score(tokens[context.length : first - 1], companions=False)
    for start in range(first - 1, len(tokens) - 1, CHUNK):
        stop = min(start + CHUNK, len(tokens) - 1)
        scores = yield sequence.score(tokens[start:stop], rows="all", companions=False)
        for row, token in zip(scores.logits, tokens[start + 1 : stop + 1], strict=True):
            take(row, token)
