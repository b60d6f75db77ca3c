"""One generation in progress. Plain data, and the verbs a decoder speaks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import EarlyExitRows, SequenceCache
from anydecode.scoring.cost import CostModel
from anydecode.scoring.noise import Noise
from anydecode.scoring.score import MultiStep, ScoreRequest, Scores
from anydecode.scoring.span import (
    Block,
    ChainSpan,
    CompletionSpan,
    MultiStepSpan,
    Overwrite,
    Span,
    TreeSpan,
)
from anydecode.scoring.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from anydecode.sampling.sampler import Sampler

TARGET = "target"
_ids = count()


class StopChecker(Protocol):
    """Takes emitted tokens, applies the stop rules, and keeps the text."""

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        """How many of `tokens` were taken, and the finish reason if that ended the generation."""
        ...

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        ...

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that would; None where the text may end it too (a stop string)."""
        ...

    @property
    def remaining(self) -> int:
        """How many tokens may still be said."""
        ...


@dataclass(eq=False)
class Sequence:
    """Prompt, tokens, contexts, policy, noise, stop rules.

    `state` is for whatever a decoder must remember across a restart (beams, a canvas): plain data.
    Everything else a decoder holds is lost when it is preempted; it then starts again from here.
    """

    prompt: list[int]
    sampler: Sampler
    noise: Noise
    stop_checker: StopChecker
    open_context: Callable[[str, list[int]], SequenceCache]
    companion_prompts: list[list[int]] = field(default_factory=list)
    annotate: Callable[[np.ndarray, int, Sampler], Any] | None = None  # a token's log-probabilities
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    adapter: int = -1
    priority: int = 0
    mask_token: int | None = None
    num_layers: int = 1
    namespace: Hashable = None
    shares_prefix: bool = True
    num_passes: int = 0
    num_rows: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from the target's prefix cache
    trace: list[dict[str, Any]] | None = None
    tokenizers: dict[str, Any] = field(default_factory=dict)  # by lane
    cost_model: CostModel | None = None  # what passes cost, and how busy the engine is
    parent: Sequence | None = None
    id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        self._contexts: dict[str, list[SequenceCache]] = {}
        self._children: list[Sequence] = []
        self._notes: dict[tuple[int, int], Any] = {}

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    def context(self, runner: str = TARGET) -> SequenceCache:
        """This sequence's memory in `runner`'s model, opened when first asked for. It may begin
        with
        a prefix that an earlier request left."""
        return self._opened(runner)[0]

    def unscored(self, runner: str = TARGET) -> list[int]:
        """The tokens that `runner`'s model has not seen yet; never empty while generating."""
        return self._from(self.context(runner).length)

    def score(
        self,
        tokens: Seq[int] | None = None,
        *,
        runner: str = TARGET,
        rows: str = "last",
        layers: tuple[int, int] | None = None,
        hidden: tuple[int, ...] = (),
        embeddings: torch.Tensor | None = None,
        parallel: int = 0,
        extra_tokens: int = 0,
        companions: bool = True,
    ) -> ScoreRequest:
        """Score `tokens` (default: the unscored ones) as a chain behind the context.

        `rows` is "last" or "all": which rows come back. `layers` is the layer range `(0, k)` of an
        early exit. `hidden` names layers whose states come back. `embeddings`, float32
        `[rows, hidden_size]`, stand in place of tokens. With `parallel`, layers run in groups of
        that many, side by side: an approximation that drafts can be made with
        (`Network.grouped`). With `ahead` the backend may go on by itself and score up to so many of
        its own choices (`ScoreRequest.said`), where nobody has to see the logits of each. Without
        `companions` the companion prompts are not scored beside it.
        """
        if tokens is None:
            tokens = self.unscored(runner)
        if not len(tokens):
            raise InvalidRequestError("there is nothing to score: the prompt is empty")
        context = self.context(runner)
        first = context.length
        depth = context.pool.model.spec.num_layers
        start, stop = layers or (0, depth)
        answers = [len(tokens) - 1] if rows == "last" else list(range(len(tokens)))
        taps = self._capture_layers(hidden, runner, stop)
        shape = (context, tokens, start, stop, answers, taps)
        end_tokens = self.end_tokens if extra_tokens > 0 else None
        span = (
            ChainSpan(*shape, inputs=embeddings)
            if end_tokens is None
            else MultiStepSpan(
                *shape, inputs=embeddings, extra_tokens=extra_tokens, end_tokens=end_tokens
            )
        )
        span.parallel = parallel
        return self._build(
            runner,
            span,
            tokens,
            first + np.asarray(answers),
            [tokens[i] for i in answers],
            companions,
        )

    def verify(
        self,
        tree: TokenTree,
        *,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
        grows: bool = False,
    ) -> ScoreRequest:
        """Score the unscored tokens and then `tree` behind them. Row 0 answers for the last
        unscored token, row i + 1 for node i. Keep a path with `accept`. With `grows`, `extend` may
        lengthen the tree before."""
        unscored = self.unscored(runner)
        if not len(tree):
            return self.score(unscored, runner=runner, hidden=hidden)
        context = self.context(runner)
        depth = context.pool.model.spec.num_layers
        taps = self._capture_layers(hidden, runner)
        if tree.is_chain and not grows:  # positions like any others, until some are taken back
            tokens = [*unscored, *tree.tokens]
            first = len(unscored) - 1
            span = ChainSpan(context, tokens, 0, depth, range(first, len(tokens)), taps)
            positions = np.arange(context.length + first, context.length + len(tokens))
            return self._build(runner, span, tokens, positions, tokens[first:])
        root = ChainSpan(context, unscored, 0, depth, [len(unscored) - 1], taps)
        nodes = range(len(tree))
        base = context.length + len(unscored) - 1
        positions = np.array([base] + [base + tree.depth(node) for node in nodes])
        score = self._build(runner, root, unscored, positions, [unscored[-1], *tree.tokens])
        score.row_parents = [ROOT] + [parent + 1 for parent in tree.parents]
        for spans in score.groups:
            trunk = spans[-1]
            spans.append(
                TreeSpan(
                    trunk.context, tree.tokens, 0, depth, list(nodes), taps, parents=tree.parents
                )
            )
        return score

    def extend(
        self, tokens: Seq[int], parents: Seq[int], *, runner: str, hidden: tuple[int, ...] = ()
    ) -> ScoreRequest:
        """Score further nodes of the token tree that is pending in `runner`, or its first ones.
        `parents` are nodes of that tree in the order they were scored, or `ROOT`: the last position
        of the context. One row per node comes back."""
        context = self.context(runner)
        held = [] if context.pending is None else context.pending.parents
        whole = [*held, *parents]
        depths: list[int] = []
        for parent in whole:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        first, depth = len(held), context.pool.model.spec.num_layers
        rows = range(len(tokens))
        taps = self._capture_layers(hidden, runner)
        span = TreeSpan(context, tokens, 0, depth, rows, taps, parents=whole, first=first)
        positions = context.length - 1 + np.asarray(depths[first:], np.int64)
        above = [parent - first if parent >= first else ROOT for parent in parents]
        return ScoreRequest(self, runner, [[span]], positions, above, list(tokens))

    def block(
        self,
        tokens: Seq[int],
        *,
        store: bool = False,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
        embeddings: torch.Tensor | None = None,
    ) -> ScoreRequest:
        """Score `tokens` as a block whose rows all see the context and each other. All rows come
        back. With `store` they become the context's next positions."""
        context = self.context(runner)
        depth = context.pool.model.spec.num_layers
        rows = list(range(len(tokens)))
        span = Block(
            context,
            tokens,
            0,
            depth,
            rows,
            self._capture_layers(hidden, runner),
            inputs=embeddings,
            store=store,
        )
        positions = context.length + np.arange(len(tokens))
        return self._build(runner, span, tokens, positions, list(tokens))

    def overwrite(
        self,
        positions: Seq[int],
        tokens: Seq[int],
        *,
        visible: int | None = None,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
    ) -> ScoreRequest:
        """Score `tokens` anew at the positions `positions` that the context already holds; each row
        sees the first `visible` positions (default: all). All rows come back."""
        context = self.context(runner)
        depth = context.pool.model.spec.num_layers
        index = np.asarray(positions, np.int32)
        span = Overwrite(
            context,
            tokens,
            0,
            depth,
            list(range(len(tokens))),
            self._capture_layers(hidden, runner),
            visible=context.length if visible is None else visible,
            positions=index,
        )
        return self._build(runner, span, tokens, index, list(tokens))

    def complete(
        self,
        tokens: Seq[int] = (),
        *,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
        stop: int | None = None,
    ) -> ScoreRequest:
        """Run the positions that stopped at an early layer through the rest, and `tokens` behind
        them through all layers. All those rows come back. With `stop` (and no tokens), run those
        that stopped before that layer up to it."""
        context = self.context(runner)
        depth = context.pool.model.spec.num_layers
        last = depth if stop is None else stop
        if not context.partials or (len(tokens) and last < depth):
            raise InvalidRequestError("no position stopped at an early layer")
        taps = self._capture_layers(hidden, runner, last)
        if any(layer < partial.depth for layer in taps for partial in _before_layer(context, last)):
            raise UnsupportedCombinationError(
                "a policy that looks at early layers (DoLa) does not work with a decoder that stops"
                " at early layers"
            )
        spans: list[Span] = list(self._completions(context, taps, last))
        positions: list[int] = []
        for span, partial in zip(spans, _before_layer(context, last), strict=True):
            span.output_rows = range(len(span))
            positions += range(partial.start, partial.stop)
        if len(tokens):
            spans.append(ChainSpan(context, tokens, 0, depth, range(len(tokens)), taps))
        held = [*(context.tokens[position] for position in positions), *tokens]
        row_positions = np.array([*positions, *range(context.length, context.length + len(tokens))])
        return ScoreRequest(
            self, runner, [spans], row_positions, self._chain_parents(row_positions), held
        )

    def multi_step(self, count: int) -> MultiStep:
        """Pick and rescore up to `count` tokens without coming back in between."""
        return MultiStep(self, count)

    def sample(self, sampler: Sampler, logits: np.ndarray, position: int, attempt: int = 0) -> int:
        """The token `policy` picks for `position`, with the noise that belongs there."""
        return sampler.sample(logits, self.noise, position, attempt)

    def record_logprobs(
        self, logits: np.ndarray, position: int, token: int, sampler: Sampler
    ) -> None:
        """Keep the log-probabilities of a token that `policy` picked until it is emitted."""
        if self.annotate is not None:
            self._notes[position, token] = self.annotate(logits, token, sampler)

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        return self.stop_checker.stops_at(token)

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that end the generation, if all else it takes to say tokens is to score them
        and choose, so that a backend can do it by itself; else None."""
        simple = self.sampler.is_temperature_only and self.annotate is None
        return self.stop_checker.end_tokens if simple else None

    @property
    def remaining(self) -> int:
        """How many tokens may still be said."""
        return self.stop_checker.remaining

    def emit(
        self, tokens: Seq[int], state: Sampler | None = None, notes: Seq[Any] | None = None
    ) -> int:
        """Say `tokens`. Applies the stop rules; returns how many tokens were taken. `state` is a
        policy that has already been told all of `tokens` but the last. `notes` are the tokens'
        log-probabilities, where the decoder has kept them itself."""
        if self.finished or not len(tokens):
            return 0
        first = self.length
        taken, self.finish_reason = self.stop_checker.push(list(tokens))
        said = list(tokens[:taken])
        self.tokens.extend(said)
        if self.annotate is not None:
            if notes is None:
                notes = [self._notes.get((first + i, token)) for i, token in enumerate(said)]
            self.logprobs.extend(notes[:taken])
            self._notes.clear()
        if state is None:
            for token in said:
                self.sampler.advance(token)
        else:
            self.sampler = state
            state.advance(tokens[-1])
        return taken

    def accept(self, path: Seq[int], tokens: Seq[int], scores: Scores, runner: str = TARGET) -> int:
        """Keep the nodes of `path` from a verified tree and say `tokens` (the path's, then one
        more). Returns how many tokens were taken."""
        contexts = self._opened(runner)
        if contexts[0].pending is not None:
            for context in contexts:
                context.retain(path)
        elif contexts[0].length > self.length + len(path):  # a chain
            self.truncate(self.length + len(path), runner)
        state = (
            scores.sampler_after(path[-1] + 1 if len(path) else 0)
            if self.sampler.stateful
            else None
        )
        return self.emit(tokens, state)

    def record(self, tree: TokenTree, path: Seq[int], tokens: Seq[int], **facts: Any) -> None:
        """Note one round for the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(
                {
                    "position": self.length,
                    "drafted": list(tree.tokens),
                    "parents": list(tree.parents),
                    "sources": tree.sources,
                    "accepted": list(path),
                    "tokens": list(tokens),
                    **facts,
                }
            )

    def truncate(self, length: int, runner: str = TARGET) -> None:
        """Forget positions from `length` on, in every context of `runner`."""
        contexts = self._opened(runner)
        prompts = [self.prompt, *self.companion_prompts][: len(contexts)]
        for context, prompt in zip(contexts, prompts, strict=True):
            context.truncate(length - len(self.prompt) + len(prompt))

    def fork(self, number: int = 0) -> Sequence:
        """A branch of this sequence: the same tokens, memory and policy state, and noise of its own
        if `number` is not 0. It belongs to this sequence and is released with it."""
        child = Sequence(
            prompt=self.prompt,
            sampler=self.sampler.fork(),
            noise=self.noise.forked(number) if number else self.noise,
            stop_checker=self.stop_checker,
            open_context=self.open_context,
            companion_prompts=self.companion_prompts,
            tokens=list(self.tokens),
            adapter=self.adapter,
            mask_token=self.mask_token,
            num_layers=self.num_layers,
            namespace=self.namespace,
            shares_prefix=self.shares_prefix,
            parent=self,
        )
        for runner, contexts in self._contexts.items():
            child._contexts[runner] = [context.fork() for context in contexts]
        self._children.append(child)
        return child

    def branch(self) -> Sequence:
        """A fork that belongs to the same root as this one."""
        sibling = self.fork()
        if self.parent is not None:
            self._children.remove(sibling)
            sibling.parent = self.parent
            self.parent._children.append(sibling)
        return sibling

    def append(self, token: int) -> None:
        """Lengthen a branch by a token that is not said yet."""
        self.tokens.append(token)
        self.sampler.advance(token)

    def release(self) -> None:
        """Give back the memory of this sequence and its branches."""
        for child in list(self._children):
            child.release()
        for contexts in self._contexts.values():
            for context in contexts:
                context.release()
        self._contexts.clear()
        if self.parent is not None and self in self.parent._children:
            self.parent._children.remove(self)

    def contexts(self, runner: str | None = None) -> list[SequenceCache]:
        """Every open context (of `runner`), branches included."""
        own = [
            context
            for name, contexts in self._contexts.items()
            if runner in (None, name)
            for context in contexts
        ]
        return own + [context for child in self._children for context in child.contexts(runner)]

    def align(self, runner: str) -> None:
        """Forget what `runner` holds beyond the tokens this sequence really has (rejected
        drafts)."""
        context, known = self.context(runner), self.all_tokens
        context.discard()
        held = context.tokens
        if held != known[: len(held)]:
            same = next(i for i, token in enumerate(held) if i >= len(known) or token != known[i])
            context.truncate(same)
        if context.length >= len(known):
            context.truncate(len(known) - 1)

    def is_open(self, runner: str) -> bool:
        return runner in self._contexts

    @property
    def root(self) -> Sequence:
        """The sequence that this is a branch of, or itself."""
        return self if self.parent is None else self.parent.root

    def _opened(self, runner: str) -> list[SequenceCache]:
        if runner not in self._contexts:
            prompts = [self.prompt]
            if runner == TARGET:
                prompts += self.companion_prompts
            self._contexts[runner] = [
                self.open_context(runner, prompt + self.tokens) for prompt in prompts
            ]
        return self._contexts[runner]

    def _from(self, position: int) -> list[int]:
        if position >= len(self.prompt):
            return self.tokens[position - len(self.prompt) :]
        return self.prompt[position:] + self.tokens

    def _capture_layers(
        self, hidden: tuple[int, ...], runner: str, stop: int | None = None
    ) -> tuple[int, ...]:
        """`hidden` and what the policy wants to see of rows that run through all layers."""
        sampler, depth = self.sampler, self.num_layers
        if runner != TARGET or (stop is not None and stop < depth):
            return hidden
        if not sampler.capture_layers and not sampler.observes_hidden:
            return hidden
        return tuple(
            sorted(
                {*hidden, *sampler.capture_layers, *([depth] if sampler.observes_hidden else ())}
            )
        )

    def _build(
        self,
        runner: str,
        span: Span,
        chain: Seq[int],
        positions: np.ndarray,
        held: list[int],
        companions: bool = True,
    ) -> ScoreRequest:
        """A score of `span`, with what must run before it and beside it. `chain` is the part of its
        tokens that companions follow."""
        spans: list[Span] = []
        if span.context.partials and not span.is_partial:
            spans += self._completions(span.context, ())
        groups = [[*spans, span]]
        if companions and runner == TARGET and self.companion_prompts:
            groups += [[companion] for companion in self._companions(span, chain)]
        parents = self._chain_parents(positions)
        return ScoreRequest(self, runner, groups, positions, parents, held)

    def _companions(self, span: Span, chain: Seq[int]) -> list[Span]:
        if not isinstance(span, ChainSpan) or span.inputs is not None:
            raise UnsupportedCombinationError(
                "guidance with a second prompt works on token chains and trees only"
            )
        spans: list[Span] = []
        extra = list(chain[len(self.unscored()) :])
        is_open = self._opened(TARGET)
        for context, prompt in zip(is_open[1:], self.companion_prompts, strict=True):
            tokens = (prompt + self.tokens)[context.length :] + extra
            answers = range(len(tokens) - len(span.output_rows), len(tokens))
            if answers[0] < 0:
                raise UnsupportedCombinationError(
                    "guidance needs a second prompt at least as long as the rows asked for"
                )
            spans.append(
                ChainSpan(
                    context, tokens, span.start, span.stop, list(answers), span.capture_layers
                )
            )
        return spans

    def _completions(
        self, context: SequenceCache, taps: tuple[int, ...], stop: int | None = None
    ) -> list[CompletionSpan]:
        last = context.pool.model.spec.num_layers if stop is None else stop
        return [
            CompletionSpan(
                context,
                [-1] * len(partial.hidden),
                partial.depth,
                last,
                capture_layers=taps,
                inputs=partial.hidden,
                partial=partial,
            )
            for partial in _before_layer(context, last)
        ]

    @staticmethod
    def _chain_parents(positions: Any) -> list[int]:
        return [row - 1 for row in range(len(positions))]


def _before_layer(context: SequenceCache, layer: int) -> list[EarlyExitRows]:
    """Positions that have not reached `layer`."""
    return [partial for partial in context.partials if partial.depth < layer]
