"""Simultaneous translation: the source is read word by word, and the target is written meanwhile.

Wait-k (Ma et al., "STACL: Simultaneous Translation with Implicit Anticipation and Controllable
Latency using Prefix-to-Prefix Framework", arXiv:1810.08398) reads k words, then writes and reads
words in turn. A model that was trained for it (EAST: Fu et al., "LLMs Can Achieve High-quality
Simultaneous Machine Translation as Efficiently as Offline") decides by special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, Text, Words, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

POLICIES = ("wait-k", "trained")
#: A part of the target has at most `EXTRA` more words than the part of the source, of so many
#: tokens each.
EXTRA, TOKENS_PER_WORD = 25, 2


@dataclass
class Progress:
    """What a restart needs. It changes between passes only.

    Attributes:
        fed: The tokens behind the beginning of the prompt: words, marks and written tokens.
        num_read: The number of words that have been read.
        first_read: The number of words that had been read when the last part of the target ended.
        num_written: The number of ended parts of the target.
        part: The tokens of the part that is being written; None while words are read.
        asks: Whether the model is to be asked for its decision on the last word.
    """

    fed: list[int] = field(default_factory=list)
    num_read: int = 0
    first_read: int = 0
    num_written: int = 0
    part: list[int] | None = None
    asks: bool = False


_STATE: StateKey[Progress] = StateKey("simul-mt", "progress")


@register(
    Card(
        "simul-mt",
        "search",
        paper="STACL (arXiv:1810.08398); LLMs Can Achieve High-quality Simultaneous Machine"
        " Translation as Efficiently as Offline (arXiv:2504.09570)",
        exactness="lossy",
        summary="Reads a source word by word and writes its translation meanwhile, by wait-k or by"
        " the decisions of a trained model.",
        works_with=("penalties", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "the whole source is in the prompt, of which no word is read before its time; words are"
            " split at white space",
            "wait-k interleaves words and parts too, so that nothing is computed again; the paper's"
            " is for models with an encoder",
            "with wait-k a part of the target is one word, and one that the model ends at once is"
            " empty",
            "no part is forced at the ends of sentences, as the authors' document mode does, and"
            " none ends after 128 tokens, the default of their script",
            "`anydecode train interleaved` trains a low-rank adapter on given parts, not all"
            " weights on the authors' data; the marks are tokens that the model has",
        ),
        remote={
            "policy": Words(POLICIES),
            "k": Range(1, 1024),
            "source": Text(200),
            "end_of_read": Text(64),
            "end_of_write": Text(64),
        },
    )
)
class SimulMt(Decoder):
    """Interleaves words of the source with parts of the target: words, `end_of_read`, a part,
    `end_of_write`, words, ... The text is the parts.

    With `policy` "wait-k", `k` words are read before the first word is written, and one before each
    further one. With "trained", the model is asked after each word: a part is written if its most
    probable token, the ends of text and part left out, is `end_of_read`. A part goes on to
    `end_of_write`, or to twice as many tokens as the number of words read for it plus 25. When all
    words are read, the rest is written; with "trained" as one more part.

    With tracing, each pass that writes has the tokens and how many words had been read: its delay.
    See `average_lagging`.

    Args:
        policy: "wait-k" or "trained".
        k: How many words the target stays behind.
        source: The source begins behind the last occurrence of this text in the prompt; "": behind
            the last special token, or with the prompt.
        end_of_read: The mark behind the words; one token if the policy is "trained".
        end_of_write: The mark behind a part; one token if the policy is "trained".
    """

    def __init__(
        self,
        policy: str = "wait-k",
        k: int = 3,
        source: str = "",
        end_of_read: str = "<|end-of-read|>",
        end_of_write: str = "<|end-of-write|>",
    ) -> None:
        if policy not in POLICIES or k < 1 or not end_of_read or not end_of_write:
            raise InvalidRequestError(
                f"simul-mt needs the policy wait-k or trained, k of at least 1 and two marks, not"
                f" {policy!r}, {k}, {end_of_read!r} and {end_of_write!r}"
            )
        self.policy = policy
        self.k = k
        self.source = source
        self.marks = (end_of_read, end_of_write)

    def prepare(self, sequence: Sequence) -> None:
        if constraint_of(sequence.sampler) is not None or sequence.companion_prompts:
            raise UnsupportedCombinationError(
                "simul-mt reads the prompt in parts: it works with no constraint and no second"
                " prompt"
            )
        if self.policy == "trained" and not sequence.tokenizers[TARGET].eos_ids:
            raise UnsupportedCombinationError(
                "simul-mt:policy=trained needs a tokenizer with an end token"
            )
        self.mark_tokens(sequence.tokenizers[TARGET])
        split_source(sequence.tokenizers[TARGET], sequence.prompt, self.source)

    def decode(self, sequence: Sequence) -> Decoding:
        tokenizer = sequence.tokenizers[TARGET]
        read, write = self.mark_tokens(tokenizer)
        start, words = split_source(tokenizer, sequence.prompt, self.source)
        state = sequence.state.setdefault(_STATE, Progress())
        branch = sequence.fork()
        branch.prompt, branch.tokens = start, state.fed
        branch.align(TARGET)  # the whole prompt may be cached, for its log-probabilities
        while not sequence.finished:
            is_over = state.num_read == len(words)
            if state.part is None and not state.asks:
                state.fed += words[state.num_read]
                state.num_read += 1
                state.asks = self.policy == "trained" and state.num_read < len(words)
                if not state.asks and self._waited(state, len(words)):
                    self._begin(state, read)
                continue
            scores = yield branch.score()
            row = scores.row(-1).copy()
            if state.part is None:
                state.asks = False
                row[[*write, *tokenizer.eos_ids, *_begin_tokens(tokenizer)]] = -np.inf
                if int(row.argmax()) == read[0]:
                    self._begin(state, read)
                continue
            marks = (read[0],) if self.policy == "trained" else ()
            row[[*marks, *_begin_tokens(tokenizer)]] = -np.inf
            token = sequence.sample(sequence.sampler, row, sequence.length)
            if self._ends(tokenizer, state, token, write, is_over):
                state.fed += write
                state.part, state.first_read = None, state.num_read
                state.num_written += 1
                if not is_over:
                    continue
                token = min(tokenizer.eos_ids, default=token)
            else:
                state.fed.append(token)
                state.part.append(token)
            sequence.record_logprobs(row, sequence.length, token, sequence.sampler)
            if sequence.trace is not None:
                sequence.trace.append({"tokens": [token], "num_read": state.num_read})
            sequence.emit([token])
        branch.release()

    def mark_tokens(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """The tokens of both marks.

        Raises:
            UnsupportedCombinationError: The policy is "trained", and a mark is not one token.
        """
        read, write = (tokenizer.encode(mark, special=False) for mark in self.marks)
        if self.policy == "trained" and (len(read), len(write)) != (1, 1):
            raise UnsupportedCombinationError(
                f"simul-mt:policy=trained needs a model whose tokenizer has the marks"
                f" {self.marks[0]!r} and {self.marks[1]!r} as one token each"
            )
        return read, write

    def _waited(self, state: Progress, num_words: int) -> bool:
        """Whether a part is to be written without asking."""
        if state.num_read == num_words:
            return True
        return self.policy == "wait-k" and state.num_read >= self.k + state.num_written

    @staticmethod
    def _begin(state: Progress, mark: list[int]) -> None:
        state.fed += mark
        state.part = []

    def _ends(
        self, tokenizer: Tokenizer, state: Progress, token: int, write: list[int], is_over: bool
    ) -> bool:
        """Whether the part ends before `token`."""
        assert state.part is not None
        if token in tokenizer.eos_ids or (self.policy == "trained" and token == write[0]):
            return True
        if is_over and self.policy == "wait-k":
            return False
        if len(state.part) >= (state.num_read - state.first_read + EXTRA) * TOKENS_PER_WORD:
            return True
        text = b"".join(map(tokenizer.token_bytes, state.part))
        begins = tokenizer.token_bytes(token)[:1].isspace()
        return self.policy == "wait-k" and begins and bool(text.strip())


def split_source(
    tokenizer: Tokenizer, prompt: list[int], marker: str
) -> tuple[list[int], list[list[int]]]:
    """The tokens before the source, and those of each of its words, which begin with white space.

    Raises:
        InvalidRequestError: The marker is not in the prompt, or there is no word behind it.
    """
    first = 0
    if marker:
        text = b"".join(map(tokenizer.token_bytes, prompt))
        place = text.rfind(marker.encode())
        if place < 0:
            raise InvalidRequestError(f"simul-mt: the prompt has no {marker!r}")
        length = 0
        while length < place + len(marker.encode()):
            length += len(tokenizer.token_bytes(prompt[first]))
            first += 1
    else:
        first = max((i + 1 for i, one in enumerate(prompt) if tokenizer.is_special(one)), default=0)
    words: list[list[int]] = []
    for token in prompt[first:]:
        if not words or tokenizer.token_bytes(token)[:1].isspace():
            words.append([])
        words[-1].append(token)
    if not words:
        raise InvalidRequestError("simul-mt: the prompt has no source")
    return prompt[:first], words


def average_lagging(delays: Seq[int], num_source: int, num_target: int) -> float:
    """By how many words a target lags behind an ideal one that is as fast as the source (AL).

    Args:
        delays: How many words of the source had been read when each word of the target was written.
        num_source: The number of words of the source.
        num_target: The number of words of the reference; with the larger of that and the target's
            own number it is the length-adaptive average lagging (LAAL).

    Returns:
        The mean lag in words, over the words up to the first for which the whole source was read.
    """
    count = next((i for i, one in enumerate(delays, 1) if one >= num_source), len(delays))
    lags = [delays[i] - i * num_source / num_target for i in range(count)]
    return sum(lags) / count


def _begin_tokens(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]
