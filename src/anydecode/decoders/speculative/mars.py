"""MARS: mask tokens behind the text predict several tokens per pass, which are kept while they are
confident.

Jin et al., "MARS: Enabling Autoregressive Models Multi-Token Generation", arXiv:2604.07023. The
model was trained with blocks of masks, which see each other and the text before them causally. Its
ancestor is Lexical Unit Decoding (`lud.py`).

A pass has the last token and `block` - 1 masks. The row of the last token predicts the next token,
that of each mask the token after its position. The first token is always kept, the others from left
to right up to the first that is not confident. Nothing is verified, and the masks' keys and values
are dropped: the next pass computes those of the tokens.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.mask_groups import mask_token
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

METRICS = Words(("probability", "entropy", "margin"))


@register(
    Card(
        "mars",
        "speculative",
        paper="MARS (arXiv:2604.07023)",
        exactness="lossy",
        summary="Mask tokens predict several tokens per pass, kept from left to right while sure.",
        needs=("mask token",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the last mask of the paper's block is left out, since its row is not read",
            "no mask's row gives the mask token again",
            "the masks move with the text, as in the paper's sampler with a sliding window; its"
            " cache by blocks, which lets texts of a batch wait for each other, is not needed",
            "nothing is verified, so that no acceptance= applies: `space` drafts with the same"
            " masks and takes every rule",
            "a sampler's token at T > 0 has the noise of plain decoding at its position",
            "anydecode train masks trains an adapter with groups of masks behind random tokens of"
            " the model's own answers; the paper trains all weights on [masked | clean] texts",
        ),
        bounds={"block": Range(1, 256)},
        remote={"block": Range(1, 16), "threshold": Range(0, 100), "metric": METRICS},
    )
)
class Mars(Decoder):
    """MARS.

    Args:
        block: Maximum number of tokens per pass.
        threshold: The confidence below which a token, and those after it, are not kept; of the
            entropy, in nats, that above which they are not.
        metric: The confidence of a token: its "probability", the "margin" between the two largest
            probabilities, or the "entropy", all of the model's distribution at temperature 1.
    """

    def __init__(
        self, block: int = 4, threshold: float = 0.95, metric: str = "probability"
    ) -> None:
        if block < 1:
            raise InvalidRequestError(f"block is {block}; mars needs at least 1")
        if not METRICS.allows(metric):
            raise InvalidRequestError(f"metric is {metric!r}; allowed are {METRICS}")
        self.block = block
        self.threshold = threshold
        self.metric = metric

    def prepare(self, sequence: Sequence) -> None:
        mask_token(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        mask = mask_token(sequence)
        while not sequence.finished:
            num_masks = min(self.block, sequence.remaining) - 1
            tree = TokenTree.chain([mask] * num_masks)
            scores = yield sequence.verify(tree)
            tokens = self._tokens(sequence, scores, mask)
            sequence.record(tree, [], tokens)
            sequence.truncate(sequence.length)
            sequence.emit(tokens)

    def _tokens(self, sequence: Sequence, scores: Scores, mask: int) -> list[int]:
        """The first token, and those after it up to the first that is not confident. No mask
        predicts another one."""
        tokens: list[int] = []
        sampler = sequence.sampler.fork()
        for row in range(len(scores)):
            logits, position = scores.row(row), sequence.length + row
            if row:
                logits = logits.copy()
                logits[mask] = -np.inf
            scores.show_hidden(sampler, row)
            token = sequence.sample(sampler, logits, position)
            if tokens and not self.keeps(logits, token, tokens[-1]):
                break
            sequence.record_logprobs(logits, position, token, sampler)
            tokens.append(token)
            sampler.advance(token)
        return tokens

    def keeps(self, logits: np.ndarray, token: int, before: int) -> bool:
        """Whether a mask's token is kept.

        Args:
            logits: Those that it was sampled from, float32 `[vocab_size]`.
            token: The token.
            before: The token before it.
        """
        return self.is_confident(logits, token)

    def is_confident(self, logits: np.ndarray, token: int) -> bool:
        """Whether `token`, sampled from `logits`, float32 `[vocab_size]`, is kept."""
        p = np.exp(logits.astype(np.float64) - float(logits.max()))
        p /= p.sum()
        if self.metric == "entropy":
            positive = p[p > 0]
            return bool(-(positive * np.log(positive)).sum() <= self.threshold)
        if self.metric == "margin":
            second, first = np.partition(p, -2)[-2:]
            return bool(first - second >= self.threshold)
        return bool(p[token] >= self.threshold)
