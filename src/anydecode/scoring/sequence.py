"""The interface between a decoder and the engine: builds the score requests of one generation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import STORE_ONLY, BurstDrafter, BurstDrafts, Variant
from anydecode.kernels.routes import Guide
from anydecode.memory.sequence_cache import EarlyExitRows, SequenceCache
from anydecode.scoring.draft_states import MAX_STATES
from anydecode.scoring.prompt_embeds import PROMPT_EMBEDS
from anydecode.scoring.score import MultiStep, ScoreRequest, Scores
from anydecode.scoring.sequence_data import DRAFT, FURTHER_DRAFTS, TARGET, SequenceData
from anydecode.scoring.span import ChainSpan, CompletionSpan, MultiStepSpan, Span, TreeSpan
from anydecode.scoring.tree import ROOT, TokenTree

__all__ = ["DRAFT", "FURTHER_DRAFTS", "TARGET", "Sequence"]


class Sequence(SequenceData):
    """One generation in progress, as its decoder sees it.

    A decoder builds score requests with `score`, `verify`, `extend` and the like, yields them, and
    adds tokens to the text with `emit` or `accept`.
    """

    def score(
        self,
        tokens: Seq[int] | None = None,
        *,
        runner: str = TARGET,
        rows: str | int = "last",
        layers: tuple[int, int] | None = None,
        hidden: tuple[int, ...] = (),
        embeddings: np.ndarray | None = None,
        variant: Variant | None = None,
        guides: Seq[Guide] = (),
        extra_tokens: int = 0,
        min_probability: float | None = None,
        drafts: BurstDrafts | None = None,
        companions: bool = True,
        logits: bool = True,
        samples: bool = True,
    ) -> ScoreRequest:
        """Returns a request that appends `tokens` to the cache as a causal chain and scores them.

        Args:
            tokens: Token ids; by default the unscored ones, with the embeddings that the prompt
                has in place of some of them.
            runner: The model that runs.
            rows: Which rows to return: "last", "all" or the number of last rows.
            layers: The layer range `(0, k)` of an early exit, or, with `embeddings` of states, one
                that starts later; by default all layers.
            hidden: Layers whose hidden states to return for the same rows.
            embeddings: float32 `[rows, hidden_size]`, used in place of token embeddings.
            variant: Another way to run the layers, such as without some of them; None: the layers
                as they are.
            guides: One per token if the variant is a `Route`.
            extra_tokens: Up to this many further tokens may be sampled and scored by the backend
                in the same pass (`ScoreRequest.multi_step_tokens`), if nothing but the sampled
                tokens is needed of them.
            min_probability: For a draft: the backend stops when the product of the probabilities
                of the tokens that it has sampled is below this.
            drafts: With `extra_tokens`: drafts that the backend may find in its steps.
            companions: Whether to score the companion prompts too.
            logits: Whether to return logits, besides the hidden states.
            samples: Whether `Scores.sampled` will be read, so that the pass may sample tokens.

        Raises:
            InvalidRequestError: If there is no token to score.
        """
        embedded = None
        if tokens is None:
            tokens = self.unscored(runner)
            if runner == TARGET and embeddings is None:
                embeddings, embedded = self._prompt_embeds(len(tokens))
        if not len(tokens):
            raise InvalidRequestError("there is nothing to score: the prompt is empty")
        kv_cache, states = self.kv_cache(runner), None
        if runner in self.draft_states:
            tokens, states = self._with_states(runner, tokens)
        first = kv_cache.length
        depth = kv_cache.pool.model.spec.num_layers
        start, stop = layers or (0, depth)
        num_rows = rows if isinstance(rows, int) else 1 if rows == "last" else len(tokens)
        output_rows = list(range(len(tokens) - num_rows, len(tokens)))
        capture_layers = self._capture_layers(hidden, runner, stop)
        shape = (kv_cache, tokens, start, stop, output_rows, capture_layers)
        end_tokens = self.end_tokens
        if min_probability is not None:
            end_tokens = end_tokens or frozenset()
        context = self._context(runner)
        if extra_tokens < 1 or context is not None:
            end_tokens = None
        span = (
            ChainSpan(*shape, inputs=embeddings, embedded=embedded, states=states)
            if end_tokens is None
            else MultiStepSpan(
                *shape,
                inputs=embeddings,
                embedded=embedded,
                states=states,
                extra_tokens=extra_tokens,
                end_tokens=end_tokens,
                min_probability=min_probability,
                drafts=drafts,
            )
        )
        span.variant, span.guides, span.context = variant, list(guides), context
        span.logits = logits
        if isinstance(span, MultiStepSpan) and drafts is not None and drafts.drafter is not None:
            span.draft_cache = self._cache_of(drafts.drafter)
        request = self._build(
            runner,
            span,
            tokens,
            first + np.asarray(output_rows),
            [tokens[i] for i in output_rows],
            companions,
        )
        request.samples = samples
        return request

    def verify(
        self,
        tree: TokenTree,
        *,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
        grows: bool = False,
        optional: Seq[float] = (),
    ) -> ScoreRequest:
        """Returns a request that scores the unscored tokens, then a draft tree behind them.

        Row 0 of the result belongs to the last unscored token, row i + 1 to node i. The nodes stay
        pending until `accept` keeps a path.

        Args:
            tree: The draft tokens.
            runner: The model that runs.
            hidden: Layers whose hidden states to return for the same rows.
            grows: Whether `extend` may add nodes before `accept`.
            optional: The probability of each node to be accepted, falling, if the pass may leave
                the last ones out: the result then has fewer rows. For token-exact acceptance only,
                whose text does not depend on the drafts.
        """
        unscored = self.unscored(runner)
        if not len(tree):
            return self.score(unscored, runner=runner, hidden=hidden)
        if runner in self.draft_states:
            raise UnsupportedCombinationError(
                "a drafter that reads its target's states scores one level of a tree per pass"
            )
        kv_cache = self.kv_cache(runner)
        depth = kv_cache.pool.model.spec.num_layers
        capture_layers = self._capture_layers(hidden, runner)
        if tree.is_chain and not grows and not tree.embeddings:
            # Appended like other tokens; `accept` truncates the rest.
            tokens = [*unscored, *tree.tokens]
            first = len(unscored) - 1
            span = ChainSpan(kv_cache, tokens, 0, depth, range(first, len(tokens)), capture_layers)
            positions = np.arange(kv_cache.length + first, kv_cache.length + len(tokens))
            request = self._build(runner, span, tokens, positions, tokens[first:])
            request.optional = optional
            return request
        root = ChainSpan(kv_cache, unscored, 0, depth, [len(unscored) - 1], capture_layers)
        nodes = range(len(tree))
        base = kv_cache.length + len(unscored) - 1
        positions = np.array([base] + [base + tree.depth(node) for node in nodes])
        request = self._build(runner, root, unscored, positions, [unscored[-1], *tree.tokens])
        request.optional = optional
        request.row_parents = [ROOT, *(Scores.after(parent) for parent in tree.parents)]
        inputs = None
        if tree.embeddings:
            inputs = np.zeros((len(tree), kv_cache.pool.model.spec.hidden_size), np.float32)
            inputs[list(tree.embeddings)] = list(tree.embeddings.values())
        adapters = [tree.adapters.get(node, self.adapter) for node in nodes]
        for spans in request.groups:
            trunk = spans[-1]
            branches = TreeSpan(
                trunk.kv_cache,
                tree.tokens,
                0,
                depth,
                list(nodes),
                capture_layers,
                inputs=inputs,
                adapters=adapters if tree.adapters else None,
                parents=tree.parents,
            )
            if tree.route is not None:
                trunk.variant = branches.variant = tree.route
                guides = tree.route.guides(len(trunk), tree.tokens, tree.parents)
                trunk.guides, branches.guides = guides[: len(trunk)], guides[len(trunk) :]
            spans.append(branches)
        self._tap(runner, request.groups[0][-1])
        return request

    def extend(
        self,
        tokens: Seq[int],
        parents: Seq[int],
        *,
        runner: str,
        hidden: tuple[int, ...] = (),
        block: int = 1,
        inputs: np.ndarray | None = None,
        variant: Variant | None = None,
    ) -> ScoreRequest:
        """Returns a request that scores the first or further nodes of the pending token tree of
        `runner`. The result has one row per node.

        Args:
            tokens: Token ids of the new nodes.
            parents: For each new node, a node of the whole tree in the order in which nodes were
                scored, or `ROOT` for the last position of the cache.
            runner: The model that runs.
            hidden: Layers whose hidden states to return.
            block: See `TreeSpan`.
            inputs: float32 `[nodes, hidden_size]`, read by the nodes without a token (-1), in place
                of the states that a drafter reads.
            variant: As for `score`.
        """
        kv_cache = self.kv_cache(runner)
        pending_parents = [] if kv_cache.pending is None else kv_cache.pending.parents
        depths: list[int] = []
        for parent in [*pending_parents, *parents]:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        first, depth = len(pending_parents), kv_cache.pool.model.spec.num_layers
        rows = range(len(tokens))
        capture_layers = self._capture_layers(hidden, runner)
        span = TreeSpan(
            *(kv_cache, tokens, 0, depth, rows, capture_layers),
            parents=list(parents),
            first=first,
            block=block,
            inputs=inputs,
        )
        span.variant = variant
        if runner in self.draft_states and inputs is None:
            span.states = self.draft_states[runner].for_nodes(kv_cache, parents)
            span.context = self._context(runner)
        self._tap(runner, span)
        positions = kv_cache.length - 1 + np.asarray(depths[first:], np.int64)
        row_parents = [parent - first if parent >= first else ROOT for parent in parents]
        return ScoreRequest(self, runner, [[span]], positions, row_parents, list(tokens))

    def store_context(self, runner: str) -> list[Span]:
        """Returns the spans that store the target's states in the cache of `runner`, whose drafter
        attends to them, at all positions but that of the text's last token. Positions whose states
        are not known are left out. There are no spans where everything is stored."""
        kv_cache = self.kv_cache(runner)
        tokens: Seq[int] = self.all_tokens[kv_cache.length : -1]
        if not len(tokens):
            return []
        tokens, states = self._with_states(runner, tokens)
        depth = kv_cache.pool.model.spec.num_layers
        span = ChainSpan(kv_cache, tokens, 0, depth, logits=False, inputs=states)
        span.variant = STORE_ONLY
        return [span]

    def complete(
        self,
        tokens: Seq[int] = (),
        *,
        runner: str = TARGET,
        hidden: tuple[int, ...] = (),
        stop: int | None = None,
        logits: bool = True,
    ) -> ScoreRequest:
        """Returns a request that runs early-exit positions through their remaining layers, then
        `tokens` behind them through all layers. The result has all these rows; with `stop`, the
        last one.

        Args:
            tokens: Token ids to score behind the early-exit positions.
            runner: The model that runs.
            hidden: Layers whose hidden states to return.
            stop: Without `tokens`: run only to this layer, and only the positions that have not
                reached it.
            logits: Whether to return logits, besides the hidden states.

        Raises:
            InvalidRequestError: If no position stopped at an early layer.
            UnsupportedCombinationError: If the sampler needs layers that the rows have passed.
        """
        kv_cache = self.kv_cache(runner)
        depth = kv_cache.pool.model.spec.num_layers
        last = depth if stop is None else stop
        if not kv_cache.partials or (len(tokens) and last < depth):
            raise InvalidRequestError("no position stopped at an early layer")
        capture_layers = self._capture_layers(hidden, runner, last)
        if any(
            layer < partial.depth
            for layer in capture_layers
            for partial in _before_layer(kv_cache, last)
        ):
            raise UnsupportedCombinationError(
                "a sampler that reads early layers (DoLa) does not work with a decoder that exits"
                " at early layers"
            )
        spans: list[Span] = list(self._completion_spans(kv_cache, capture_layers, last))
        positions: list[int] = []
        for span, partial in zip(spans, _before_layer(kv_cache, last), strict=True):
            span.output_rows, span.logits = range(len(span)), logits
            positions += range(partial.start, partial.stop)
        if stop is not None:
            for span in spans[:-1]:
                span.output_rows = ()
            spans[-1].output_rows, positions = spans[-1].output_rows[-1:], positions[-1:]
        if len(tokens):
            rows = range(len(tokens))
            spans.append(ChainSpan(kv_cache, tokens, 0, depth, rows, capture_layers, logits))
        row_tokens = [*(kv_cache.tokens[position] for position in positions), *tokens]
        row_positions = np.array(
            [*positions, *range(kv_cache.length, kv_cache.length + len(tokens))]
        )
        return ScoreRequest(
            self, runner, [spans], row_positions, self._chain_parents(row_positions), row_tokens
        )

    def multi_step(
        self, count: int, drafts: BurstDrafts | None = None, min_count: int | None = None
    ) -> MultiStep:
        """Returns an action that samples and scores up to `count` tokens in one go.

        Args:
            count: Maximum number of tokens.
            drafts: Drafts that the backend may find meanwhile, in a single request.
            min_count: Number of tokens after which to return, if a multi-step pass of the backend
                brings fewer than `count`; 1: it has a single pass. None: `count`, or 1 with drafts.
        """
        return MultiStep(
            self,
            count,
            lambda tokens, extra: self.score(tokens, extra_tokens=extra, drafts=drafts),
            min_count=min_count if drafts is None else 1,
        )

    @property
    def drafts_in_bursts(self) -> bool:
        """Whether the target's backend drafts in multi-step passes (see `multi_step`)."""
        executor = getattr(self.model(), "executor", None)
        return getattr(executor, "drafts_in_bursts", False)

    def accept(self, path: Seq[int], tokens: Seq[int], scores: Scores, runner: str = TARGET) -> int:
        """Keep the nodes of `path` of a verified tree, drop the others, and emit `tokens`.

        Args:
            path: Accepted nodes, from the first level down.
            tokens: The tokens of these nodes, then the bonus token.
            scores: The result of `verify`.
            runner: The model that verified the tree.

        Returns:
            How many tokens were taken before a stop rule applied.
        """
        kv_cache = self.kv_cache(runner)
        if kv_cache.pending is not None:
            self.retain(path, runner)
        elif kv_cache.length > self.length + len(path):  # a chain
            self.truncate(self.length + len(path), runner)
        sampler = (
            scores.sampler_after(scores.after(path[-1] if len(path) else ROOT))
            if self.sampler.is_stateful
            else None
        )
        return self.emit(tokens, sampler)

    def retain(self, path: Seq[int], runner: str = TARGET) -> None:
        """Keep the nodes of `path` of the pending tree, in the order in which they were scored, and
        drop the others."""
        kv_caches = self._open_kv_caches(runner)
        if runner == TARGET:
            for states in self.draft_states.values():
                states.accept(path, kv_caches[0].length)
        for kv_cache in kv_caches:
            kv_cache.retain(path)

    def record(self, tree: TokenTree, path: Seq[int], tokens: Seq[int], **fields: Any) -> None:
        """Append one decoding round to the trace, if tracing is on. Nodes without a token are left
        out."""
        if self.trace is not None:
            tree = tree.first(len(tree) - len(tree.embeddings))
            self.trace.append(
                {
                    "position": self.length,
                    "drafted": list(tree.tokens),
                    "parents": list(tree.parents),
                    "sources": tree.sources,
                    "accepted": list(path),
                    "tokens": list(tokens),
                    **fields,
                }
            )

    def _capture_layers(
        self, hidden: tuple[int, ...], runner: str, stop: int | None = None
    ) -> tuple[int, ...]:
        """`hidden`, plus the layers that the sampler reads of rows that run through all layers."""
        sampler, depth, states = self.sampler, self.num_layers, self.draft_states.get(runner)
        if states is not None and states.has_own:
            return tuple(sorted({*hidden, self.model(runner).spec.num_layers}))
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
        chain_tokens: Seq[int],
        positions: np.ndarray,
        row_tokens: list[int],
        companions: bool = True,
    ) -> ScoreRequest:
        """A request for `span`, preceded by the completion of early-exit positions and accompanied
        by companion prompts. `chain_tokens` is the part of its tokens that companions repeat."""
        self._tap(runner, span)
        spans: list[Span] = []
        if span.kv_cache.partials and not span.is_partial:
            spans += self._completion_spans(span.kv_cache, ())
        groups = [[*spans, span]]
        if companions and runner == TARGET and self.companion_prompts:
            groups += [[companion] for companion in self._companion_spans(span, chain_tokens)]
        parents = self._chain_parents(positions)
        return ScoreRequest(self, runner, groups, positions, parents, row_tokens)

    def _with_states(self, runner: str, tokens: Seq[int]) -> tuple[Seq[int], np.ndarray]:
        """The tokens that the drafter of `runner` scores, and the states it reads beside them."""
        states, kv_cache = self.draft_states[runner], self.kv_cache(runner)
        states.truncate(self.kv_cache().length)
        tokens = states.skip(kv_cache, tokens)
        return tokens, states.for_chain(kv_cache.length, len(tokens))

    def _cache_of(self, drafter: BurstDrafter) -> SequenceCache:
        states = self.draft_states.items()
        return self.kv_cache(next(name for name, one in states if one.chains is drafter.chains))

    def _prompt_embeds(self, count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The embeddings among the last `count` positions, float32 `[count, hidden_size]`, and
        which of these positions have one; None without any."""
        given, begin = self.state.get(PROMPT_EMBEDS) or (), self.length - count
        given = tuple(one for one in given if one.stop > begin)
        if not given:
            return None, None
        rows = np.zeros((count, given[0].rows.shape[1]), np.float32)
        embedded = np.zeros(count, bool)
        for one in given:
            first = max(begin, one.first)
            rows[first - begin : one.stop - begin] = one.read()[first - one.first :]
            embedded[first - begin : one.stop - begin] = True
        return rows, embedded

    def _context(self, runner: str) -> int | None:
        """See `DraftStates.context`."""
        states = self.draft_states.get(runner)
        return None if states is None else states.context

    def _tap(self, runner: str, span: Span) -> None:
        """Let a span of the target return the states that the drafters read."""
        if runner != TARGET or span.start or span.is_partial:
            return
        reading = [states for states in self.draft_states.values() if not states.is_paused]
        if reading:
            layers = {layer for states in reading for layer in states.layers}
            span.state_layers, span.num_states = tuple(sorted(layers)), self._num_states(span)

    def _num_states(self, span: Span) -> int:
        """Of how many last rows of a span the drafters get the states. Where the text depends on
        the drafts, they get those of the whole answer again after a restart."""
        if not self.repeats_drafts:
            return MAX_STATES
        return span.kv_cache.length + len(span) - max(0, len(self.prompt) - MAX_STATES)

    def _companion_spans(self, span: Span, chain_tokens: Seq[int]) -> list[Span]:
        if not isinstance(span, ChainSpan) or span.inputs is not None:
            raise UnsupportedCombinationError(
                "guidance with a second prompt works on token chains and trees only"
            )
        spans: list[Span] = []
        extra = list(chain_tokens[len(self.unscored()) :])
        kv_caches = self._open_kv_caches(TARGET)
        for kv_cache, prompt in zip(kv_caches[1:], self.companion_prompts, strict=True):
            tokens = (prompt + self.tokens)[kv_cache.length :] + extra
            output_rows = range(len(tokens) - len(span.output_rows), len(tokens))
            if output_rows[0] < 0:
                raise UnsupportedCombinationError(
                    "guidance needs a second prompt with at least as many tokens as the requested"
                    " output rows"
                )
            spans.append(
                ChainSpan(
                    kv_cache, tokens, span.start, span.stop, list(output_rows), span.capture_layers
                )
            )
        return spans

    def _completion_spans(
        self, kv_cache: SequenceCache, capture_layers: tuple[int, ...], stop: int | None = None
    ) -> list[CompletionSpan]:
        last = kv_cache.pool.model.spec.num_layers if stop is None else stop
        return [
            CompletionSpan(
                kv_cache,
                [-1] * len(partial.hidden),
                partial.depth,
                last,
                capture_layers=capture_layers,
                inputs=partial.hidden,
                partial=partial,
            )
            for partial in _before_layer(kv_cache, last)
        ]

    @staticmethod
    def _chain_parents(positions: Any) -> list[int]:
        return [row - 1 for row in range(len(positions))]


def _before_layer(kv_cache: SequenceCache, layer: int) -> list[EarlyExitRows]:
    """The early-exit positions that have not reached `layer`."""
    return [partial for partial in kv_cache.partials if partial.depth < layer]
