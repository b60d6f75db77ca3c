"""Self-speculative decoding with early exit (Elhoushi et al., LayerSkip, arXiv:2404.16710).

The first layers of the model propose draft tokens. The remaining layers then verify them: they
continue from the hidden states that the draft computed, so no layer runs twice for a token.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import TokenExact
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
        summary="The first layers propose draft tokens, the remaining layers verify them.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=(
            "verification samples with the target's own noise instead of comparing argmax tokens",
        ),
        remote={"layers": Range(1, 1024), "size": Range(0, 64)},
    )
)
class LayerDraft(Decoder):
    """Drafts `size` tokens with the first layers, then runs the remaining layers.

    Args:
        layers: How many layers the draft runs (default: a third of the model's).
        size: How many draft tokens are proposed at a time.
    """

    def __init__(self, layers: int | None = None, size: int = 4) -> None:
        if size < 1 or (layers is not None and layers < 1):
            raise InvalidRequestError(
                f"layer-draft needs layers >= 1 and size >= 1, not layers={layers}, size={size}"
            )
        self.layers = layers
        self.size = size
        self.acceptance = TokenExact()

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise InvalidRequestError(
                "layer-draft does not work with guidance, which needs a second prompt"
            )
        num_layers = sequence.num_layers
        if self.layers is not None and self.layers >= num_layers:
            raise InvalidRequestError(
                f"layers={self.layers} leaves none to verify with: the model has {num_layers}, so"
                f" layers must be at most {num_layers - 1}"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        exit_layer = self.layers or max(1, sequence.num_layers // 3)
        while not sequence.finished:
            unscored = sequence.unscored()
            if len(unscored) > 1:
                yield sequence.score(unscored[:-1])
            sampler, position = sequence.sampler.fork(), sequence.length
            draft_tokens: list[int] = []
            token = unscored[-1]
            for _ in range(self.size):
                scores = yield sequence.score([token], layers=(0, exit_layer))
                token = sequence.sample(sampler, scores.row(0), position + len(draft_tokens))
                sampler.advance(token)
                draft_tokens.append(token)
            tree = TokenTree.chain(draft_tokens)
            scores = yield sequence.complete(draft_tokens[-1:])
            result = self.acceptance.walk(tree, scores)
            sequence.truncate(position + len(result.path))
            sequence.record(tree, result.path, result.tokens)
            row = len(result.path)
            sequence.emit(
                result.tokens, scores.sampler_after(row) if sequence.sampler.is_stateful else None
            )
