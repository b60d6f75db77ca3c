"""Self-infilling code generation (Zheng et al., arXiv:2311.17972): where a model that can fill in
the middle becomes unsure, it says the end first and then what leads there."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.candidates import log_sum_exp
from anydecode.sampling.constrained import constraint_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence

#: How models that fill in the middle name the beginning, the end, the middle and the middle's end.
SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ("<PRE>", "<SUF>", "<MID>", "<EOT>"),
)


@dataclass(frozen=True)
class Sentinels:
    """Token ids. `ends` close a middle or a suffix."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]

    @property
    def own(self) -> tuple[int, int, int]:
        return self.prefix, self.suffix, self.middle


@dataclass
class Filled:
    """What must survive a restart. `left` counts the answer's tokens that were said from left to
    right; `suffix` and `middle` are tokens."""

    phase: str = "left"
    left: int = 0
    suffix: list[int] = field(default_factory=list)
    middle: list[int] = field(default_factory=list)
    cycle: int = 0


@register(
    Card(
        "self-infill",
        "constraint",
        paper="Self-Infilling Code Generation (arXiv:2311.17972)",
        exactness="lossy",
        summary="Says the end first where it is unsure, then the middle; or fills a given gap.",
        needs=("fill-in-the-middle model",),
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=(
            "interrupts for sure below the threshold; the released code can also do so by chance",
            "a constraint holds for what is filled into a given gap, and is refused without one",
            "a suffix is kept as it was said, not dedented",
        ),
    )
)
class SelfInfill(Decoder):
    """Decodes from left to right until no token has a probability of `threshold`; then, behind
    `begins`, a suffix of at most `longest` tokens, and the middle between the two. `cycles` above 1
    says suffix and middle again, each behind the other. With `suffix` the gap before that text is
    filled, and nothing else. `sentinels` are the model's four names, separated by spaces."""

    def __init__(
        self,
        threshold: float = 0.1,
        begins: str = "return",
        longest: int = 64,
        cycles: int = 1,
        suffix: str = "",
        sentinels: str = "",
    ) -> None:
        if not 0 <= threshold <= 1 or longest < 1 or cycles < 1:
            raise InvalidRequestError(
                "self-infill needs a threshold of 0 to 1, and longest and cycles of at least 1"
            )
        if sentinels and len(sentinels.split()) != 4:
            raise InvalidRequestError("sentinels are four names: prefix suffix middle end")
        self.threshold = threshold
        self.begins = begins
        self.longest = longest
        self.cycles = cycles
        self.suffix = suffix
        self.names = (tuple(sentinels.split()),) if sentinels else SENTINELS

    def prepare(self, sequence: Sequence) -> None:
        self._sentinels(sequence)
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("self-infill takes no second prompt")
        if constraint_of(sequence.sampler) is not None and not self.suffix:
            raise UnsupportedCombinationError(
                "self-infill keeps to a constraint only in a given gap: self-infill:suffix=..."
            )

    def decode(self, sequence: Sequence) -> Decoding:
        marks = self._sentinels(sequence)
        state: Filled = sequence.state.setdefault("self-infill", Filled())
        tokenizer = sequence.tokenizers["target"]
        if self.suffix and state.phase == "left":
            state.suffix = tokenizer.encode(self.suffix, special=False)
            state.phase = "middle"
        first = int(sequence.prompt[0] == tokenizer.bos_id)
        prefix = [*sequence.prompt[:first], marks.prefix, *sequence.prompt[first:]]
        if state.phase == "left":
            yield from self._left(sequence, state, marks, prefix)
        while not sequence.finished and state.phase in ("suffix", "middle"):
            said = prefix + sequence.tokens[: state.left]
            if state.phase == "suffix":
                start = tokenizer.encode(self.begins, special=False) if self.begins else []
                state.suffix = state.suffix or list(start)
                behind = [*said, *state.middle, marks.suffix]
                yield from self._grow(sequence, state.suffix, behind, marks, self.longest)
                state.phase, state.middle = "middle", []
            behind = [*said, marks.suffix, *state.suffix, marks.middle]
            yield from self._fill(sequence, state, behind, marks)
        if state.phase == "end" and not sequence.finished:
            done = len(sequence.tokens) - state.left - len(state.middle)
            rest = state.suffix[max(0, done) :]
            sequence.emit(rest, notes=[None] * len(rest))

    def _left(
        self, sequence: Sequence, state: Filled, marks: Sentinels, prefix: list[int]
    ) -> Generator[DecoderAction, Any, None]:
        """From left to right, said at once, until the model is unsure."""
        branch = _branch(sequence, prefix, sequence.tokens)
        while not sequence.finished:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            if likeliest(row) < self.threshold:
                state.left, state.phase = len(sequence.tokens), "suffix"
                break
            token = sequence.sample(sequence.sampler, without(row, marks.own), position)
            branch.tokens.append(token)
            sequence.emit([token], notes=_notes(sequence, row, token))
        branch.release()

    def _fill(
        self, sequence: Sequence, state: Filled, behind: list[int], marks: Sentinels
    ) -> Generator[DecoderAction, Any, None]:
        """The middle: kept back while there are cycles to come, said as it comes in the last."""
        room = max(0, sequence.remaining - (0 if self.suffix else len(state.suffix)))
        if state.cycle + 1 < self.cycles:
            yield from self._grow(sequence, state.middle, behind, marks, room)
            state.cycle, state.phase, state.suffix = state.cycle + 1, "suffix", []
            return
        state.middle = sequence.tokens[state.left :]
        branch = _branch(sequence, behind, state.middle)
        noise = sequence.noise.forked(2 * state.cycle + 2)
        room += len(state.middle)
        while len(state.middle) < room and not sequence.finished:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = sequence.sampler.sample(without(row, marks.own), noise, position)
            if token in marks.ends:
                break
            state.middle.append(token)
            branch.tokens.append(token)
            sequence.emit([token], notes=_notes(sequence, row, token))
        branch.release()
        state.phase = "end"
        if self.suffix:
            state.suffix = []

    def _grow(
        self,
        sequence: Sequence,
        tokens: list[int],
        behind: list[int],
        marks: Sentinels,
        room: int,
    ) -> Generator[DecoderAction, Any, None]:
        """Lengthen `tokens`, which stand behind `behind` and are not said, up to an end or `room`
        of them."""
        state: Filled = sequence.state["self-infill"]
        branch = _branch(sequence, behind, tokens)
        sampler = sequence.sampler.fork()
        for token in tokens:
            sampler.advance(token)
        noise = sequence.noise.forked(2 * state.cycle + 1 + (state.phase == "middle"))
        barred = (marks.prefix, marks.suffix)
        while len(tokens) < room:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = sampler.sample(without(row, barred), noise, position)
            if token in marks.ends or token == marks.middle:
                break
            tokens.append(token)
            branch.tokens.append(token)
            sampler.advance(token)
        branch.release()

    def _sentinels(self, sequence: Sequence) -> Sentinels:
        tokenizer = sequence.tokenizers["target"]
        for names in self.names:
            ids = [special(tokenizer, name) for name in names]
            if None not in ids[:3]:
                prefix, suffix, middle, end = ids
                ends = set(tokenizer.eos_ids) | ({end} if end is not None else set())
                return Sentinels(prefix, suffix, middle, frozenset(ends))  # type: ignore[arg-type]
        raise UnsupportedCombinationError(
            "self-infill needs a model that fills in the middle: this tokenizer has none of the"
            f" known sentinels ({', '.join(names[0] for names in self.names)})"
        )


_specials: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


def special(tokenizer: Tokenizer, name: str) -> int | None:
    """The special token called `name`, or None."""
    if tokenizer not in _specials:
        known = {
            tokenizer.token_text(token): token
            for token in range(tokenizer.vocab_size)
            if tokenizer.is_special(token)
        }
        _specials[tokenizer] = known
    return _specials[tokenizer].get(name)


def likeliest(row: np.ndarray) -> float:
    """The probability of the likeliest token."""
    return float(np.exp(float(row.max()) - log_sum_exp(row.astype(np.float64))))


def without(row: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """A copy of a row in which `tokens` cannot be said."""
    left: np.ndarray = row.copy()
    left[list(tokens)] = -np.inf
    return left


def _branch(sequence: Sequence, prompt: list[int], tokens: list[int]) -> Sequence:
    """A branch with a prompt of its own, and nothing in memory yet."""
    branch = sequence.fork()
    branch.prompt, branch.tokens = prompt, list(tokens)
    return branch


def _notes(sequence: Sequence, row: np.ndarray, token: int) -> list[Any] | None:
    sampler: Sampler = sequence.sampler
    return None if sequence.annotate is None else [sequence.annotate(row, token, sampler)]
