"""What a decoder yields and what it is sent back."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anydecode.kernels.interface import Choice
from anydecode.kernels.library import largest
from anydecode.scoring.span import Branches, Chain, Span, Trail
from anydecode.scoring.tree import ROOT

if TYPE_CHECKING:
    from anydecode.sampling.candidates import Distribution
    from anydecode.sampling.policy import Policy
    from anydecode.scoring.sequence import Sequence


@dataclass(eq=False)
class Score:
    """A request for scoring in one lane.

    `groups` holds one list of spans per context: the sequence's own first, then its companions'.
    Spans of a group run in order; their wanted rows, one after the other, are the answer.
    `positions`, `row_parents` and `row_tokens` describe the answered rows: where each stands, which
    answered row it follows (`ROOT`: the sequence's own tokens) and which token it holds.
    """

    sequence: Sequence
    lane: str
    groups: list[list[Span]]
    positions: np.ndarray
    row_parents: list[int]
    row_tokens: list[int]

    def choices(self, span: Span, wanted: list[int], row: int) -> list[Choice]:
        """What a backend may pick within a pass that answers rows `wanted` of `span`, as rows `row`
        and on of its logits. Noise is dear: a draft's rows, which are not asked for unless it is
        accepted, are left."""
        sequence = self.sequence
        policy = sequence.policy
        simple = policy.is_plain or policy.is_held
        if self.lane != "target" or not simple or not isinstance(span, Chain | Branches):
            return []
        if policy.is_greedy:
            return [Choice(row + i) for i in range(len(wanted))]
        answering = next(other for other in self.groups[0] if len(other.answers))
        if span is not answering or wanted[0] != span.answers[0]:
            return []
        noise, position = sequence.noise, int(self.positions[0]) + 1
        return [Choice(row, 1 / policy.temperature, noise.seed, noise.stream, position)]

    @property
    def said(self) -> list[int]:
        """What a backend has chosen that went on by itself: the pick of the last row, then that of
        each token before it. Empty if it did not."""
        span = self.groups[0][-1]
        return span.said if isinstance(span, Trail) else []

    @property
    def num_rows(self) -> int:
        """Rows still to run."""
        return sum(span.remaining for spans in self.groups for span in spans)


@dataclass(eq=False)
class Submit:
    """Yielded to start `score` and go on at once; the decoder is sent a `Ticket`."""

    score: Score


@dataclass(eq=False)
class Ticket:
    """A submitted score; `scores` is set once it is answered."""

    score: Score
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
class Follow:
    """Yielded to pick and rescore up to `count` tokens without resuming in between; the decoder is
    sent the picked tokens, one where any may end the text. They are not emitted yet. `state` is
    then the policy that has been told all of them but the last, as `emit` takes it."""

    sequence: Sequence
    count: int
    state: Policy | None = None

    def steps(self) -> Generator[Score, Scores, list[int]]:
        """The same in scores, of several tokens each where the backend goes on by itself."""
        sequence = self.sequence
        policy = sequence.policy.fork()
        tokens: list[int] = []
        inputs = sequence.unscored()
        count = 1 if sequence.listener.ends is None else min(self.count, sequence.remaining)
        while True:
            left = count - len(tokens)
            score = sequence.score(inputs, ahead=left - 1)
            scores = yield score
            said = score.said or [self._picked(scores, policy)]
            for token in said[:-1]:
                policy.advance(token)
            tokens += said
            inputs = said[-1:]
            if len(said) >= left or sequence.stops_at(said[-1]):
                self.state = policy
                return tokens
            policy.advance(said[-1])

    def _picked(self, scores: Scores, policy: Policy) -> int:
        if not policy.stateful:
            return scores.picks[-1]
        row, position = scores.row(-1), int(scores.positions[-1]) + 1
        scores.show(policy, -1)
        token = self.sequence.pick(policy, row, position)
        self.sequence.note(row, position, token, policy)
        return token


Request = Score | list[Score] | Submit | Wait | Cancel | Follow
Answer = Any
Decoding = Generator[Request, Answer, None]


class Picks:
    """`picks[i]`: the token plain decoding would say after row i. Computed when asked for."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, row: int) -> int:
        return self._scores.pick(row)

    def __iter__(self) -> Iterator[int]:
        return (self._scores.pick(row) for row in range(len(self)))


class Scores:
    """The answer to a score, row for row. Valid until the decoder yields again; copy what is kept.

    `logits`: float32 `[rows, vocab_size]` of the sequence's own context; `row(i)` is the same row
    after the policy has combined it with companions and taps. `tokens[i]` is the token of row i.
    `hidden[l]`: `[rows, hidden_size]`. `picked` says what the pass has picked of each row, -1 where
    it has picked nothing; or it is empty.
    """

    def __init__(
        self,
        score: Score,
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
        self._states: dict[tuple[int, int], Policy] = {}
        self._picked: dict[tuple[int, int], int] = {}
        self._made = picked
        self._tapped: dict[int, np.ndarray] | None = None

    @property
    def picks(self) -> Picks:
        """What plain decoding says after each row. Made anew each time, so that scores hold no
        cycle and their logits go as soon as nobody needs them."""
        return Picks(self)

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
        return largest(self.logits, count)

    def row(self, row: int) -> np.ndarray:
        """Logits float32 `[vocab_size]` that the policy works on."""
        policy = self.sequence.policy
        tapped = all(layer in self.hidden for layer in policy.taps)  # not in a row that stops early
        if self._score.lane != "target" or not (policy.companions or policy.taps) or not tapped:
            logits: np.ndarray = self.logits[row]
            return logits
        if self._tapped is None:
            head = self._model.head
            self._tapped = {layer: head(self.hidden[layer]).numpy() for layer in policy.taps}
        taps = {layer: logits[row] for layer, logits in self._tapped.items()}
        return policy.combine(self.logits[row], [rows[row] for rows in self._companions], taps)

    @property
    def _model(self) -> Any:
        return self._score.groups[0][-1].context.pool.model

    def last_state(self, row: int) -> np.ndarray:
        """The last layer's state of `row`, float32 `[hidden_size]`, as the model's head sees it:
        after the final norm. It must have been asked for."""
        model = self._model
        states = self.hidden[model.spec.num_layers][row : row + 1 or None]
        normed = getattr(model, "normed", None)
        state: np.ndarray = (normed(states) if normed else states)[0].cpu().numpy()
        return state

    def show(self, policy: Policy, row: int) -> None:
        """Let `policy` see `row`, if it wants to and the row went through all layers."""
        if not policy.sees_states or self._score.lane != "target":
            return
        if self._model.spec.num_layers in self.hidden:
            policy.see(self.last_state(row), self.logits[row])

    def state(self, row: int) -> Policy:
        """The policy after the token of `row`, shown that row: the sequence's own where the token
        is already emitted, else a fork that has been told the tokens on the way from there."""
        policy = self._told(row)
        self.show(policy, row)
        return policy

    def _told(self, row: int) -> Policy:
        policy = self.sequence.policy
        row = row % len(self)
        if not policy.stateful:
            return policy
        length = self.sequence.length
        if self.positions[row] < length:
            if self.positions[row] != length - 1:
                raise ValueError("the policy has moved on from this row")
            return policy
        key = (row, length)
        if key not in self._states:
            parent = self._score.row_parents[row]
            if parent == ROOT and self.positions[row] != length:
                raise ValueError("the tokens before this row were not asked for")
            before = self._told(parent) if parent != ROOT else policy
            self._states[key] = fork = before.fork()
            fork.advance(self._score.row_tokens[row])
        return self._states[key]

    def pick(self, row: int) -> int:
        """What plain decoding says after `row`, with the noise of its place."""
        row = row % len(self)
        made = self._made[row] if self._made else -1
        if made >= 0 and self.sequence.annotate is None and self.sequence.policy.is_plain:
            return made
        key = (row, self.sequence.length)
        if key not in self._picked:
            position = int(self.positions[row]) + 1
            logits = self.row(row)
            state = self.state(row)
            stands = made >= 0 and state.permits(made)
            token = made if stands else self.sequence.pick(state, logits, position)
            if self._score.lane == "target":
                self.sequence.note(logits, position, token, state)
            self._picked[key] = token
        return self._picked[key]

    def pick_at(self, row: int, attempt: int = 0) -> int:
        """What the policy draws from `row` for the row's own position: for models whose rows
        predict themselves. `attempt` counts redraws."""
        place = int(self.positions[row])
        self.show(self.sequence.policy, row)
        return self.sequence.pick(self.sequence.policy, self.row(row), place, attempt)

    def distribution(self, row: int) -> Distribution:
        """The distribution `pick` draws from."""
        return self.state(row).distribution(self.row(row))
