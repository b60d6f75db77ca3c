"""Self-infilling code generation (Zheng et al., arXiv:2311.17972): if a fill-in-the-middle model is
uncertain, it generates a suffix first and then the middle."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.fill_in import SENTINELS, Sentinels, find_sentinels
from anydecode.sampling.candidates import log_sum_exp
from anydecode.sampling.sampler import Sampler, constraint_of
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey


@dataclass
class InfillState:
    """The state kept across restarts. `left` is the number of tokens generated from left to right;
    `suffix` and `middle` are token ids."""

    phase: str = "left"
    left: int = 0
    suffix: list[int] = field(default_factory=list)
    middle: list[int] = field(default_factory=list)
    cycle: int = 0


_STATE: StateKey[InfillState] = StateKey("self-infill", "state")


@register(
    Card(
        "self-infill",
        "constraint",
        paper="Self-Infilling Code Generation (arXiv:2311.17972)",
        exactness="lossy",
        summary="Generates the suffix first if the model is uncertain, then the middle; or fills a"
        " given gap.",
        needs=("fill-in-the-middle model",),
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=(
            "always interrupts below the threshold; the released code can also do so at random",
            "a constraint applies to the text filled into a given gap, and is rejected without one",
            "a suffix is kept as generated, not dedented",
        ),
        remote={
            "threshold": Range(0, 1),
            "begins": Text(64),
            "max_middle": Range(1, 4096),
            "cycles": Range(1, 4),
            "suffix": Text(512),
        },
    )
)
class SelfInfill(Decoder):
    """Generates from left to right until the model is uncertain, then a suffix, then the middle.

    Args:
        threshold: Left-to-right generation stops if no token has this probability.
        begins: Text with which the suffix starts.
        max_middle: Maximum length of the suffix, in tokens.
        cycles: How often suffix and middle are generated, each given the other.
        suffix: If given, only the gap before this text is filled.
        sentinels: The names of the model's prefix, suffix, middle and end tokens, separated by
            spaces; by default those of known models.
    """

    def __init__(
        self,
        threshold: float = 0.1,
        begins: str = "return",
        max_middle: int = 64,
        cycles: int = 1,
        suffix: str = "",
        sentinels: str = "",
    ) -> None:
        if not 0 <= threshold <= 1 or max_middle < 1 or cycles < 1:
            raise InvalidRequestError(
                "self-infill needs a threshold from 0 to 1, and max_middle and cycles of at least 1"
            )
        if sentinels and len(sentinels.split()) != 4:
            raise InvalidRequestError(
                f"sentinels must be four names (prefix suffix middle end), not {sentinels!r}"
            )
        self.threshold = threshold
        self.begins = begins
        self.max_middle = max_middle
        self.cycles = cycles
        self.suffix = suffix
        self.names = (tuple(sentinels.split()),) if sentinels else SENTINELS

    def prepare(self, sequence: Sequence) -> None:
        self._sentinels(sequence)
        if sequence.companion_prompts:
            raise UnsupportedCombinationError("self-infill does not support a second prompt")
        if constraint_of(sequence.sampler) is not None and not self.suffix:
            raise UnsupportedCombinationError(
                "self-infill supports a constraint only for a given gap: self-infill:suffix=..."
            )

    def decode(self, sequence: Sequence) -> Decoding:
        sentinel_ids = self._sentinels(sequence)
        state = sequence.state.setdefault(_STATE, InfillState())
        tokenizer = sequence.tokenizers["target"]
        if self.suffix and state.phase == "left":
            state.suffix = tokenizer.encode(self.suffix, special=False)
            state.phase = "middle"
        num_bos = int(sequence.prompt[0] == tokenizer.bos_id)
        prefix = [*sequence.prompt[:num_bos], sentinel_ids.prefix, *sequence.prompt[num_bos:]]
        if state.phase == "left":
            yield from self._generate_left(sequence, state, sentinel_ids, prefix)
        while not sequence.finished and state.phase in ("suffix", "middle"):
            context = prefix + sequence.tokens[: state.left]
            if state.phase == "suffix":
                start = tokenizer.encode(self.begins, special=False) if self.begins else []
                state.suffix = state.suffix or list(start)
                prompt = [*context, *state.middle, sentinel_ids.suffix]
                yield from self._extend(
                    sequence, state.suffix, prompt, sentinel_ids, self.max_middle
                )
                state.phase, state.middle = "middle", []
            prompt = [*context, sentinel_ids.suffix, *state.suffix, sentinel_ids.middle]
            yield from self._generate_middle(sequence, state, prompt, sentinel_ids)
        if state.phase == "end" and not sequence.finished:
            num_suffix_emitted = len(sequence.tokens) - state.left - len(state.middle)
            remaining_suffix = state.suffix[max(0, num_suffix_emitted) :]
            sequence.emit(remaining_suffix, logprobs=[None] * len(remaining_suffix))

    def _generate_left(
        self, sequence: Sequence, state: InfillState, sentinel_ids: Sentinels, prefix: list[int]
    ) -> Generator[DecoderAction, Any, None]:
        """Generates and emits tokens from left to right until the model is uncertain."""
        branch = _branch(sequence, prefix, sequence.tokens)
        while not sequence.finished:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            if max_probability(row) < self.threshold:
                state.left, state.phase = len(sequence.tokens), "suffix"
                break
            token = sequence.sample(
                sequence.sampler, with_banned(row, sentinel_ids.infill_tokens), position
            )
            branch.tokens.append(token)
            sequence.emit([token], logprobs=_notes(sequence, row, token))
        branch.release()

    def _generate_middle(
        self, sequence: Sequence, state: InfillState, prompt: list[int], sentinel_ids: Sentinels
    ) -> Generator[DecoderAction, Any, None]:
        """Generates the middle: held back while cycles remain, emitted at once in the last one."""
        max_tokens = max(0, sequence.remaining - (0 if self.suffix else len(state.suffix)))
        if state.cycle + 1 < self.cycles:
            yield from self._extend(sequence, state.middle, prompt, sentinel_ids, max_tokens)
            state.cycle, state.phase, state.suffix = state.cycle + 1, "suffix", []
            return
        state.middle = sequence.tokens[state.left :]
        branch = _branch(sequence, prompt, state.middle)
        noise = sequence.noise.forked(2 * state.cycle + 2)
        max_tokens += len(state.middle)
        while len(state.middle) < max_tokens and not sequence.finished:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = sequence.sampler.sample(
                with_banned(row, sentinel_ids.infill_tokens), noise, position
            )
            if token in sentinel_ids.ends:
                break
            state.middle.append(token)
            branch.tokens.append(token)
            sequence.emit([token], logprobs=_notes(sequence, row, token))
        branch.release()
        state.phase = "end"
        if self.suffix:
            state.suffix = []

    def _extend(
        self,
        sequence: Sequence,
        tokens: list[int],
        prompt: list[int],
        sentinel_ids: Sentinels,
        max_tokens: int,
    ) -> Generator[DecoderAction, Any, None]:
        """Extends `tokens` after `prompt`, without emitting them, up to an end token or
        `max_tokens` tokens."""
        state = sequence.state[_STATE]
        branch = _branch(sequence, prompt, tokens)
        sampler = sequence.sampler.fork()
        for token in tokens:
            sampler.advance(token)
        noise = sequence.noise.forked(2 * state.cycle + 1 + (state.phase == "middle"))
        banned_tokens = (sentinel_ids.prefix, sentinel_ids.suffix)
        while len(tokens) < max_tokens:
            scores = yield branch.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = sampler.sample(with_banned(row, banned_tokens), noise, position)
            if token in sentinel_ids.ends or token == sentinel_ids.middle:
                break
            tokens.append(token)
            branch.tokens.append(token)
            sampler.advance(token)
        branch.release()

    def _sentinels(self, sequence: Sequence) -> Sentinels:
        found = find_sentinels(sequence.tokenizers["target"], self.names)
        if found is not None:
            return found
        raise UnsupportedCombinationError(
            "self-infill needs a fill-in-the-middle model: this tokenizer has none of the known"
            f" sentinels ({', '.join(names[0] for names in self.names)})"
        )


def max_probability(row: np.ndarray) -> float:
    """The maximum token probability of a row of logits."""
    return float(np.exp(float(row.max()) - log_sum_exp(row.astype(np.float64))))


def with_banned(row: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """A copy of a row of logits with `tokens` set to -inf."""
    left: np.ndarray = row.copy()
    left[list(tokens)] = -np.inf
    return left


def _branch(sequence: Sequence, prompt: list[int], tokens: list[int]) -> Sequence:
    """A branch with its own prompt."""
    branch = sequence.fork()
    branch.prompt, branch.tokens = prompt, list(tokens)
    branch.align(TARGET)
    return branch


def _notes(sequence: Sequence, row: np.ndarray, token: int) -> list[Any] | None:
    sampler: Sampler = sequence.sampler
    return (
        None
        if sequence.compute_logprobs is None
        else [sequence.compute_logprobs(row, token, sampler)]
    )
