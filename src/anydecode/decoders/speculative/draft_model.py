"""Drafts from a smaller model (Leviathan et al., arXiv:2211.17192; Chen et al., 2302.01318)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import Acceptance, TokenExact
from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.rejection import RejectionSampling, rule
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import DecoderAction, Decoding, Submit, Wait
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

DRAFT = "draft"


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, with_probabilities: bool = False) -> None:
        self.sequence = sequence
        self.with_probabilities = with_probabilities

    def propose(self, size: int) -> Proposal:
        self.sequence.align(DRAFT)
        drawn: list[np.ndarray] | None = [] if self.with_probabilities else None
        drafts = yield from draft_chain(self.sequence, [], size, drawn=drawn)
        if drawn is None:
            return TokenTree.chain(drafts)
        rows = {node - 1: row for node, row in enumerate(drawn)}
        return TokenTree.chain(drafts, probabilities=rows, kind="wor")


def draft_chain(
    sequence: Sequence,
    behind: list[int],
    size: int,
    runner: str = DRAFT,
    drawn: list[np.ndarray] | None = None,
    ends: Callable[[Sampler, np.ndarray, int], bool] | None = None,
) -> Generator[DecoderAction, Any, list[int]]:
    """`size` tokens behind the sequence's own and `behind`, one pass of `runner` each, picked by
    the
    sequence's policy with the target's noise. The lane's context must hold a true prefix of them.
    The distribution each was drawn from, float64 `[vocab_size]`, is appended to `drawn`.
    `ends(policy, logits, token)` is asked whether a token is the last one.
    """
    sampler = sequence.sampler.fork()
    for token in behind:
        sampler.advance(token)
    known = sequence.all_tokens + behind
    drafts: list[int] = []
    for _ in range(size):
        context = sequence.context(runner)
        scores = yield sequence.score((known + drafts)[context.length :], runner=runner)
        row = fitted(sequence, scores.row(-1))
        token = sequence.sample(sampler, row, len(known) + len(drafts))
        if drawn is not None:
            drawn.append(sampler.distribution(row).dense(len(row)))
        last = ends is not None and ends(sampler, row, token)
        sampler.advance(token)
        drafts.append(token)
        if last:
            break
    return drafts


def fitted(sequence: Sequence, row: np.ndarray) -> np.ndarray:
    """A draft model's row, float32, cut or filled up (with -inf) to the target's vocabulary: models
    of one tokenizer may pad their vocabularies to different sizes."""
    size = sequence.context().pool.model.spec.vocab_size
    if len(row) >= size:
        return row[:size]
    filled = np.full(size, -np.inf, np.float32)
    filled[: len(row)] = row
    return filled


class ModelDrafter(Drafter):
    """A chain from the model in the lane "draft". `with_probabilities` keeps what each token was
    drawn from, for rules that ask."""

    runners = (DRAFT,)

    def __init__(self, with_probabilities: bool = False) -> None:
        self.with_probabilities = with_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.with_probabilities)


@register(
    Card(
        "speculative-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)",
        exactness="token-exact",
        summary="A smaller model drafts a chain of tokens.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly with shared noise; the paper's rejection rule is"
            " acceptance='rejection'",
        ),
    )
)
def speculative_sampling(
    size: int = 4, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Drafts of `size` tokens from the draft model. `acceptance` is "token-exact", "rejection",
    "typical" or "top-m", or a rule."""
    chosen = rule(acceptance)
    return Speculative(ModelDrafter(isinstance(chosen, RejectionSampling)), size, chosen)


@register(
    Card(
        "parallel-draft",
        "speculative",
        paper="PEARL (arXiv:2408.11850), its post-verify phase alone",
        exactness="token-exact",
        summary="The draft model drafts on while the target verifies.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly with shared noise",
            "after a reject the target waits for new drafts; `pearl` is without that wait",
            "side by side means threads or devices of one process",
        ),
    )
)
class ParallelDraft(Decoder):
    """While the target verifies `size` drafts, the draft model steps on behind them; if all were
    right, the next round's drafts are already there. With `pre_verify` the target does not wait
    for drafts: where there are none, it scores what is there while the first ones are made."""

    runners = (DRAFT,)

    def __init__(self, size: int = 4, pre_verify: bool = False) -> None:
        if size < 1:
            raise InvalidRequestError("drafting in parallel needs a size of at least one draft")
        self.size = size
        self.pre_verify = pre_verify
        self.acceptance = TokenExact()

    def decode(self, sequence: Sequence) -> Decoding:
        drafts: list[int] = []
        while not sequence.finished:
            if not drafts:
                sequence.align(DRAFT)
                if not self.pre_verify:
                    drafts = yield from draft_chain(sequence, [], self.size)
            tree = TokenTree.chain(drafts)
            ticket = yield Submit(sequence.verify(tree))
            count = self.size if self.pre_verify else self.size + 1
            ahead = yield from draft_chain(sequence, drafts, count)
            if ticket.scores is None:
                yield Wait([ticket])
            verdict = self.acceptance.walk(tree, ticket.scores)
            sequence.record(tree, verdict.path, verdict.tokens)
            sequence.accept(verdict.path, verdict.tokens, ticket.scores)
            whole = len(verdict.path) == len(drafts) and verdict.tokens[-1] == ahead[0]
            drafts = ahead[1:] if whole else []


@register(
    Card(
        "pearl",
        "speculative",
        paper="PEARL (arXiv:2408.11850)",
        exactness="token-exact",
        summary="Draft and target always run side by side: pre-verify and post-verify.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly with shared noise, not by the rejection rule",
            "side by side means threads or devices of one process",
            "the draft length is given, not taken from the ratio of the two passes",
        ),
    )
)
def pearl(size: int = 4) -> ParallelDraft:
    """PEARL; `size` is best near the ratio of the target's pass to the draft's."""
    return ParallelDraft(size, pre_verify=True)
