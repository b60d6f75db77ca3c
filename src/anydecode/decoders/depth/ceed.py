"""Jacobi iteration over blocks that ends early (Song et al., "CEED-VLA: Consistency
Vision-Language-Action Model with Early-Exit Decoding", arXiv:2506.13725)."""

from __future__ import annotations

from itertools import takewhile
from random import Random

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


@register(
    Card(
        "ceed",
        "depth",
        paper="Song et al. 2025, CEED-VLA (arXiv:2506.13725)",
        exactness="lossy",
        summary="Jacobi iteration over blocks, which takes a block after a few passes even if it"
        " still changes.",
        works_with=("batches",),
        missing=(
            "actions of a robot: blocks are text, and training has no labels of the truth in place"
            " of those that are far from it",
        ),
        measured=(
            "0.67 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1) without"
            " consistency training, with 9.9% of tokens as the full model (AMD EPYC, 2 cores;"
            " `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "`anydecode train depth --recipe ceed` trains an adapter on blocks of the model's own"
            " answers at temperature 0; the weight of the loss of their tokens is not published: 1",
            "the number of passes is not published: half the block",
            "every pass starts from the cache of the text; in the released code what earlier passes"
            " have stored stays, so that its fixed points need not be the text of plain decoding",
            "all blocks start as tokens of the prompt; in the released code also as generated ones",
            "the last token of a block is not fed, and does not count as a change",
            "what a block has stored for tokens that changed in its last pass is computed again"
            " with the next block",
            "works at any temperature: a token's noise is the same in every pass",
        ),
        bounds={"block": Range(1, 4096)},
        remote={"block": Range(1, 256), "passes": Range(1, 256)},
    )
)
class Ceed(Decoder):
    """Generates a block of tokens in at most so many passes.

    A block starts as random tokens of the prompt. Each pass runs all of it, from the same cache,
    and replaces each token by the one that the tokens before it predict. The block is taken when a
    pass changes nothing, which gives the tokens of plain decoding, or after the last pass. The
    first tokens of a block are always those of plain decoding behind the text, one more with each
    pass.

    Args:
        block: Tokens per block.
        passes: Passes per block at most; from `block` on, the text is that of plain decoding.
    """

    def __init__(self, block: int = 16, passes: int = 8) -> None:
        if block < 1 or passes < 1:
            raise InvalidRequestError(
                f"ceed needs block >= 1 and passes >= 1, not block={block}, passes={passes}"
            )
        self.block, self.passes = block, passes

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.is_stateful:
            raise UnsupportedCombinationError(
                "ceed may take tokens before those in front of them are final: it does not work"
                " with constraints, penalties or guidance by a second prompt"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            fed, tokens = self._first_tokens(sequence), list[int]()
            num_passes = 0
            while num_passes < self.passes and (not num_passes or tokens[:-1] != fed):
                fed = tokens[:-1] if num_passes else fed
                # Every pass runs the whole block, behind the text's last token.
                sequence.truncate(min(sequence.kv_cache().length, sequence.length - 1))
                tree = TokenTree.chain(fed)
                scores = yield sequence.verify(tree)
                tokens = [scores.sample(row) for row in range(len(fed) + 1)]
                num_passes += 1
                sequence.record(tree, [], [], passes=num_passes)
            sequence.truncate(sequence.length + num_unchanged(fed, tokens))
            sequence.record(TokenTree(), [], tokens, passes=num_passes)
            sequence.emit(tokens)

    def _first_tokens(self, sequence: Sequence) -> list[int]:
        """The tokens of a new block that are fed."""
        noise, size = sequence.noise, min(self.block, sequence.remaining)
        random = Random(f"{noise.seed}/{noise.stream}/{sequence.length}")
        return [random.choice(sequence.prompt) for _ in range(size - 1)]


def num_unchanged(fed: list[int], tokens: list[int]) -> int:
    """How many of the first tokens of a block are those that were fed in its last pass."""
    pairs = zip(fed, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
