"""The loop of methods whose generated tokens run fewer layers, or fewer parts of them, for good.

The prompt runs through all layers. What later tokens read are the keys and values of shorter
passes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from itertools import groupby
from typing import Any

from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.variants import check_variant
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import SkippedParts, Variant
from anydecode.kernels.routes import Guide, Route
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class FewerLayers(Decoder):
    """A decoder that samples each token from a pass through fewer layers.

    The trace has the sublayers that the row of each token ran: `mixers` (attention or recurrence),
    `mlps`, and `heads`, rows of the whole head that were computed besides its own.
    """

    @abstractmethod
    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        """How the row of token `index` of the generated text runs through the layers; None: as they
        are."""

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.capture_layers:
            raise UnsupportedCombinationError(
                f"{self.card.key} does not work with guidance by a second prompt or with samplers"
                " that read inner layers (DoLa)"
            )
        all_layers = frozenset(range(sequence.num_layers))
        check_variant(sequence.model(), SkippedParts(mlps=all_layers))

    def decode(self, sequence: Sequence) -> Decoding:
        num_prompt, kv_cache = len(sequence.prompt), sequence.kv_cache()
        if kv_cache.length > num_prompt:  # another request's, through all layers
            sequence.truncate(num_prompt)
        past: list[Guide] = []
        while not sequence.finished:
            first = kv_cache.length - num_prompt
            rows = enumerate(sequence.unscored(), first)
            variants = groupby(rows, lambda row: self._row_variant(sequence, row[0]))
            for variant, part in variants:
                for tokens in _passes(variant, [token for _, token in part]):
                    guides = yield from self.guides(sequence, variant, tokens, past)
                    kv_cache.reusable = kv_cache.reusable and variant is None
                    scores = yield sequence.score(tokens, variant=variant, guides=guides)
                    past += guides
            token = scores.sampled[-1]
            counts = guides[-1] if guides else _counts(sequence.num_layers, variant)
            sequence.record(
                TokenTree(),
                [],
                [token],
                mixers=counts.num_mixers,
                mlps=counts.num_mlps,
                heads=counts.num_heads,
            )
            sequence.emit([token])

    def guides(
        self, sequence: Sequence, variant: Variant | None, tokens: list[int], past: list[Guide]
    ) -> Generator[DecoderAction, Any, list[Guide]]:
        """Yields actions that come before the pass of `tokens`; returns a guide for each of them,
        or none if `variant` is no route. `past` are those of all generated tokens before them, with
        their results."""
        return [Guide() for _ in tokens] if isinstance(variant, Route) else []
        yield

    def _row_variant(self, sequence: Sequence, index: int) -> Variant | None:
        return None if index < 0 else self.variant(sequence, index)


def _counts(num_layers: int, variant: Variant | None) -> Guide:
    skipped = variant if isinstance(variant, SkippedParts) else SkippedParts()
    return Guide(
        num_mixers=num_layers - len(skipped.mixers), num_mlps=num_layers - len(skipped.mlps)
    )


def _passes(variant: Variant | None, tokens: list[int]) -> list[list[int]]:
    """The passes in which these rows run: one each if later rows must not see where they have
    stored nothing, or read their results."""
    if isinstance(variant, Route) and (variant.leaves_holes or variant.is_sequential):
        return [[token] for token in tokens]
    return [tokens]
