"""Drafts from the first layers, verified by the rest of the same model (Elhoushi et al., LayerSkip,
arXiv:2404.16710): what the draft computed is completed, not computed again."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import TokenExact
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


@register(
    Card(
        "layer-draft",
        "depth",
        paper="LayerSkip (arXiv:2404.16710), the self-speculative decoding without its training",
        exactness="token-exact",
        summary="The first layers draft, the rest of the layers verify.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=("verification picks with the target's own noise instead of comparing argmax",),
    )
)
class LayerDraft(Decoder):
    """Draft `size` tokens with the first `layers` layers (default: a third), then run the rest."""

    def __init__(self, layers: int | None = None, size: int = 4) -> None:
        if size < 1 or (layers is not None and layers < 1):
            raise InvalidRequestError("layer-draft needs at least one layer and one draft")
        self.layers = layers
        self.size = size
        self.acceptance = TokenExact()

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise InvalidRequestError("layer-draft does not work with guidance by a second prompt")
        depth = sequence.num_layers
        if self.layers is not None and self.layers >= depth:
            raise InvalidRequestError(f"layers={self.layers} leaves none of {depth} to verify with")

    def decode(self, sequence: Sequence) -> Decoding:
        exit_layer = self.layers or max(1, sequence.num_layers // 3)
        while not sequence.finished:
            unscored = sequence.unscored()
            if len(unscored) > 1:
                yield sequence.score(unscored[:-1])
            sampler, position = sequence.sampler.fork(), sequence.length
            drafts: list[int] = []
            token = unscored[-1]
            for _ in range(self.size):
                scores = yield sequence.score([token], layers=(0, exit_layer))
                token = sequence.sample(sampler, scores.row(0), position + len(drafts))
                sampler.advance(token)
                drafts.append(token)
            tree = TokenTree.chain(drafts)
            scores = yield sequence.complete(drafts[-1:])
            verdict = self.acceptance.walk(tree, scores)
            sequence.truncate(position + len(verdict.path))
            sequence.record(tree, verdict.path, verdict.tokens)
            row = len(verdict.path)
            sequence.emit(
                verdict.tokens, scores.sampler_after(row) if sequence.sampler.stateful else None
            )
