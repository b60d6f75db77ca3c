"""Self-speculative decoding with early exit (Elhoushi et al., LayerSkip, arXiv:2404.16710).

The first layers of the model propose draft tokens. The remaining layers then verify them: they
continue from the hidden states that the draft computed, so no layer runs twice for a token.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.self_speculation import DepthSession, Drafting, SelfSpeculative
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class _Session(DepthSession):
    def __init__(self, sequence: Sequence, exit_layer: int, max_drafts: int) -> None:
        super().__init__(sequence)
        self.exit_layer, self.max_drafts = exit_layer, max_drafts

    def size(self) -> int:
        return self.max_drafts

    def draft(self, token: int, size: int) -> Drafting:
        sequence = self.sequence
        sampler, position = sequence.sampler.fork(), sequence.length
        drafts: list[int] = []
        while len(drafts) < size:
            scores = yield sequence.score([token], layers=(0, self.exit_layer))
            token = self.sample(sampler, scores.row(0), position + len(drafts))
            drafts.append(token)
            if sequence.stops_at(token):
                break
        return drafts


@register(
    Card(
        "layerskip",
        "depth",
        paper="Elhoushi et al. 2024, LayerSkip (arXiv:2404.16710)",
        exactness="token-exact",
        summary="The first layers propose draft tokens, the remaining layers verify them.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        measured=(
            "0.26 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), whose first"
            " layers do not predict what all do (AMD EPYC, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
            "2.23 times the speed of plain decoding on early-8b.Q4_0 with layers=8 and size=6,"
            " and 1.25 times on early-1b.Q4_0 with layers=4 (random weights whose exits agree"
            " often; AMD EPYC with AVX2, 2 cores; `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " the rejection rule is acceptance='rejection'",
            CHAIN_NOISE,
            "the prompt runs through all layers at once, not first through those of the draft",
            "`anydecode train depth --recipe layerskip` continues the training of a model, on its"
            " own answers; it trains none from scratch,"
            " and has a loss behind the last layer in every step",
        ),
        remote={"layers": Range(1, 1024), "size": Range(1, 64), "acceptance": LOGIT_RULES},
    )
)
class LayerSkip(SelfSpeculative):
    """Drafts `size` tokens with the first layers, then runs the remaining layers.

    Args:
        layers: How many layers the draft runs (default: a third of the model's).
        size: Maximum number of draft tokens per round.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        layers: int | None = None,
        size: int = 4,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        if size < 1 or (layers is not None and layers < 1):
            raise InvalidRequestError(
                f"layerskip needs layers >= 1 and size >= 1, not layers={layers}, size={size}"
            )
        self.layers = layers
        self.size = size

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.check_exit(sequence, self._exit(sequence))

    def open(self, sequence: Sequence) -> DepthSession:
        return _Session(sequence, self._exit(sequence), self.size)

    def _exit(self, sequence: Sequence) -> int:
        """How many layers the draft runs."""
        return self.layers or max(1, sequence.num_layers // 3)
