"""PEARL: draft and target model always run in parallel (Liu et al., "PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", arXiv:2408.11850)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult, is_token_exact
from anydecode.decoders.framework.draft_time import beside_target
from anydecode.decoders.framework.rejection import (
    CHAIN_NOISE,
    LOGIT_RULES,
    RejectionSampling,
    logit_rule,
)
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import carried, draft_share, verify_tree
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.errors import InvalidRequestError
from anydecode.scoring.draft_policy import DraftShare
from anydecode.scoring.score import Decoding, Scores, Submit, Wait
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import ROOT, TokenTree

#: Drafts per round before the draft model's passes were measured, and their maximum number.
DEFAULT_SIZE, MAX_SIZE = 4, 64
#: Weight of a round in the average of the time per draft.
DRAFT_RATE = 0.1


@dataclass(eq=False)
class _Ahead:
    """The drafts that were made beside the last pass, and the distributions that they were drawn
    from, if the rule compares with them."""

    drafts: list[int]
    rows: list[np.ndarray] | None


_STATE: StateKey[_Ahead] = StateKey("pearl", "state")


@register(
    Card(
        "pearl",
        "speculative",
        paper="PEARL (arXiv:2408.11850)",
        exactness="token-exact",
        summary="Draft model and target always run in parallel: pre-verify and post-verify.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly with shared noise; the paper's rule is acceptance='rejection'",
            CHAIN_NOISE,
            "the models run in parallel on threads or devices of one process",
            "the draft length follows the pass times that are measured while texts are generated"
            " (the paper: one length, set beforehand); with another rule than token-exact it is 4"
            " by default, so that no text depends on measured times",
        ),
        remote={"size": Range(1, 64), "acceptance": LOGIT_RULES},
    )
)
class Pearl(Decoder):
    """PEARL: while the target verifies drafts, the draft model drafts the tokens after them
    (post-verify). If all drafts are accepted, the next round's drafts are ready.

    Args:
        size: Number of drafts per round; None: the ratio of the target's pass time to the draft
            model's, as measured.
        pre_verify: The target does not wait for drafts: if there are none, it scores the text while
            the first ones are made. False leaves post-verify alone.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self,
        size: int | None = None,
        pre_verify: bool = True,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        if size is not None and size < 1:
            raise InvalidRequestError("drafting in parallel needs a size of at least one draft")
        self.pre_verify = pre_verify
        self.acceptance = logit_rule(acceptance, "pearl")
        if size is None and not is_token_exact(self.acceptance):
            size = DEFAULT_SIZE
        self.size = size
        self.clock: Callable[[], float] = perf_counter
        self._seconds_per_draft: float | None = None

    def num_drafts(self, sequence: Sequence) -> int:
        """The number of drafts of the next round: as many as the draft model makes in a pass of the
        target, if this was measured."""
        if self.size is not None:
            return self.size
        if self._seconds_per_draft is None:
            return DEFAULT_SIZE
        pass_seconds = sequence.cost_model.seconds(1 + DEFAULT_SIZE, sequence.length)
        ratio = pass_seconds / max(self._seconds_per_draft, 1e-9)
        # A round needs positions for its drafts and for those of the next one.
        pools = (sequence.pool(runner) for runner in (TARGET, DRAFT))
        room = min(pool.num_slots for pool in pools) - sequence.length
        return max(1, min(round(ratio), MAX_SIZE, room // 2 - 1))

    def _record_drafts(self, count: int, seconds: float) -> None:
        if count:
            measured, known = seconds / count, self._seconds_per_draft
            self._seconds_per_draft = (
                measured if known is None else known + DRAFT_RATE * (measured - known)
            )

    def decode(self, sequence: Sequence) -> Decoding:
        with closing(draft_share(sequence, self, self.acceptance)) as share:
            yield from self._rounds(sequence, share)

    def _rounds(self, sequence: Sequence, share: DraftShare) -> Decoding:
        ahead = carried(
            sequence,
            _STATE,
            self.acceptance,
            lambda: _Ahead([], distribution_list(self.acceptance)),
        )
        while not sequence.finished:
            drafts, rows = ahead.drafts, ahead.rows
            seconds = 0.0
            size = share.size(self.num_drafts(sequence)) if sequence.can_draft() else 0
            if not drafts and not size:  # no memory, or not worth the draft model's passes
                plain = yield from verify_tree(sequence, TokenTree(), self.acceptance)
                share.observe(plain.tree, [], 0.0)
                continue
            if not drafts:
                sequence.align(DRAFT)
                rows = distribution_list(self.acceptance)
                if not self.pre_verify:
                    start = self.clock()
                    drafts = yield from draft_chain(sequence, [], size, distributions=rows)
                    seconds = self.clock() - start
            tree = sampled_chain(drafts, rows)
            ticket = yield Submit(sequence.verify(tree))
            count = size if self.pre_verify else size + 1
            next_rows, start = distribution_list(self.acceptance), self.clock()
            next_drafts, spent = yield from beside_target(
                draft_chain(sequence, drafts, count, distributions=next_rows),
                sequence,
                ticket,
                self.clock,
            )
            self._record_drafts(len(next_drafts), self.clock() - start)
            if ticket.scores is None:
                yield Wait([ticket])
            following = sampled_chain(next_drafts[:1], next_rows)
            result = self._accept(tree, following, ticket.scores)
            sequence.record(tree, result.path, result.tokens)
            sequence.accept(result.path, result.tokens, ticket.scores)
            all_accepted = len(result.path) == len(drafts) and result.tokens[-1:] == next_drafts[:1]
            # The token after the drafts tests the first one that was drafted beside the target.
            tested = TokenTree.chain(tree.tokens + next_drafts[:1])
            path = range(len(result.path) + all_accepted)
            seconds = (seconds + spent) / (sequence.cost_model.num_others() + 1)
            share.observe(tested, path, seconds)
            ahead.drafts = next_drafts[1:] if all_accepted else []
            ahead.rows = next_rows[1:] if next_rows is not None else None
        sequence.state.discard(_STATE)

    def _accept(self, tree: TokenTree, ahead: TokenTree, scores: Scores) -> AcceptanceResult:
        """The accepted drafts of `tree`, and one more token. The rejection rule tests the draft of
        `ahead` in its place, which follows `tree`."""
        rule = self.acceptance
        if not isinstance(rule, RejectionSampling) or not len(ahead):
            return rule.walk(tree, scores)
        rows = {**tree.probabilities, len(tree) - 1: ahead.probabilities[ROOT]}
        chain = TokenTree.chain(tree.tokens + ahead.tokens, probabilities=rows, kind="wor")
        path, tokens = list[int](), list[int]()
        for node in range(len(chain)):
            child, token = rule.step(chain, scores, node - 1, [node])
            tokens.append(token)
            if child is None or node == len(tree):
                break
            path.append(node)
        return AcceptanceResult(path, tokens)
