"""Speculative sampling with a draft model (Leviathan et al., arXiv:2211.17192; Chen et al.,
arXiv:2302.01318), and PEARL (arXiv:2408.11850).

A smaller model drafts a chain of tokens, one pass per token. The target verifies the whole chain in
one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import Acceptance, TokenExact
from anydecode.decoders.framework.rejection import RejectionSampling, acceptance_rule
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
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
        distributions: list[np.ndarray] | None = [] if self.with_probabilities else None
        drafts = yield from draft_chain(self.sequence, [], size, distributions=distributions)
        if distributions is None:
            return TokenTree.chain(drafts)
        rows = {node - 1: row for node, row in enumerate(distributions)}
        return TokenTree.chain(drafts, probabilities=rows, kind="wor")


def draft_chain(
    sequence: Sequence,
    prefix: list[int],
    size: int,
    runner: str = DRAFT,
    distributions: list[np.ndarray] | None = None,
    should_stop: Callable[[Sampler, np.ndarray, int], bool] | None = None,
) -> Generator[DecoderAction, Any, list[int]]:
    """Draft a chain of up to `size` tokens with `runner`, one pass per token.

    Tokens are sampled by the sequence's sampler with the target's noise. The runner's cache must
    hold a prefix of the sequence's tokens and `prefix`.

    Args:
        sequence: The sequence to draft for.
        prefix: Tokens that follow the sequence's own, before the drafts.
        size: Maximum number of drafts.
        runner: Name of the model runner that drafts.
        distributions: If given, the distribution of each draft is appended, float64 `[vocab_size]`.
        should_stop: Called with (sampler, logits, token) of each draft; True ends the chain after
            it.
    """
    sampler = sequence.sampler.fork()
    for token in prefix:
        sampler.advance(token)
    tokens = sequence.all_tokens + prefix
    drafts: list[int] = []
    for _ in range(size):
        context = sequence.context(runner)
        scores = yield sequence.score((tokens + drafts)[context.length :], runner=runner)
        row = fit_vocab(sequence, scores.row(-1))
        token = sequence.sample(sampler, row, len(tokens) + len(drafts))
        if distributions is not None:
            distributions.append(sampler.distribution(row).dense(len(row)))
        is_last = should_stop is not None and should_stop(sampler, row, token)
        sampler.advance(token)
        drafts.append(token)
        if is_last:
            break
    return drafts


def fit_vocab(sequence: Sequence, row: np.ndarray) -> np.ndarray:
    """Truncate a draft model's row, float32, to the target's vocabulary size, or pad it with -inf.
    Models with the same tokenizer may pad their vocabularies to different sizes."""
    size = sequence.context().pool.model.spec.vocab_size
    if len(row) >= size:
        return row[:size]
    padded = np.full(size, -np.inf, np.float32)
    padded[: len(row)] = row
    return padded


class ModelDrafter(Drafter):
    """Drafts a chain with the runner "draft". `with_probabilities` keeps the distribution of each
    draft, for acceptance rules that need it."""

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
        summary="A smaller model drafts a chain of tokens; the target verifies them in one pass.",
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
    """Speculative sampling with a draft model.

    Args:
        size: Number of drafts per round.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(ModelDrafter(isinstance(rule, RejectionSampling)), size, rule)


@register(
    Card(
        "parallel-draft",
        "speculative",
        paper="PEARL (arXiv:2408.11850), its post-verify phase alone",
        exactness="token-exact",
        summary="The draft model continues to draft while the target verifies.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly with shared noise",
            "after a rejection the target waits for new drafts; `pearl` does not wait",
            "the models run in parallel on threads or devices of one process",
        ),
    )
)
class ParallelDraft(Decoder):
    """Draft and verify in parallel: while the target verifies `size` drafts, the draft model drafts
    the tokens after them. If all drafts are accepted, the next round's drafts are ready. With
    `pre_verify`, the target does not wait for drafts: if there are none, it scores the text while
    the first ones are made."""

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
            next_drafts = yield from draft_chain(sequence, drafts, count)
            if ticket.scores is None:
                yield Wait([ticket])
            result = self.acceptance.walk(tree, ticket.scores)
            sequence.record(tree, result.path, result.tokens)
            sequence.accept(result.path, result.tokens, ticket.scores)
            all_accepted = len(result.path) == len(drafts) and result.tokens[-1] == next_drafts[0]
            drafts = next_drafts[1:] if all_accepted else []


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
            "verified token-exactly with shared noise, not by the rejection rule",
            "the models run in parallel on threads or devices of one process",
            "the draft length is a parameter, not derived from the ratio of the two pass times",
        ),
    )
)
def pearl(size: int = 4) -> ParallelDraft:
    """PEARL: parallel drafting with pre-verify and post-verify.

    Args:
        size: Number of drafts per round; best near the ratio of the target's pass time to the draft
            model's.
    """
    return ParallelDraft(size, pre_verify=True)
