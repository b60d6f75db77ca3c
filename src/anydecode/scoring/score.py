"""The protocol between decoders and the engine: the actions a decoder yields and their results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anydecode.kernels.host import to_host
from anydecode.kernels.interface import Array, SampleSpec
from anydecode.kernels.library import top_k
from anydecode.scoring.sequence_data import SequenceData
from anydecode.scoring.span import ChainSpan, MultiStepSpan, Span, TreeSpan
from anydecode.scoring.tree import ROOT

if TYPE_CHECKING:
    from anydecode.sampling.candidates import Distribution
    from anydecode.sampling.sampler import Sampler


@dataclass(eq=False)
class ScoreRequest:
    """A request to run rows of one sequence through one model. The result is a `Scores`.

    Args:
        sequence: The sequence that the rows belong to.
        runner: Name of the model runner: "target" or "draft".
        groups: One list of spans per sequence cache: the sequence's own cache first, then those of
            its companions. The spans of a group run in order; the result has the output rows of
            all its spans, concatenated.
        positions: int `[num_output_rows]`, the text position of each output row.
        row_parents: For each output row, the output row that it follows, or `ROOT` if it follows
            the sequence's own tokens.
        row_tokens: The token id of each output row.
        optional: The probabilities, falling, that the last rows are useful: drafts that may be left
            out of the pass if they save no time in it. The result then has fewer rows.
        samples: Whether tokens may be sampled within the pass; if not, they are sampled when
            `Scores.sampled` is read.
    """

    sequence: SequenceData
    runner: str
    groups: list[list[Span]]
    positions: np.ndarray
    row_parents: list[int]
    row_tokens: list[int]
    optional: Seq[float] = ()
    samples: bool = True

    @property
    def is_new(self) -> bool:
        """Whether no row has run."""
        return not any(span.done for spans in self.groups for span in spans)

    def keep_optional(self, count: int) -> None:
        """Leave out all optional rows but the first `count`, before any row has run. The others
        are not optional any more."""
        num_dropped, self.optional = len(self.optional) - count, ()
        if not num_dropped:
            return
        for spans in self.groups:
            if len(spans[-1]) == num_dropped:
                spans.pop()
            else:
                spans[-1].drop(num_dropped)
        self.positions = self.positions[:-num_dropped]
        self.row_parents = self.row_parents[:-num_dropped]
        self.row_tokens = self.row_tokens[:-num_dropped]

    def sample_specs(self, span: Span, output_rows: list[int], first_row: int) -> list[SampleSpec]:
        """The rows that the backend may sample within the pass.

        Sampling noise is expensive, so draft rows are not sampled in the pass, but only when the
        decoder reads them. Greedy rows need no noise and are always sampled.

        Args:
            span: The span that runs.
            output_rows: The rows of `span` whose logits this pass returns.
            first_row: Index of the first of them in the logits of the pass.

        Returns:
            One `SampleSpec` per row to sample; empty without `samples`, or if the sampler needs
            more than a constraint and what the backend can do (`SequenceData.samples_in_passes`).
        """
        if not self.samples:
            return []
        sequence = self.sequence
        sampler = sequence.sampler
        is_supported = sequence.samples_in_passes or sampler.is_constraint_only
        is_draft = isinstance(span, MultiStepSpan) and span.min_probability is not None
        if is_draft:
            is_supported = sampler.is_temperature_only
        if (
            (self.runner != "target" and not is_draft)
            or not is_supported
            or not isinstance(span, ChainSpan | TreeSpan)
        ):
            return []
        if sampler.is_greedy:
            return [SampleSpec(first_row + i) for i in range(len(output_rows))]
        output_span = next(candidate for candidate in self.groups[0] if len(candidate.output_rows))
        if span is not output_span or output_rows[0] != span.output_rows[0]:
            return []
        noise, position = sequence.noise, int(self.positions[0]) + 1
        key = (noise.seed, noise.stream, position)
        return [SampleSpec(first_row, 1 / sampler.temperature, *key, sampler.truncation)]

    @property
    def multi_step_tokens(self) -> list[int]:
        """The tokens that the backend sampled in a multi-step pass: the sample of the last row,
        then one sample after each of these tokens. Empty if the pass had one step."""
        span = self.groups[0][-1]
        return span.multi_step_tokens if isinstance(span, MultiStepSpan) else []

    @property
    def multi_step_probabilities(self) -> list[float]:
        """The probabilities of `multi_step_tokens` at temperature 1, if they are a draft."""
        span = self.groups[0][-1]
        return span.probabilities if isinstance(span, MultiStepSpan) else []

    @property
    def num_rows(self) -> int:
        """Number of rows that have not run yet."""
        return sum(span.remaining for spans in self.groups for span in spans)


@dataclass(eq=False)
class Submit:
    """Yielded to start `request` without waiting for it. The decoder is resumed at once with a
    `Ticket`."""

    request: ScoreRequest


@dataclass(eq=False)
class Ticket:
    """A submitted request. `scores` is set when it has run."""

    request: ScoreRequest
    scores: Scores | None = None
    cancelled: bool = False


@dataclass(eq=False)
class Wait:
    """Yielded to wait until the request of any of `tickets` has run. The decoder is resumed with
    that ticket."""

    tickets: list[Ticket]


@dataclass(eq=False)
class Cancel:
    """Yielded to cancel a ticket. Positions that it has already stored stay in the sequence cache
    until they are truncated."""

    ticket: Ticket


@dataclass(eq=False)
class Call:
    """Yielded to run a function on a thread of its own, while the engine serves other requests. The
    decoder is resumed with this object.

    The function may run again after a preemption. One that does not return in time is left behind;
    its result is ignored.

    Args:
        function: The function.
        seconds: How long it may take.
        result: Set on return: what the function returned.
        error: Set on return: what it raised; None if it returned.
        is_late: Set on return: whether it did not end in time.
    """

    function: Callable[[], Any]
    seconds: float
    result: Any = None
    error: BaseException | None = None
    is_late: bool = False


@dataclass(eq=False)
class MultiStep:
    """Yielded to sample and score up to `count` tokens without resuming the decoder in between.

    The decoder is resumed with the sampled tokens, which are not emitted yet. No token is sampled
    after one that may end the text (`StopChecker.end_tokens`).

    Args:
        sequence: The sequence to continue.
        count: Maximum number of tokens.
        score: Returns the request that scores (tokens, number of extra tokens); see
            `Sequence.score`.
        min_count: Number of tokens after which there is no further request; None: `count`.
        sampler: Set on return: the sampler advanced by all sampled tokens but the last, as
            `Sequence.emit` takes it.
    """

    sequence: SequenceData
    count: int
    score: Callable[[list[int], int], ScoreRequest]
    min_count: int | None = None
    sampler: Sampler | None = None

    def steps(self) -> Generator[ScoreRequest, Scores, list[int]]:
        """The same as a generator of score requests, each of several tokens if the backend supports
        multi-step passes."""
        sequence = self.sequence
        sampler = sequence.sampler.fork()
        tokens: list[int] = []
        inputs = sequence.unscored()
        end_tokens = sequence.stop_checker.end_tokens
        count = 1 if end_tokens is None else min(self.count, sequence.remaining)
        min_count = count if self.min_count is None else min(self.min_count, count)
        while True:
            request = self.score(inputs, count - len(tokens) - 1)
            scores = yield request
            step_tokens = request.multi_step_tokens or [self._sample(scores, sampler)]
            for token in step_tokens[:-1]:
                sampler.advance(token)
            tokens += step_tokens
            inputs = step_tokens[-1:]
            if len(tokens) >= min_count or end_tokens is None or step_tokens[-1] in end_tokens:
                self.sampler = sampler
                return tokens
            sampler.advance(step_tokens[-1])

    def _sample(self, scores: Scores, sampler: Sampler) -> int:
        if not sampler.is_stateful:
            return scores.sampled[-1]
        row, position = scores.row(-1), int(scores.positions[-1]) + 1
        scores.show_hidden(sampler, -1)
        token = self.sequence.sample(sampler, row, position)
        self.sequence.record_logprobs(row, position, token, sampler)
        return token


DecoderAction = ScoreRequest | list[ScoreRequest] | Submit | Wait | Cancel | Call | MultiStep
ActionResult = Any
Decoding = Generator[DecoderAction, ActionResult, None]


class SampledTokens:
    """`sampled[i]` is the token that autoregressive decoding would generate after row i. Computed
    lazily."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, row: int) -> int:
        return self._scores.sample(row)

    def __iter__(self) -> Iterator[int]:
        return (self._scores.sample(row) for row in range(len(self)))


class Scores:
    """The result of a `ScoreRequest`, one entry per output row.

    The arrays are views of buffers that the next pass overwrites: they are valid until the decoder
    yields again. Copy what must live longer. They stay on the backend's device until they are first
    read.

    Attributes:
        sequence: The sequence that the rows belong to.
        positions: int `[rows]`, the text position of each row.
        tokens: The token id of each row.

    Args:
        request: The request that has run.
        logits: float32 `[rows, vocab_size]`.
        hidden: By number of layers, float32 `[rows, hidden_size]`.
        companions: Logits float32 `[rows, vocab_size]` of each companion prompt.
        sampled_in_pass: The token that the backend sampled for each row, -1 for none; or empty.
        head_tokens: The tokens of the columns of `logits`, of a draft model whose head has fewer
            than the vocabulary; None for all of them.
    """

    def __init__(
        self,
        request: ScoreRequest,
        logits: Array,
        hidden: dict[int, Array],
        companions: list[Array],
        sampled_in_pass: Seq[int] = (),
        head_tokens: np.ndarray | None = None,
    ) -> None:
        self.sequence = request.sequence
        self.positions = request.positions
        self.tokens = request.row_tokens
        self._logits = logits
        self._hidden = hidden
        self._request = request
        self._companions = companions
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._sampled: dict[tuple[int, int], int] = {}
        self._sampled_in_pass = sampled_in_pass
        self._head_tokens = head_tokens
        self._captured_logits: dict[int, np.ndarray] | None = None

    @property
    def sampled(self) -> SampledTokens:
        """The token that autoregressive decoding generates after each row."""
        # Created on each access: a stored object would form a reference cycle that keeps the
        # logits alive until garbage collection.
        return SampledTokens(self)

    @property
    def logits(self) -> np.ndarray:
        """float32 `[rows, vocab_size]`, from the sequence's own cache. `row(i)` gives the same row
        combined with companions and captured layers."""
        self._logits = to_host(self._logits)
        return self._logits

    @property
    def hidden(self) -> dict[int, np.ndarray]:
        """`hidden[l]` float32 `[rows, hidden_size]`: the hidden states after l layers."""
        for layer, rows in self._hidden.items():
            self._hidden[layer] = to_host(rows)
        return self._hidden

    def __len__(self) -> int:
        return len(self.positions)

    @staticmethod
    def after(node: int) -> int:
        """The row of `node` of a tree scored by `Sequence.verify`: it predicts the token after the
        node. `ROOT` has the row of the last token of the text."""
        return node + 1

    def keep(self) -> Scores:
        """Copy everything that the runner's next pass would overwrite, and return self."""
        self._logits = self.logits.copy()
        self._hidden = {layer: rows.copy() for layer, rows in self.hidden.items()}
        self._companions = [to_host(rows).copy() for rows in self._companions]
        return self

    def saved(self) -> Callable[[], None]:
        """Copy everything that the runner's next pass would overwrite. Returns a function that
        writes it back: views of the arrays remain valid."""
        self._companions = [to_host(rows) for rows in self._companions]
        arrays = [self.logits, *self.hidden.values(), *self._companions]
        copies = [(array, array.copy()) for array in arrays if array.flags.writeable]

        def write_back() -> None:
            for array, copy in copies:
                array[...] = copy

        return write_back

    def top(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` top_k logits of each row, in descending order, ties to the lowest id.

        Returns:
            Ids int32 and logits float32, both `[rows, min(count, vocab_size)]`.
        """
        return top_k(self.logits, count)

    def row(self, row: int) -> np.ndarray:
        """Logits float32 `[vocab_size]` of `row`, combined with companions and captured layers, as
        the sampler gets them."""
        sampler = self.sequence.sampler
        # Early-exit rows do not capture layers.
        is_captured = all(layer in self.hidden for layer in sampler.capture_layers)
        if (
            self._request.runner != "target"
            or not (sampler.companions or sampler.capture_layers)
            or not is_captured
        ):
            logits: np.ndarray = self.logits[row]
            return logits if self._head_tokens is None else self._spread(logits)
        if self._captured_logits is None:
            head = self._model.head
            self._captured_logits = {
                layer: head(self.hidden[layer]) for layer in sampler.capture_layers
            }
        layer_logits = {layer: logits[row] for layer, logits in self._captured_logits.items()}
        return sampler.combine(
            self.logits[row], [to_host(rows)[row] for rows in self._companions], layer_logits
        )

    def _spread(self, logits: np.ndarray) -> np.ndarray:
        """The logits of all tokens, from those of a head that has fewer."""
        spread = np.full(self._model.spec.vocab_size, -np.inf, np.float32)
        spread[self._head_tokens] = logits
        return spread

    @property
    def _model(self) -> Any:
        return self._request.groups[0][-1].kv_cache.pool.model

    def last_state(self, row: int) -> np.ndarray:
        """The last hidden state of `row` after the final norm, float32 `[hidden_size]`: the input
        of the model's head. The request must have captured the last layer."""
        model = self._model
        states = self.hidden[model.spec.num_layers][row : row + 1 or None]
        normed = getattr(model, "normed", None)
        state: np.ndarray = (normed(states) if normed else states)[0]
        return state

    def show_hidden(self, sampler: Sampler, row: int) -> None:
        """Pass the last hidden state of `row` to `sampler`, if it uses hidden states and the row
        went through all layers."""
        if not sampler.observes_hidden or self._request.runner != "target":
            return
        if self._model.spec.num_layers in self.hidden:
            sampler.observe_hidden(self.last_state(row), self.logits[row])

    def sampler_after(self, row: int) -> Sampler:
        """The sampler advanced by the tokens up to and including that of `row`: the sequence's own
        if that token is already emitted, else a fork.

        Raises:
            ValueError: If the sequence has moved past `row`, or if tokens before it are not among
                the rows.
        """
        sampler = self._sampler_after(row)
        self.show_hidden(sampler, row)
        return sampler

    def _sampler_after(self, row: int) -> Sampler:
        sampler = self.sequence.sampler
        row = row % len(self)
        if not sampler.is_stateful:
            return sampler
        length = self.sequence.length
        if self.positions[row] < length:
            if self.positions[row] != length - 1:
                raise ValueError("the sequence has already moved past this row")
            return sampler
        key = (row, length)
        if key not in self._samplers:
            parent = self._request.row_parents[row]
            if parent == ROOT and self.positions[row] != length:
                raise ValueError("the tokens before this row are not among the output rows")
            parent_sampler = self._sampler_after(parent) if parent != ROOT else sampler
            self._samplers[key] = fork = parent_sampler.fork()
            fork.advance(self._request.row_tokens[row])
        return self._samplers[key]

    def sample(self, row: int) -> int:
        """The token that autoregressive decoding generates after `row`, with the random numbers of
        the following position."""
        row = row % len(self)
        pass_token = self._sampled_in_pass[row] if self._sampled_in_pass else -1
        if (
            pass_token >= 0
            and self.sequence.compute_logprobs is None
            and self.sequence.sampler.is_temperature_only
        ):
            return pass_token
        key = (row, self.sequence.length)
        if key not in self._sampled:
            position = int(self.positions[row]) + 1
            logits = self.row(row)
            sampler_after = self.sampler_after(row)
            is_valid = pass_token >= 0 and sampler_after.allows(pass_token)
            token = (
                pass_token if is_valid else self.sequence.sample(sampler_after, logits, position)
            )
            if self._request.runner == "target":
                self.sequence.record_logprobs(logits, position, token, sampler_after)
            self._sampled[key] = token
        return self._sampled[key]

    def distribution(self, row: int) -> Distribution:
        """The distribution from which `sample(row)` samples."""
        return self.sampler_after(row).distribution(self.row(row))
