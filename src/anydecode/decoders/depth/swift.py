"""SWIFT: drafts of the model itself without some of its sublayers, which are searched for on the
fly (Xia et al., "SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration",
arXiv:2410.06916)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.layer_search import LayerSearch, SkippedSet
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_candidates
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    TREE_NOISE,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    Proposal,
    Speculative,
)
from anydecode.decoders.framework.variants import check_variant
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import SkippedParts
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Nodes per level of the tree, where the probability of its first one is above .95, .8, .5, or not.
GREEDY_WIDTHS, SAMPLING_WIDTHS = (3, 5, 8, 10), (1, 3, 5, 10)


class LayerSkippingDrafter(Drafter):
    """Drafts with the target without some of its sublayers; see `Swift` for the parameters."""

    def __init__(
        self, threshold: float, window: int, ratio: float, tree: bool, rule: Acceptance
    ) -> None:
        self.threshold, self.window, self.ratio, self.has_tree = threshold, window, ratio, tree
        self.has_distributions = rule.reads_probabilities
        self._searches: dict[int, LayerSearch] = {}

    def search(self, num_layers: int) -> LayerSearch:
        """The search over models of so many layers."""
        if num_layers not in self._searches:
            self._searches[num_layers] = LayerSearch(num_layers, self.ratio)
        return self._searches[num_layers]

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise InvalidRequestError("swift does not work with guidance by a second prompt")
        num_layers = sequence.num_layers
        if num_layers < 3 or not self.search(num_layers).budget:
            raise InvalidRequestError(
                f"swift with ratio={self.ratio} leaves out no sublayer of a model of {num_layers}"
                " layers, whose first and last layer are kept; choose a larger ratio or model"
            )
        check_variant(sequence.model(), SkippedParts(mlps=frozenset(range(1, num_layers - 1))))

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        self._searches.clear()

    @property
    def num_bytes(self) -> int:
        return sum(search.num_bytes for search in self._searches.values())


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: LayerSkippingDrafter) -> None:
        self.sequence, self.drafter = sequence, drafter
        self.search = drafter.search(sequence.num_layers)
        self.scores: dict[SkippedSet, float] = {}  # of this text
        self.widths = GREEDY_WIDTHS if sequence.sampler.is_greedy else SAMPLING_WIDTHS

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        unscored = sequence.unscored()
        if len(unscored) > 1 and not sequence.tokens:  # the prompt
            return TokenTree()
        if len(unscored) > 1:  # after a restart
            yield sequence.score(unscored[:-1], samples=False)
        if len(sequence.tokens) > self.drafter.window + 1 and not self.search.is_over:
            yield from self._search_step()
        return (yield from self._draft(min(size, sequence.remaining - 1)))

    def _search_step(self) -> Generator[DecoderAction, Any, None]:
        """Score one set on this text: the best one, if it was found on another, or a new one."""
        search, scores = self.search, self.scores
        best = search.best if search.is_searched else None
        if best is not None and best not in scores:
            scores[best] = yield from self._matchness(best)
            return
        proposal = search.propose(scores)
        if proposal is None:
            return
        scores[proposal] = yield from self._matchness(proposal)
        # Another text may meanwhile have found a set that this one has not scored: that one stays.
        best_score = scores.get(search.best, np.inf) if search.is_searched else 0.0
        search.record(proposal, scores[proposal], best_score)

    def _matchness(self, skipped: SkippedSet) -> Generator[DecoderAction, Any, float]:
        """The share of the first tokens of the text that are most probable without `skipped`."""
        sequence = self.sequence
        tokens = sequence.tokens[: self.drafter.window + 1]
        with _branch(sequence) as branch:
            branch.truncate(len(sequence.prompt))
            variant = self.search.parts(skipped)
            scores = yield branch.score(tokens[:-1], rows="all", variant=variant)
            return float((scores.logits.argmax(-1) == tokens[1:]).mean())

    def _draft(self, size: int) -> Proposal:
        """Draft a chain, with further tokens at each of its levels."""
        sequence, tree, parent = self.sequence, TokenTree(kind="wor"), ROOT
        vocab_size = sequence.model().spec.vocab_size
        sampler, variant = sequence.sampler.fork(), self.search.parts(self.search.best)
        (token,) = sequence.unscored()
        with _branch(sequence) as branch:
            for depth in range(size):
                scores = yield branch.score([token], variant=variant)
                row = scores.row(-1)
                candidates = draft_candidates(sequence, sampler, row, sequence.length + depth)
                if not len(candidates.tokens):
                    break
                if self.drafter.has_distributions:
                    tree.probabilities[parent] = candidates.dense(vocab_size)
                token = int(candidates.tokens[0])
                weights = np.exp(row - row.max())
                confidence = float(weights[token] / weights.sum())
                spine = tree.add(token, parent)
                for sibling in candidates.tokens[1 : self._width(confidence)].tolist():
                    tree.add(sibling, parent)
                if confidence < self.drafter.threshold or sequence.stops_at(token):
                    break
                sampler.advance(token)
                parent = spine
        return tree

    def _width(self, confidence: float) -> int:
        if not self.drafter.has_tree:
            return 1
        return self.widths[sum(confidence <= bound for bound in (0.95, 0.8, 0.5))]


@contextmanager
def _branch(sequence: Sequence) -> Iterator[Sequence]:
    """A branch whose keys and values are those of fewer sublayers; it is released afterwards."""
    branch = sequence.fork()
    branch.kv_cache().reusable = False
    try:
        yield branch
    finally:
        branch.release()


@register(
    Card(
        "swift",
        "depth",
        paper="Xia et al. 2024, SWIFT (arXiv:2410.06916)",
        exactness="token-exact",
        summary="Drafts without some of the model's sublayers; which ones is searched for while"
        " generating.",
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "0.20 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), the search"
            " included (AMD EPYC, 2 cores; `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " the rejection rule is acceptance='rejection', for siblings drawn without replacement",
            TREE_NOISE,
            "no set is scored twice on one text, and the best set is scored anew on each text"
            " before others are compared with it; the released code compares scores of different"
            " texts",
            "the length scale of the Gaussian process is chosen from a grid, and its sets are"
            " chosen from all sets, or from 1024 random ones; the released code optimises points"
            " between sets, and rounds",
            "at a temperature, drafts are among the 64 most probable tokens",
            "no draft exceeds the limit of tokens or goes on behind a token that ends the text",
            "the window has 32 tokens, as by default in the released code, whose script has 50 and"
            " a score of .93 that ends the search",
            LEARNS_ALONE,
        ),
        remote={
            "size": Range(1, 64),
            "threshold": Range(0, 1),
            "window": Range(1, 512),
            "ratio": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def swift(
    size: int = 25,
    threshold: float = 0.8,
    window: int = 32,
    ratio: float = 0.45,
    tree: bool = True,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Drafts without a part of the sublayers, which is searched for while generating.

    Once a text has more tokens than the window, each round scores one set of sublayers: the share
    of the window's tokens that are most probable without them, in one pass. The search goes on over
    all texts that the decoder generates.

    Args:
        size: Maximum depth of a draft.
        threshold: A draft ends behind a token whose probability is less.
        window: The number of a text's first tokens that sets are scored on.
        ratio: The share of sublayers that are left out, without the first and the last layer.
        tree: Whether to verify further tokens at each level of the draft.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if size < 1 or window < 1 or not 0 < ratio < 1 or not 0 <= threshold <= 1:
        raise InvalidRequestError(
            "swift needs size >= 1, window >= 1, 0 < ratio < 1 and 0 <= threshold <= 1, not"
            f" size={size}, window={window}, ratio={ratio}, threshold={threshold}"
        )
    rule = acceptance_rule(acceptance)
    return Speculative(LayerSkippingDrafter(threshold, window, ratio, tree, rule), size, rule)
