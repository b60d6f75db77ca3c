"""Log-probabilities of given text: of a continuation, and of a request's prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import InvalidRequestError
from anydecode.sampling.logprobs import TokenLogprobs, token_logprobs
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.teacher_forcing import score_tokens

#: The log-probabilities of the prompt's tokens (without the first).
PROMPT_KEY: StateKey[list[TokenLogprobs]] = StateKey("request", "prompt_logprobs")


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation, in nats.

    Attributes:
        total: Sum of `logprobs`.
        tokens: Token ids of the continuation.
        logprobs: Log-probability of each token.
        greedy: Whether every token is the most probable one.
    """

    total: float
    tokens: list[int]
    logprobs: list[float]
    greedy: bool


class LikelihoodDecoder(Decoder):
    """A decoder that computes the log-likelihood of `continuation` after `prompt`."""

    def __init__(self, prompt: list[int], continuation: list[int]) -> None:
        if not prompt or not continuation:
            raise InvalidRequestError("score needs a prompt and a continuation that are not empty")
        self.prompt = prompt
        self.continuation = continuation

    @property
    def tokens(self) -> list[int]:
        """The prompt of the sequence: both texts. All tokens but the last are run."""
        return self.prompt + self.continuation

    def decode(self, sequence: Sequence) -> Decoding:
        logprobs: list[float] = []
        greedy: list[bool] = []

        def on_row(row: np.ndarray, token: int) -> None:
            logprobs.append(token_logprobs(row, token).logprob)
            greedy.append(int(np.argmax(row)) == token)

        yield from score_tokens(sequence, self.tokens, len(self.prompt), on_row)
        total = float(np.sum(logprobs))
        self._likelihood = Likelihood(total, self.continuation, logprobs, all(greedy))

    def likelihood(self) -> Likelihood:
        """The result; available when the request is done."""
        return self._likelihood


class PromptLogprobsDecoder(Decoder):
    """Computes the log-probabilities of the prompt's tokens, with `count` alternatives each, then
    runs the decoder `inner`."""

    def __init__(self, inner: Decoder, count: int) -> None:
        self.inner = inner
        self.count = count
        self.requirements = inner.requirements

    def decode(self, sequence: Sequence) -> Decoding:
        logprobs = sequence.state.setdefault(PROMPT_KEY, [])

        def on_row(row: np.ndarray, token: int) -> None:
            logprobs.append(token_logprobs(row, token, self.count))

        if len(logprobs) < len(sequence.prompt) - 1:
            yield from score_tokens(sequence, sequence.prompt, len(logprobs) + 1, on_row)
        elif not sequence.tokens and sequence.repeats_drafts and not sequence.knows_draft_states:
            unscored = sequence.unscored()
            if len(unscored) > 1:  # after a restart: drafts are to be those without it
                yield sequence.score(unscored[:-1], companions=False, samples=False)
        yield from self.inner.decode(sequence)


class EmptyDecoder(Decoder):
    """Generates nothing: the decoder of requests with `max_tokens=0`."""

    requirements = Requirements(causal=None)

    def decode(self, sequence: Sequence) -> Decoding:
        sequence.finish_reason = "length"
        yield from ()
