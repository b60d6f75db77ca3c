"""What a decoder yields and what it is sent back."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anydecode.kernels.interface import SampleSpec
from anydecode.kernels.library import top_k
from anydecode.scoring.span import ChainSpan, MultiStepSpan, Span, TreeSpan
from anydecode.scoring.tree import ROOT

if TYPE_CHECKING:
    from anydecode.sampling.candidates import Distribution
    from anydecode.sampling.sampler import Sampler
    from anydecode.scoring.sequence import Sequence


@dataclass(eq=False)
class ScoreRequest:
    """A request for scoring in one lane.

    `groups` holds one list of spans per context: the sequence's own first, then its companions'.
    Spans of a group run in order; their wanted rows, one after the other, are the answer.
    `positions`, `row_parents` and `row_tokens` describe the answered rows: where each stands, which
    answered row it follows (`ROOT`: the sequence's own tokens) and which token it holds.
    """

    sequence: Sequence
    runner: str
    groups: list[list[Span]]
    positions: np.ndarray
    row_parents: list[int]
    row_tokens: list[int]

    def sample_specs(self, span: Span, wanted: list[int], row: int) -> list[SampleSpec]:
        """What a backend may pick within a pass that answers rows `wanted` of `span`, as rows `row`
        and on of its logits. Noise is dear: a draft's rows, which are not asked for unless it is
        accepted, are left."""
        sequence = self.sequence
        sampler = sequence.sampler
        simple = sampler.is_temperature_only or sampler.is_constraint_only
        if self.runner != "target" or not simple or not isinstance(span, ChainSpan | TreeSpan):
            return []
        if sampler.is_greedy:
            return [SampleSpec(row + i) for i in range(len(wanted))]
        answering = next(other for other in self.groups[0] if len(other.output_rows))
        if span is not answering or wanted[0] != span.output_rows[0]:
            return []
        noise, position = sequence.noise, int(self.positions[0]) + 1
        return [SampleSpec(row, 1 / sampler.temperature, noise.seed, noise.stream, position)]

    @property
    def multi_step_tokens(self) -> list[int]:
        """What a backend has chosen that went on by itself: the pick of the last row, then that of
        each token before it. Empty if it did not."""
        span = self.groups[0][-1]
        return span.multi_step_tokens if isinstance(span, MultiStepSpan) else []

    @property
    def num_rows(self) -> int:
        """Rows still to run."""
        return sum(span.remaining for spans in self.groups for span in spans)


@dataclass(eq=False)
class Submit:
    """Yielded to start `score` and go on at once; the decoder is sent a `Ticket`."""

    score: ScoreRequest


@dataclass(eq=False)
class Ticket:
    """A submitted score; `scores` is set once it is answered."""

    score: ScoreRequest
    scores: Scores | None = None
    cancelled: bool = False


@dataclass(eq=False)
class Wait:
    """Yielded to wait until any of `tickets` is answered; the decoder is sent that ticket."""

    tickets: list[Ticket]


@dataclass(eq=False)
class Cancel:
    """Yielded to drop a ticket; what it has stored in its context stays until truncated."""

    ticket: Ticket


@dataclass(eq=False)
class MultiStep:
    """Yielded to pick and rescore up to `count` tokens without resuming in between; the decoder is
    sent the picked tokens, one where any may end the text. They are not emitted yet. `state` is
    then the policy that has been told all of them but the last, as `emit` takes it."""

    sequence: Sequence
    count: int
    state: Sampler | None = None

    def steps(self) -> Generator[ScoreRequest, Scores, list[int]]:
        """The same in scores, of several tokens each where the backend goes on by itself."""
        sequence = self.sequence
        sampler = sequence.sampler.fork()
        tokens: list[int] = []
        inputs = sequence.unscored()
        count = (
            1 if sequence.stop_checker.end_tokens is None else min(self.count, sequence.remaining)
        )
        while True:
            left = count - len(tokens)
            score = sequence.score(inputs, extra_tokens=left - 1)
            scores = yield score
            said = score.multi_step_tokens or [self._sampled(scores, sampler)]
            for token in said[:-1]:
                sampler.advance(token)
            tokens += said
            inputs = said[-1:]
            if len(said) >= left or sequence.stops_at(said[-1]):
                self.state = sampler
                return tokens
            sampler.advance(said[-1])

    def _sampled(self, scores: Scores, sampler: Sampler) -> int:
        if not sampler.stateful:
            return scores.sampled[-1]
        row, position = scores.row(-1), int(scores.positions[-1]) + 1
        scores.show_hidden(sampler, -1)
        token = self.sequence.sample(sampler, row, position)
        self.sequence.record_logprobs(row, position, token, sampler)
        return token


DecoderAction = ScoreRequest | list[ScoreRequest] | Submit | Wait | Cancel | MultiStep
ActionResult = Any
Decoding = Generator[DecoderAction, ActionResult, None]


class SampledTokens:
    """`picks[i]`: the token plain decoding would say after row i. Computed when asked for."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, row: int) -> int:
        return self._scores.sample(row)

    def __iter__(self) -> Iterator[int]:
        return (self._scores.sample(row) for row in range(len(self)))


class Scores:
    """The answer to a score, row for row. Valid until the decoder yields again; copy what is kept.

    `logits`: float32 `[rows, vocab_size]` of the sequence's own context; `row(i)` is the same row
    after the policy has combined it with companions and taps. `tokens[i]` is the token of row i.
    `hidden[l]`: `[rows, hidden_size]`. `picked` says what the pass has picked of each row, -1 where
    it has picked nothing; or it is empty.
    """

    def __init__(
        self,
        score: ScoreRequest,
        logits: np.ndarray,
        hidden: dict[int, torch.Tensor],
        companions: list[np.ndarray],
        picked: Seq[int] = (),
    ) -> None:
        self.sequence = score.sequence
        self.positions = score.positions
        self.tokens = score.row_tokens
        self.logits = logits
        self.hidden = hidden
        self._score = score
        self._companions = companions
        self._states: dict[tuple[int, int], Sampler] = {}
        self._sampled: dict[tuple[int, int], int] = {}
        self._sampled_in_pass = picked
        self._captured: dict[int, np.ndarray] | None = None

    @property
    def sampled(self) -> SampledTokens:
        """What plain decoding says after each row. Made anew each time, so that scores hold no
        cycle and their logits go as soon as nobody needs them."""
        return SampledTokens(self)

    def __len__(self) -> int:
        return len(self.positions)

    def keep(self) -> Scores:
        """Copy what would be overwritten by the lane's next pass."""
        self.logits = self.logits.copy()
        self.hidden = {layer: rows.clone() for layer, rows in self.hidden.items()}
        self._companions = [rows.copy() for rows in self._companions]
        return self

    def top(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 and logits float32 `[rows, min(count, vocab_size)]`: the largest `logits` of
        each row, falling, the lowest id first among equals."""
        return top_k(self.logits, count)

    def row(self, row: int) -> np.ndarray:
        """Logits float32 `[vocab_size]` that the policy works on."""
        sampler = self.sequence.sampler
        tapped = all(
            layer in self.hidden for layer in sampler.capture_layers
        )  # not in a row that stops early
        if (
            self._score.runner != "target"
            or not (sampler.companions or sampler.capture_layers)
            or not tapped
        ):
            logits: np.ndarray = self.logits[row]
            return logits
        if self._captured is None:
            head = self._model.head
            self._captured = {
                layer: head(self.hidden[layer]).numpy() for layer in sampler.capture_layers
            }
        taps = {layer: logits[row] for layer, logits in self._captured.items()}
        return sampler.combine(self.logits[row], [rows[row] for rows in self._companions], taps)

    @property
    def _model(self) -> Any:
        return self._score.groups[0][-1].context.pool.model

    def last_state(self, row: int) -> np.ndarray:
        """The last layer's state of `row`, float32 `[hidden_size]`, as the model's head sees it:
        after the final norm. It must have been asked for."""
        model = self._model
        states = self.hidden[model.spec.num_layers][row : row + 1 or None]
        normed = getattr(model, "normed", None)
        sampler_after: np.ndarray = (normed(states) if normed else states)[0].cpu().numpy()
        return sampler_after

    def show_hidden(self, sampler: Sampler, row: int) -> None:
        """Let `policy` see `row`, if it wants to and the row went through all layers."""
        if not sampler.observes_hidden or self._score.runner != "target":
            return
        if self._model.spec.num_layers in self.hidden:
            sampler.observe_hidden(self.last_state(row), self.logits[row])

    def sampler_after(self, row: int) -> Sampler:
        """The policy after the token of `row`, shown that row: the sequence's own where the token
        is already emitted, else a fork that has been told the tokens on the way from there."""
        sampler = self._sampler_after(row)
        self.show_hidden(sampler, row)
        return sampler

    def _sampler_after(self, row: int) -> Sampler:
        sampler = self.sequence.sampler
        row = row % len(self)
        if not sampler.stateful:
            return sampler
        length = self.sequence.length
        if self.positions[row] < length:
            if self.positions[row] != length - 1:
                raise ValueError("the policy has moved on from this row")
            return sampler
        key = (row, length)
        if key not in self._states:
            parent = self._score.row_parents[row]
            if parent == ROOT and self.positions[row] != length:
                raise ValueError("the tokens before this row were not asked for")
            before = self._sampler_after(parent) if parent != ROOT else sampler
            self._states[key] = fork = before.fork()
            fork.advance(self._score.row_tokens[row])
        return self._states[key]

    def sample(self, row: int) -> int:
        """What plain decoding says after `row`, with the noise of its place."""
        row = row % len(self)
        made = self._sampled_in_pass[row] if self._sampled_in_pass else -1
        if (
            made >= 0
            and self.sequence.annotate is None
            and self.sequence.sampler.is_temperature_only
        ):
            return made
        key = (row, self.sequence.length)
        if key not in self._sampled:
            position = int(self.positions[row]) + 1
            logits = self.row(row)
            sampler_after = self.sampler_after(row)
            stands = made >= 0 and sampler_after.allows(made)
            token = made if stands else self.sequence.sample(sampler_after, logits, position)
            if self._score.runner == "target":
                self.sequence.record_logprobs(logits, position, token, sampler_after)
            self._sampled[key] = token
        return self._sampled[key]

    def sample_at(self, row: int, attempt: int = 0) -> int:
        """What the policy draws from `row` for the row's own position: for models whose rows
        predict themselves. `attempt` counts redraws."""
        position = int(self.positions[row])
        self.show_hidden(self.sequence.sampler, row)
        return self.sequence.sample(self.sequence.sampler, self.row(row), position, attempt)

    def distribution(self, row: int) -> Distribution:
        """The distribution `pick` draws from."""
        return self.sampler_after(row).distribution(self.row(row))
