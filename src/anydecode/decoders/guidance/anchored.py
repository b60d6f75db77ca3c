"""Anchored decoding (He et al., "Anchored Decoding: Provably Reducing Copyright Risk for Any
Language Model", arXiv:2602.07120).

Tokens are sampled from a mixture of a risky model and a safe one that is as near to the risky model
as a budget of divergence from the safe one permits. Models with different tokens are mixed byte by
byte.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.byte_reader import END, ByteReader, next_byte
from anydecode.decoders.framework.two_models import refuse_guidance
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.teacher_forcing import score_tokens

#: How many of the prompt's tokens, or bytes, count for its debt: those that the risky model prefers
#: most.
NUM_DEBTS = 5
#: The debt of a prompt over bytes is in tokens of so many bytes.
BYTES_PER_TOKEN = 4
#: By how much rounding may exceed the budget, in nats.
TOLERANCE = 1e-9
#: The solver ends when it knows the weight to this.
_WIDTH = 1e-6
_NEWTON_STEPS, _BISECTIONS = 20, 12


@dataclass(frozen=True)
class Account:
    """The budget of a text, in nats: what the prompt has used, and what the tokens have."""

    debt: float
    spent: float = 0.0

    def granted(self, budget: float, number: int) -> float:
        """What token `number`, from 1, may use at `budget` per token."""
        return max(0.0, number * budget - self.debt - self.spent)

    def charged(self, divergence: float) -> Account:
        """The account after a token."""
        return replace(self, spent=self.spent + divergence)


UNITS = ("token", "byte")
_STATE: StateKey[Account] = StateKey("anchored", "account")
Ratios = Generator[DecoderAction, ActionResult, list[float]]


@register(
    Card(
        "anchored",
        "alignment",
        paper="Anchored Decoding: Provably Reducing Copyright Risk for Any Language Model"
        " (arXiv:2602.07120)",
        exactness="lossy",
        summary="Samples from a model as far as a budget of divergence from a safe model permits.",
        needs=("draft model",),
        works_with=("constraints", "penalties", "logprobs", "batches", "adapters"),
        deviations=(
            "tokens that one of the models excludes are excluded; the divergence is from the safe"
            " model under the same penalties and constraint, and at the same temperature",
            "at temperature 0 the most probable token of the mixture at temperature 1 is taken, for"
            " which there is no guarantee",
            "over bytes, tokens that the tokenizer would not write are dropped when they end; a"
            " draft model with other tokens does not see the prompt's special tokens; and no byte"
            " falls back to a uniform draw, which no budget would account for",
        ),
        remote={"budget": Range(0, 100), "unit": Words(UNITS)},
    )
)
class Anchored(Decoder):
    """Samples each token from `q`, proportional to `safe ** (1 - w) * risky ** w`, where the
    weight w from 0 to 1 is the largest for which the divergence KL(q, safe) is within the budget.

    The target is the risky model, the draft model the safe one. Token t, from 1, has the budget
    `t * budget - debt - spent`: what earlier tokens have left is kept. The debt is the mean of the
    five largest log-ratios of the prompt's tokens, negative ones as 0. So the divergence of all
    texts of T tokens from those of the safe model is at most `T * budget`, in expectation over the
    texts and for each text as the sum of its tokens' divergences.

    With budget 0 the text is sampled from the safe model, and with a large one from the risky one.

    Over bytes, q mixes the models' distributions of the next byte, and the models may have
    different tokens. Every token of the answer is then a single byte, so that `max_tokens` counts
    bytes, and the budget is per byte; the paper's is 0.5. The prompt is read byte by byte.

    Before a token is sampled, the divergence of q is computed again from its probabilities. The
    request fails rather than exceed the budget.

    Args:
        budget: In nats per token or byte (the paper's k).
        unit: "token", or "byte".
    """

    def __init__(self, budget: float = 0.15, unit: str = "token") -> None:
        if budget < 0 or unit not in UNITS:
            raise InvalidRequestError(
                "anchored needs a budget of at least 0, and the unit token or byte, not"
                f" {budget} and {unit!r}"
            )
        self.budget = budget
        self.unit = unit
        self.requirements = Requirements(runners=(DRAFT,), can_translate_vocab=unit == "byte")

    def prepare(self, sequence: Sequence) -> None:
        refuse_guidance(sequence, "anchored")
        if sequence.sampler.post_temperature:
            raise UnsupportedCombinationError(
                "anchored does not work with truncations such as top_p, which would exceed its"
                " budget: leave them out"
            )
        if self.unit == "byte":
            _draft_prompt(sequence)  # it must have text
            for runner in (TARGET, DRAFT):
                size = sequence.model(runner).spec.vocab_size
                if vocabulary(sequence.tokenizers[runner], size).bytes_within:
                    raise UnsupportedCombinationError(
                        "anchored:unit=byte needs a tokenizer with a token for each single byte"
                    )

    def decode(self, sequence: Sequence) -> Decoding:
        rows = _ByteRows(sequence) if self.unit == "byte" else _TokenRows(sequence)
        known = sequence.state.get(_STATE)
        ratios = yield from rows.read_prompt(known is None)
        if known is None:
            size = BYTES_PER_TOKEN if self.unit == "byte" else 1
            sequence.state[_STATE] = Account(size * debt(ratios))
        while not sequence.finished:
            target, other = yield from rows.next_rows()
            tokens, risky, safe = shared(sequence.sampler, target, other)
            account = sequence.state[_STATE]
            granted = account.granted(self.budget, len(sequence.tokens) + 1)
            scores = tilted(risky, safe, granted)
            divergence = divergence_from(safe, scores)
            if divergence > granted + TOLERANCE:
                raise UnsupportedCombinationError(
                    f"anchored: a token would use {divergence:g} nats of its budget of {granted:g};"
                    " the models' logits cannot be mixed so finely"
                )
            token = self._sample(sequence, tokens, scores)
            sequence.record_logprobs(target, sequence.length, token, sequence.sampler)
            sequence.state[_STATE] = account.charged(divergence)
            sequence.emit([token])
            rows.push(token)
        rows.release()

    @staticmethod
    def _sample(sequence: Sequence, tokens: np.ndarray, scores: np.ndarray) -> int:
        if sequence.sampler.is_greedy:
            return int(tokens[scores.argmax()])
        return Distribution(tokens, scores).sample(sequence.noise, sequence.length)


class _TokenRows:
    """The logits of the next token by both models."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def read_prompt(self, reports: bool) -> Ratios:
        """The log-ratios of the prompt's tokens but the first and the special ones, if
        `reports`."""
        if not reports:
            return []
        sequence = self.sequence
        logs: dict[str, list[float]] = {}
        for runner in (TARGET, DRAFT):
            found = logs[runner] = []

            def on_row(row: np.ndarray, token: int, found: list[float] = found) -> None:
                found.append(
                    float(row[token]) - log_sum_exp(row) if token < len(row) else -math.inf
                )

            yield from score_tokens(sequence, sequence.prompt, 1, on_row, runner)
        tokenizer = sequence.tokenizers[TARGET]
        pairs = zip(sequence.prompt[1:], logs[TARGET], logs[DRAFT], strict=True)
        return [risky - safe for token, risky, safe in pairs if tokenizer.token_bytes(token)]

    def next_rows(self) -> Generator[DecoderAction, ActionResult, tuple[np.ndarray, np.ndarray]]:
        """The logits of the risky and the safe model."""
        target, other = yield [self.sequence.score(), self.sequence.score(runner=DRAFT)]
        return target.row(-1), other.row(-1)

    def push(self, token: int) -> None:
        """Take note of the next token."""

    def release(self) -> None:
        """Free the memory."""


class _ByteRows:
    """The log-probabilities of the next byte by both models, as logits of the target's tokens of
    one byte, and of its end token."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.prompts = [sequence.prompt, _draft_prompt(sequence)]
        self.readers = [
            ByteReader(sequence, runner, prompt[:1])
            for runner, prompt in zip((TARGET, DRAFT), self.prompts, strict=True)
        ]
        tokens = self.readers[0].tokens
        vocab, self.size = tokens.vocab, tokens.vocab.size
        single = [next(vocab.tokens_equal_to(bytes([byte])), None) for byte in range(END)]
        self.bytes = [byte for byte in range(END) if single[byte] is not None]
        self.ids = [token for token in single if token is not None]
        self.end = next(iter(tokens.end_tokens.tolist()), None)

    def read_prompt(self, reports: bool) -> Ratios:
        """The log-ratios of the prompt's bytes that both models predict, if `reports`."""
        logs = []
        for reader, prompt in zip(self.readers, self.prompts, strict=True):
            logs.append((yield from _read(reader, prompt, reports)))
        for token in self.sequence.tokens:  # after a restart
            self.push(token)
        risky, safe = logs
        return [risky[place] - safe[place] for place in sorted(risky.keys() & safe.keys())]

    def next_rows(self) -> Generator[DecoderAction, ActionResult, tuple[np.ndarray, np.ndarray]]:
        """The logits of the risky and the safe model."""
        target, other = [self._row(logs) for logs in (yield from next_byte(self.readers))]
        return target, other

    def push(self, token: int) -> None:
        """Take note of the next token."""
        for byte in self.readers[0].tokens.vocab.token_bytes[token]:
            for reader in self.readers:
                reader.push(byte)

    def release(self) -> None:
        """Free the memory."""
        for reader in self.readers:
            reader.release()

    def _row(self, logs: np.ndarray) -> np.ndarray:
        row = np.full(self.size, -np.inf, np.float32)
        row[self.ids] = logs[self.bytes]
        if self.end is not None:
            row[self.end] = logs[END]
        return row


def _read(
    reader: ByteReader, prompt: list[int], reports: bool
) -> Generator[DecoderAction, ActionResult, dict[int, float]]:
    """Let `reader` read its prompt behind the first token. Returns the log-probabilities of the
    bytes by their number, without the end of the text, if `reports`."""
    data = reader.tokens.vocab.token_bytes
    found: dict[int, float] = {}
    place = len(data[prompt[0]])
    for number, token in enumerate(prompt[1:], start=1):
        if not data[token]:
            reader.restart(prompt[: number + 1])
        for byte in data[token]:
            if reports:
                [logs] = yield from next_byte([reader])
                found[place] = float(logs[byte]) - log_sum_exp(logs[:END])
            reader.push(byte)
            place += 1
    return found


def _draft_prompt(sequence: Sequence) -> list[int]:
    """The prompt in the tokens of the draft model: the same ones if they are the same there."""
    target, draft = sequence.tokenizers[TARGET], sequence.tokenizers[DRAFT]
    if all(
        token < draft.vocab_size and target.token_text(token) == draft.token_text(token)
        for token in sequence.prompt
    ):
        return sequence.prompt
    text = b"".join(map(target.token_bytes, sequence.prompt)).decode(errors="replace")
    start = [] if draft.bos_id is None else [draft.bos_id]
    prompt = [*start, *draft.encode(text, special=False)]
    if not prompt:
        raise InvalidRequestError("anchored:unit=byte needs a prompt with text")
    return prompt


def debt(ratios: list[float]) -> float:
    """The mean of the `NUM_DEBTS` largest log-ratios, of which negative ones count as 0, in
    nats."""
    largest = sorted(max(0.0, ratio) for ratio in ratios)[-NUM_DEBTS:]
    return sum(largest) / len(largest) if largest else 0.0


def shared(
    sampler: Sampler, risky: np.ndarray, safe: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that both models allow, and their scores under each after penalties, constraint
    and temperature.

    Returns:
        Ids int32, ascending, and the logits of the risky and the safe model divided by the
        temperature, float64, all `[tokens]`.
    """
    size = min(len(risky), len(safe))
    plain = Sampler(1.0, sampler.pre_temperature, combiner=sampler.combiner)
    temperature = 1.0 if sampler.is_greedy else sampler.temperature
    dense = []
    for row in (risky[:size], safe[:size]):
        distribution = plain.distribution(row)
        scores = np.full(size, -np.inf)
        scores[slice(None) if distribution.tokens is None else distribution.tokens] = (
            distribution.scores
        )
        dense.append(scores / temperature)
    tokens = np.flatnonzero((dense[0] > -np.inf) & (dense[1] > -np.inf)).astype(np.int32)
    if not len(tokens):
        raise ConstraintError("anchored: the models have no possible token in common")
    return tokens, dense[0][tokens], dense[1][tokens]


def tilted(risky: np.ndarray, safe: np.ndarray, budget: float) -> np.ndarray:
    """The mixture with the largest weight of the risky model whose divergence from the safe one is
    at most `budget`.

    Args:
        risky: Scores of tokens under the risky model, float64 `[tokens]`.
        safe: Scores under the safe one.
        budget: In nats.

    Returns:
        The scores of the mixture.
    """
    if budget == 0:
        return safe
    if _divergence(risky, safe, 1.0)[0] <= budget:
        return risky
    low, high, weight = 0.0, 1.0, min(max(budget / (budget + 1), 1e-4), 1 - 1e-4)
    for step in range(_NEWTON_STEPS + _BISECTIONS):
        divergence, slope = _divergence(risky, safe, weight)
        if divergence <= budget:
            low = weight
        else:
            high = weight
        if high - low < _WIDTH:
            break
        weight = weight + (budget - divergence) / slope if slope > 0 else low
        if step >= _NEWTON_STEPS or not low < weight < high:
            weight = (low + high) / 2
    return safe + low * (risky - safe)


def divergence_from(safe: np.ndarray, scores: np.ndarray) -> float:
    """KL(q, safe) of the distribution q with these scores, in nats."""
    q, s = _normalized(scores), _normalized(safe)
    return max(0.0, float(np.exp(q) @ (q - s)))


def _divergence(risky: np.ndarray, safe: np.ndarray, weight: float) -> tuple[float, float]:
    """KL(q, safe) of the mixture q with this weight, and its derivative by the weight."""
    ratio = (risky - risky.max()) - (safe - safe.max())
    tilted_logs = _normalized(safe) + weight * ratio
    largest = float(tilted_logs.max())
    q = np.exp(tilted_logs - largest)
    total = float(q.sum())
    q /= total
    mean = float(q @ ratio)
    divergence = weight * mean - largest - math.log(total)
    return divergence, weight * float(q @ np.square(ratio - mean))


def _normalized(scores: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 `[tokens]`."""
    shifted = scores - scores.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result
