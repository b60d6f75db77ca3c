"""PEARL: draft and target model always run in parallel (Liu et al., "PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", arXiv:2408.11850)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding, Submit, Wait
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


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
        remote={"size": Range(0, 64)},
    )
)
class Pearl(Decoder):
    """PEARL: while the target verifies drafts, the draft model drafts the tokens after them
    (post-verify). If all drafts are accepted, the next round's drafts are ready.

    Args:
        size: Number of drafts per round; best near the ratio of the target's pass time to the draft
            model's.
        pre_verify: The target does not wait for drafts: if there are none, it scores the text while
            the first ones are made. False leaves post-verify alone.
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(self, size: int = 4, pre_verify: bool = True) -> None:
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
