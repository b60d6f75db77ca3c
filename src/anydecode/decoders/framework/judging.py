"""Acceptance by a trained judge, beside a standard rule (Bachmann et al., "Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment", arXiv:2501.19309)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from anydecode.decoders.framework.acceptance import (
    StepAcceptance,
    TokenExact,
    untruncated_distribution,
)
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.exit_files import network_of
from anydecode.models.judge import Judge
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.sequence_data import SequenceData
from anydecode.scoring.tree import TokenTree


class JudgeAcceptance(StepAcceptance):
    """Accept a draft if `standard` does, or if the judge's probability that it is right, from the
    target's last hidden state at the draft, and from the draft model's if the judge reads that too,
    is above `threshold`. Of several siblings that only the
    judge accepts, the one of the highest probability is taken. Tokens that the request forbids are
    not accepted.

    Args:
        threshold: See above, from 0 to 1; None: that of the judge.
        judge: The judge; None: that of the model's folder.
        standard: The standard rule; None: `TokenExact`.
    """

    exactness = "lossy"
    reads_states = True

    def __init__(
        self,
        threshold: float | None = None,
        judge: Judge | None = None,
        standard: StepAcceptance | None = None,
    ) -> None:
        if threshold is not None and not 0 <= threshold <= 1:
            raise InvalidRequestError(f"threshold is {threshold}; it must be from 0 to 1")
        self.threshold = threshold
        self._judge = judge
        self.standard = standard or TokenExact()
        self.reads_probabilities = self.standard.reads_probabilities

    def prepare(self, sequence: Sequence) -> None:
        judge, model = self.judge(sequence), sequence.model()
        judge.check(network_of(model, "states for a judge, which needs a transformer"))
        if sequence.adapter >= 0:
            raise UnsupportedCombinationError(
                "the judge has learned from the model without adapters; leave adapter out"
            )
        if judge.draft_weights is not None:
            if DRAFT not in sequence.optional_runners:
                raise UnsupportedCombinationError(
                    "this judge reads a draft model's states too: LLM(..., draft=...)"
                )
            draft = sequence.model(DRAFT)
            judge.check_draft(network_of(draft, "states for a judge, which needs a transformer"))

    def reads_draft_states(self, sequence: Sequence) -> bool:
        return self.judge(sequence).draft_weights is not None

    def judge(self, sequence: SequenceData) -> Judge:
        """The judge. Raises `UnsupportedCombinationError` if there is none."""
        model = sequence.model()
        found: Judge | None = self._judge or getattr(model, "judge", None)
        if found is None:
            raise UnsupportedCombinationError(
                "acceptance by a judge needs a trained one: `anydecode train judge` makes it, and"
                " judge:head=FILE reads it"
            )
        return found

    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        accepted, token = self.standard.step(tree, scores, node, children)
        if accepted is not None or not children:
            return accepted, token
        sequence, row = scores.sequence, scores.after(node)
        judge, allowed = self.judge(sequence), untruncated_distribution(scores, row)
        bound = judge.threshold if self.threshold is None else self.threshold
        for child in children:
            if allowed.score(tree.tokens[child]) > -np.inf:
                draft_state = None if tree.draft_states is None else tree.draft_states[child]
                probability = judge(scores.last_state(scores.after(child)), draft_state)
                if probability > bound:
                    accepted, token, bound = child, tree.tokens[child], probability
        if accepted is not None:
            position, sampler = int(scores.positions[row]) + 1, scores.sampler_after(row)
            sequence.record_logprobs(scores.row(row), position, token, sampler)
        return accepted, token
