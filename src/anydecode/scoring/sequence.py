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
from anydecode.memory.context import Context, Partial
from anydecode.scoring.cost import Pace
from anydecode.scoring.noise import Noise
from anydecode.scoring.score import Follow, Score, Scores
from anydecode.scoring.span import (
    Block,
    Branches,
    Chain,
    Completion,
    Overwrite,
    Span,
    Trail,
)
from anydecode.scoring.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from anydecode.sampling.policy import Policy

TARGET = "target"
_ids = count()


class Listener(Protocol):
    """Takes emitted tokens, applies the stop rules, and keeps the text."""

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        """How many of `tokens` were taken, and the finish reason if that ended the generation."""
        ...

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        ...

    @property
    def ends(self) -> frozenset[int] | None:
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
    policy: Policy
    noise: Noise
    listener: Listener
    open_context: Callable[[str, list[int]], Context]
    companion_prompts: list[list[int]] = field(default_factory=list)
    annotate: Callable[[np.ndarray, int, Policy], Any] | None = None  # a token's log-probabilities
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
    pace: Pace | None = None  # what passes cost, and how busy the engine is
    parent: Sequence | None = None
    id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        self._contexts: dict[str, list[Context]] = {}
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

    def context(self, lane: str = TARGET) -> Context:
        """This sequence's memory in `lane`'s model, opened when first asked for. It may begin with
        a prefix that an earlier request left."""
        return self._opened(lane)[0]

    def unscored(self, lane: str = TARGET) -> list[int]:
        """The tokens that `lane`'s model has not seen yet; never empty while generating."""
        return self._from(self.context(lane).length)

    def score(
        self,
        tokens: Seq[int] | None = None,
        *,
        lane: str = TARGET,
        rows: str = "last",
        layers: tuple[int, int] | None = None,
        hidden: tuple[int, ...] = (),
        embeddings: torch.Tensor | None = None,
        parallel: int = 0,
        ahead: int = 0,
        companions: bool = True,
    ) -> Score:
        """Score `tokens` (default: the unscored ones) as a chain behind the context.

        `rows` is "last" or "all": which rows come back. `layers` is the layer range `(0, k)` of an
        early exit. `hidden` names layers whose states come back. `embeddings`, float32
        `[rows, hidden_size]`, stand in place of tokens. With `parallel`, layers run in groups of
        that many, side by side: an approximation that drafts can be made with
        (`Network.grouped`). With `ahead` the backend may go on by itself and score up to so many of
        its own choices (`Score.said`), where nobody has to see the logits of each. Without
        `companions` the companion prompts are not scored beside it.
        """
        if tokens is None:
            tokens = self.unscored(lane)
        if not len(tokens):
            raise InvalidRequestError("there is nothing to score: the prompt is empty")
        context = self.context(lane)
        first = context.length
        depth = context.pool.model.spec.num_layers
        start, stop = layers or (0, depth)
        answers = [len(tokens) - 1] if rows == "last" else list(range(len(tokens)))
        taps = self._taps(hidden, lane, stop)
        shape = (context, tokens, start, stop, answers, taps)
        ends = self.ends if ahead > 0 else None
        span = (
            Chain(*shape, inputs=embeddings)
            if ends is None
            else Trail(*shape, inputs=embeddings, ahead=ahead, ends=ends)
        )
        span.parallel = parallel
        return self._build(
            lane,
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
        lane: str = TARGET,
        hidden: tuple[int, ...] = (),
        grows: bool = False,
    ) -> Score:
        """Score the unscored tokens and then `tree` behind them. Row 0 answers for the last
        unscored token, row i + 1 for node i. Keep a path with `accept`. With `grows`, `extend` may
        lengthen the tree before."""
        unscored = self.unscored(lane)
        if not len(tree):
            return self.score(unscored, lane=lane, hidden=hidden)
        context = self.context(lane)
        depth = context.pool.model.spec.num_layers
        taps = self._taps(hidden, lane)
        if tree.is_chain and not grows:  # positions like any others, until some are taken back
            tokens = [*unscored, *tree.tokens]
            first = len(unscored) - 1
            span = Chain(context, tokens, 0, depth, range(first, len(tokens)), taps)
            positions = np.arange(context.length + first, context.length + len(tokens))
            return self._build(lane, span, tokens, positions, tokens[first:])
        root = Chain(context, unscored, 0, depth, [len(unscored) - 1], taps)
        nodes = range(len(tree))
        base = context.length + len(unscored) - 1
        positions = np.array([base] + [base + tree.depth(node) for node in nodes])
        score = self._build(lane, root, unscored, positions, [unscored[-1], *tree.tokens])
        score.row_parents = [ROOT] + [parent + 1 for parent in tree.parents]
        for spans in score.groups:
            trunk = spans[-1]
            spans.append(
                Branches(
                    trunk.context, tree.tokens, 0, depth, list(nodes), taps, parents=tree.parents
                )
            )
        return score

    def extend(
        self, tokens: Seq[int], parents: Seq[int], *, lane: str, hidden: tuple[int, ...] = ()
    ) -> Score:
        """Score further nodes of the token tree that is pending in `lane`, or its first ones.
        `parents` are nodes of that tree in the order they were scored, or `ROOT`: the last position
        of the context. One row per node comes back."""
        context = self.context(lane)
        held = [] if context.pending is None else context.pending.parents
        whole = [*held, *parents]
        depths: list[int] = []
        for parent in whole:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        first, depth = len(held), context.pool.model.spec.num_layers
        rows = range(len(tokens))
        taps = self._taps(hidden, lane)
        span = Branches(context, tokens, 0, depth, rows, taps, parents=whole, first=first)
        positions = context.length - 1 + np.asarray(depths[first:], np.int64)
        above = [parent - first if parent >= first else ROOT for parent in parents]
        return Score(self, lane, [[span]], positions, above, list(tokens))

    def block(
        self,
        tokens: Seq[int],
        *,
        store: bool = False,
        lane: str = TARGET,
        hidden: tuple[int, ...] = (),
        embeddings: torch.Tensor | None = None,
    ) -> Score:
        """Score `tokens` as a block whose rows all see the context and each other. All rows come
        back. With `store` they become the context's next positions."""
        context = self.context(lane)
        depth = context.pool.model.spec.num_layers
        rows = list(range(len(tokens)))
        span = Block(
            context,
            tokens,
            0,
            depth,
            rows,
            self._taps(hidden, lane),
            inputs=embeddings,
            store=store,
        )
        positions = context.length + np.arange(len(tokens))
        return self._build(lane, span, tokens, positions, list(tokens))

    def overwrite(
        self,
        places: Seq[int],
        tokens: Seq[int],
        *,
        visible: int | None = None,
        lane: str = TARGET,
        hidden: tuple[int, ...] = (),
    ) -> Score:
        """Score `tokens` anew at the positions `places` that the context already holds; each row
        sees the first `visible` positions (default: all). All rows come back."""
        context = self.context(lane)
        depth = context.pool.model.spec.num_layers
        positions = np.asarray(places, np.int32)
        span = Overwrite(
            context,
            tokens,
            0,
            depth,
            list(range(len(tokens))),
            self._taps(hidden, lane),
            visible=context.length if visible is None else visible,
            places=positions,
        )
        return self._build(lane, span, tokens, positions, list(tokens))

    def complete(
        self,
        tokens: Seq[int] = (),
        *,
        lane: str = TARGET,
        hidden: tuple[int, ...] = (),
        stop: int | None = None,
    ) -> Score:
        """Run the positions that stopped at an early layer through the rest, and `tokens` behind
        them through all layers. All those rows come back. With `stop` (and no tokens), run those
        that stopped before that layer up to it."""
        context = self.context(lane)
        depth = context.pool.model.spec.num_layers
        last = depth if stop is None else stop
        if not context.partials or (len(tokens) and last < depth):
            raise InvalidRequestError("no position stopped at an early layer")
        taps = self._taps(hidden, lane, last)
        if any(layer < partial.depth for layer in taps for partial in _behind(context, last)):
            raise UnsupportedCombinationError(
                "a policy that looks at early layers (DoLa) does not work with a decoder that stops"
                " at early layers"
            )
        spans: list[Span] = list(self._completions(context, taps, last))
        places: list[int] = []
        for span, partial in zip(spans, _behind(context, last), strict=True):
            span.answers = range(len(span))
            places += range(partial.start, partial.stop)
        if len(tokens):
            spans.append(Chain(context, tokens, 0, depth, range(len(tokens)), taps))
        held = [*(context.tokens[place] for place in places), *tokens]
        positions = np.array([*places, *range(context.length, context.length + len(tokens))])
        return Score(self, lane, [spans], positions, self._chain_parents(positions), held)

    def follow(self, count: int) -> Follow:
        """Pick and rescore up to `count` tokens without coming back in between."""
        return Follow(self, count)

    def pick(self, policy: Policy, logits: np.ndarray, position: int, attempt: int = 0) -> int:
        """The token `policy` picks for `position`, with the noise that belongs there."""
        return policy.pick(logits, self.noise, position, attempt)

    def note(self, logits: np.ndarray, position: int, token: int, policy: Policy) -> None:
        """Keep the log-probabilities of a token that `policy` picked until it is emitted."""
        if self.annotate is not None:
            self._notes[position, token] = self.annotate(logits, token, policy)

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        return self.listener.stops_at(token)

    @property
    def ends(self) -> frozenset[int] | None:
        """The tokens that end the generation, if all else it takes to say tokens is to score them
        and choose, so that a backend can do it by itself; else None."""
        simple = self.policy.is_plain and self.annotate is None
        return self.listener.ends if simple else None

    @property
    def remaining(self) -> int:
        """How many tokens may still be said."""
        return self.listener.remaining

    def emit(
        self, tokens: Seq[int], state: Policy | None = None, notes: Seq[Any] | None = None
    ) -> int:
        """Say `tokens`. Applies the stop rules; returns how many tokens were taken. `state` is a
        policy that has already been told all of `tokens` but the last. `notes` are the tokens'
        log-probabilities, where the decoder has kept them itself."""
        if self.finished or not len(tokens):
            return 0
        first = self.length
        taken, self.finish_reason = self.listener.push(list(tokens))
        said = list(tokens[:taken])
        self.tokens.extend(said)
        if self.annotate is not None:
            if notes is None:
                notes = [self._notes.get((first + i, token)) for i, token in enumerate(said)]
            self.logprobs.extend(notes[:taken])
            self._notes.clear()
        if state is None:
            for token in said:
                self.policy.advance(token)
        else:
            self.policy = state
            state.advance(tokens[-1])
        return taken

    def accept(self, path: Seq[int], tokens: Seq[int], scores: Scores, lane: str = TARGET) -> int:
        """Keep the nodes of `path` from a verified tree and say `tokens` (the path's, then one
        more). Returns how many tokens were taken."""
        contexts = self._opened(lane)
        if contexts[0].pending is not None:
            for context in contexts:
                context.retain(path)
        elif contexts[0].length > self.length + len(path):  # a chain
            self.truncate(self.length + len(path), lane)
        state = scores.state(path[-1] + 1 if len(path) else 0) if self.policy.stateful else None
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

    def truncate(self, length: int, lane: str = TARGET) -> None:
        """Forget positions from `length` on, in every context of `lane`."""
        contexts = self._opened(lane)
        prompts = [self.prompt, *self.companion_prompts][: len(contexts)]
        for context, prompt in zip(contexts, prompts, strict=True):
            context.truncate(length - len(self.prompt) + len(prompt))

    def fork(self, number: int = 0) -> Sequence:
        """A branch of this sequence: the same tokens, memory and policy state, and noise of its own
        if `number` is not 0. It belongs to this sequence and is released with it."""
        child = Sequence(
            prompt=self.prompt,
            policy=self.policy.fork(),
            noise=self.noise.forked(number) if number else self.noise,
            listener=self.listener,
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
        for lane, contexts in self._contexts.items():
            child._contexts[lane] = [context.fork() for context in contexts]
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
        self.policy.advance(token)

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

    def contexts(self, lane: str | None = None) -> list[Context]:
        """Every open context (of `lane`), branches included."""
        own = [
            context
            for name, contexts in self._contexts.items()
            if lane in (None, name)
            for context in contexts
        ]
        return own + [context for child in self._children for context in child.contexts(lane)]

    def align(self, lane: str) -> None:
        """Forget what `lane` holds beyond the tokens this sequence really has (rejected drafts)."""
        context, known = self.context(lane), self.all_tokens
        context.discard()
        held = context.tokens
        if held != known[: len(held)]:
            same = next(i for i, token in enumerate(held) if i >= len(known) or token != known[i])
            context.truncate(same)
        if context.length >= len(known):
            context.truncate(len(known) - 1)

    def opened(self, lane: str) -> bool:
        return lane in self._contexts

    @property
    def root(self) -> Sequence:
        """The sequence that this is a branch of, or itself."""
        return self if self.parent is None else self.parent.root

    def _opened(self, lane: str) -> list[Context]:
        if lane not in self._contexts:
            prompts = [self.prompt]
            if lane == TARGET:
                prompts += self.companion_prompts
            self._contexts[lane] = [
                self.open_context(lane, prompt + self.tokens) for prompt in prompts
            ]
        return self._contexts[lane]

    def _from(self, position: int) -> list[int]:
        if position >= len(self.prompt):
            return self.tokens[position - len(self.prompt) :]
        return self.prompt[position:] + self.tokens

    def _taps(self, hidden: tuple[int, ...], lane: str, stop: int | None = None) -> tuple[int, ...]:
        """`hidden` and what the policy wants to see of rows that run through all layers."""
        policy, depth = self.policy, self.num_layers
        if lane != TARGET or (stop is not None and stop < depth):
            return hidden
        if not policy.taps and not policy.sees_states:
            return hidden
        return tuple(sorted({*hidden, *policy.taps, *([depth] if policy.sees_states else ())}))

    def _build(
        self,
        lane: str,
        span: Span,
        chain: Seq[int],
        positions: np.ndarray,
        held: list[int],
        companions: bool = True,
    ) -> Score:
        """A score of `span`, with what must run before it and beside it. `chain` is the part of its
        tokens that companions follow."""
        spans: list[Span] = []
        if span.context.partials and not span.is_partial:
            spans += self._completions(span.context, ())
        groups = [[*spans, span]]
        if companions and lane == TARGET and self.companion_prompts:
            groups += [[companion] for companion in self._companions(span, chain)]
        parents = self._chain_parents(positions)
        return Score(self, lane, groups, positions, parents, held)

    def _companions(self, span: Span, chain: Seq[int]) -> list[Span]:
        if not isinstance(span, Chain) or span.inputs is not None:
            raise UnsupportedCombinationError(
                "guidance with a second prompt works on token chains and trees only"
            )
        spans: list[Span] = []
        extra = list(chain[len(self.unscored()) :])
        opened = self._opened(TARGET)
        for context, prompt in zip(opened[1:], self.companion_prompts, strict=True):
            tokens = (prompt + self.tokens)[context.length :] + extra
            answers = range(len(tokens) - len(span.answers), len(tokens))
            if answers[0] < 0:
                raise UnsupportedCombinationError(
                    "guidance needs a second prompt at least as long as the rows asked for"
                )
            spans.append(Chain(context, tokens, span.start, span.stop, list(answers), span.taps))
        return spans

    def _completions(
        self, context: Context, taps: tuple[int, ...], stop: int | None = None
    ) -> list[Completion]:
        last = context.pool.model.spec.num_layers if stop is None else stop
        return [
            Completion(
                context,
                [-1] * len(partial.hidden),
                partial.depth,
                last,
                taps=taps,
                inputs=partial.hidden,
                partial=partial,
            )
            for partial in _behind(context, last)
        ]

    @staticmethod
    def _chain_parents(positions: Any) -> list[int]:
        return [row - 1 for row in range(len(positions))]


def _behind(context: Context, layer: int) -> list[Partial]:
    """Positions that have not reached `layer`."""
    return [partial for partial in context.partials if partial.depth < layer]
