"""Self-speculative decoding with early exit (Elhoushi et al., LayerSkip, arXiv:2404.16710).

The first layers of the model propose draft tokens. The remaining layers then verify them: they
continue from the hidden states that the draft computed, so no layer runs twice for a token.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import verify_tree
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


@register(
    Card(
        "layerskip",
        "depth",
        paper="Elhoushi et al. 2024, LayerSkip (arXiv:2404.16710)",
        exactness="token-exact",
        summary="The first layers propose draft tokens, the remaining layers verify them.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        missing=("the training of the model: layer dropout, and losses at the early exits",),
        deviations=(
            "verification samples with the target's own noise instead of comparing argmax tokens",
            "the prompt runs through all layers at once, not first through those of the draft",
        ),
        remote={"layers": Range(1, 1024), "size": Range(1, 64)},
    )
)
class LayerSkip(Decoder):
    """Drafts `size` tokens with the first layers, then runs the remaining layers.

    A draft ends at a token that would end the text, and does not exceed the limit of tokens.

    Args:
        layers: How many layers the draft runs (default: a third of the model's).
        size: Maximum number of draft tokens per round.
    """

    def __init__(self, layers: int | None = None, size: int = 4) -> None:
        if size < 1 or (layers is not None and layers < 1):
            raise InvalidRequestError(
                f"layerskip needs layers >= 1 and size >= 1, not layers={layers}, size={size}"
            )
        self.layers = layers
        self.size = size
        self.acceptance = TokenExact()

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts:
            raise InvalidRequestError(
                "layerskip does not work with guidance, which needs a second prompt"
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
            size = min(self.size, sequence.remaining - 1)  # a round yields one token more
            if size < 1:
                yield from verify_tree(sequence, TokenTree(), self.acceptance)
                continue
            unscored = sequence.unscored()
            if len(unscored) > 1:
                yield sequence.score(unscored[:-1])
            sampler, position = sequence.sampler.fork(), sequence.length
            draft_tokens: list[int] = []
            token = unscored[-1]
            while len(draft_tokens) < size:
                scores = yield sequence.score([token], layers=(0, exit_layer))
                token = sequence.sample(sampler, scores.row(0), position + len(draft_tokens))
                sampler.advance(token)
                draft_tokens.append(token)
                if sequence.stops_at(token):
                    break
            tree = TokenTree.chain(draft_tokens)
            scores = yield sequence.complete(draft_tokens[-1:])
            result = self.acceptance.walk(tree, scores)
            sequence.truncate(position + len(result.path))
            sequence.record(tree, result.path, result.tokens)
            row = len(result.path)
            sequence.emit(
                result.tokens, scores.sampler_after(row) if sequence.sampler.is_stateful else None
            )
