"""LongSpec: the draft model attends to a sliding window of constant size, and drafts a tree of
beams (Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting
and Verification", arXiv:2502.17421).

The draft model is the paper's draft layer, which also attends to the keys and values of the
target's last layer (`models/longspec.py`; `anydecode train drafter --recipe longspec` trains it),
or any other model, of whose cache the sinks and the window are kept.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import (
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.draft_trees import TreeDrafter, TreeSession
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT


class WindowDrafter(TreeDrafter):
    """Drafts with a draft model that keeps the first `sinks` and the last `window` positions. On
    each of `depth` levels, the tree has the `width` nodes with the largest weights: the products of
    the estimated acceptance probabilities along their paths."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True, attention_only=(DRAFT,))

    def __init__(
        self, window: int, sinks: int, width: int, depth: int, rule: Acceptance | None = None
    ) -> None:
        super().__init__(rule)
        if window < 1 or sinks < 0 or width < 1 or depth < 1:
            raise InvalidRequestError(
                "longspec needs window >= 1, sinks >= 0, width >= 1 and depth >= 1"
            )
        self.window = window
        self.sinks = sinks
        self.width = width
        self.depth = depth

    def open(self, sequence: Sequence) -> DraftSession:
        return _WindowSession(sequence, self)

    def evict(self, kv_cache: SequenceCache) -> None:
        """Evict the positions that have left the window. A draft model that reads states limits
        what its rows attend to itself."""
        if kv_cache.pool.model.spec.states is not None:
            return
        slots = kv_cache.table[self.sinks : max(self.sinks, kv_cache.length - self.window)]
        evicted = [self.sinks + position for position, slot in enumerate(slots) if slot >= 0]
        if evicted:
            kv_cache.evict(evicted)

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        weights, beams = {ROOT: 1.0}, [ROOT]
        for depth in range(self.depth):
            if depth:
                yield from growing.expand(beams)
            options = [
                (weights[parent] * float(chance), parent, int(token))
                for parent in beams
                for token, chance in zip(
                    growing.candidates[parent].tokens[: self.width],
                    growing.candidates[parent].acceptance_probabilities[: self.width],
                    strict=True,
                )
            ]
            options.sort(key=lambda option: -option[0])
            beams = []
            for weight, parent, token in options[: min(self.width, size - len(growing.tree))]:
                beams.append(growing.add(token, parent))
                weights[beams[-1]] = weight
            if not beams:
                break
        return list(range(len(growing.tree)))


class _WindowSession(TreeSession):
    def __init__(self, sequence: Sequence, drafter: WindowDrafter) -> None:
        super().__init__(sequence, drafter)
        self.window_drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence, drafter = self.sequence, self.window_drafter
        sequence.align(drafter.runner)
        is_long = sequence.model(drafter.runner).spec.states is None
        while is_long and len(unscored := sequence.unscored(drafter.runner)) > drafter.window:
            yield sequence.score(unscored[: drafter.window], runner=drafter.runner)
            drafter.evict(sequence.kv_cache(drafter.runner))
        return (yield from super().propose(size))

    def observe(self, round: SpeculationRound) -> None:
        super().observe(round)
        drafter = self.window_drafter
        drafter.evict(self.sequence.kv_cache(drafter.runner))


@register(
    Card(
        "longspec",
        "speculative",
        paper="LongSpec (arXiv:2502.17421)",
        exactness="token-exact",
        summary="A draft layer attends to a window and to the target's last keys and values.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the draft layer computes the keys and values of the target's last layer again from the"
            " states before it, and keeps a copy in a cache of its own; all its rows are kept too,"
            " though they attend to the window only",
            "of a draft model that is no such layer, positions outside the sinks and the window"
            " are evicted after each round, and leave gaps in the positions; other drafters that"
            " read the target's states, such as EAGLE's, keep all positions",
            "in training the target's states are those of the texts' own positions, and only its"
            " keys have the shifted ones; texts are the target's own, and the loss is that of the"
            " other recipes of drafters",
            "4 levels of 2 beams by default, which is faster on processors (the paper: 4 beams,"
            " then 4 levels of 16)",
            "verified token-exactly, and above temperature 0 a beam's weight is its estimated"
            " acceptance probability given the noise that the target will use; with"
            " acceptance='rejection' it is the draft probability, as in the paper, and the rule is"
            " that for chosen tokens (the released code samples with another distribution)",
            CHOSEN_NOISE,
            "tree and text are one attention of the engine, summed in fixed blocks; the paper's"
            " hybrid attention joins two kernels",
        ),
        remote={
            "width": Range(1, 16),
            "depth": Range(1, 16),
            "window": Range(1, 65536),
            "sinks": Range(0, 4096),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def longspec(
    width: int = 2,
    depth: int = 4,
    window: int = 512,
    sinks: int = 4,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """LongSpec: drafting with a sliding window.

    Args:
        width: Number of beams.
        depth: Number of tokens per beam.
        window: Number of last positions that the draft model keeps.
        sinks: Number of first positions that the draft model keeps.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(WindowDrafter(window, sinks, width, depth, rule), width * depth, rule)
