"""Log-likelihood of given text: a decoder that says nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.sampling.logprobs import token_logprobs
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Rows scored at a time, so that logits of a long text never stand in memory at once.
CHUNK = 64


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
        greedy = True
        tokens, first = self.tokens, len(self.prompt) - 1
        sequence.truncate(min(sequence.context().length, first))
        held = sequence.context().length
        if held < first:
            yield sequence.score(tokens[held:first])
        for start in range(first, len(tokens) - 1, CHUNK):
            stop = min(start + CHUNK, len(tokens) - 1)
            scores = yield sequence.score(tokens[start:stop], rows="all")
            for row, token in zip(scores.logits, tokens[start + 1 : stop + 1], strict=True):
                logprobs.append(token_logprobs(row, token).logprob)
                greedy = greedy and int(np.argmax(row)) == token
        self._found = Likelihood(float(np.sum(logprobs)), self.continuation, logprobs, greedy)

    def likelihood(self) -> Likelihood:
        """The result, once the engine has run it."""
        return self._found
