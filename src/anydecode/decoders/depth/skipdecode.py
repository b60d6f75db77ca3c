"""SkipDecode: later tokens run fewer layers, by their position alone (Del Corro et al.,
"SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference",
arXiv:2307.02628)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.fewer_layers import FewerLayers
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import SkippedParts, Variant
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "skipdecode",
        "depth",
        paper="Del Corro et al. 2023, SkipDecode (arXiv:2307.02628)",
        exactness="lossy",
        summary="The number of layers falls with the position, and the layers skipped are those"
        " after the first.",
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "1.20 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 10.4% of"
            " tokens as the full model (AMD EPYC, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
            "1.56 times the speed of plain decoding on early-8b.Q4_0 with 22 of 32 layers, with"
            " 99.2% of tokens as the full model (random weights whose exits agree often,"
            " `--change 0.15`; AMD EPYC with AVX2, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
        ),
        deviations=(
            "texts of a model that was not trained on the schedule fall apart: `anydecode train"
            " depth --recipe skipdecode` trains a low-rank adapter on the model's own answers; the"
            " paper trains all weights on the texts of each task",
            "the schedule is that of each request, by its own limit of tokens; the paper's is that"
            " of a batch",
            "the default is two thirds of the layers, falling to a third; the paper tunes both by"
            " model and speed-up",
        ),
        remote={
            "max_layers": Range(1, 1024),
            "min_layers": Range(1, 1024),
            "warm_up": Range(0, 1024),
        },
    )
)
class SkipDecode(FewerLayers):
    """Runs fewer layers the further the text has come to its limit of tokens.

    A token at the share t of the limit runs round((1 - t) max + t min) layers: the first `warm_up`
    ones and the last ones. Layers are never run again once they were left out, so that every token
    finds the keys and values of all before it.

    Args:
        max_layers: Layers of the first generated token (default: two thirds of the model's).
        min_layers: Layers at the limit of tokens (default: a third of the model's).
        warm_up: First layers that always run.
    """

    def __init__(
        self, max_layers: int | None = None, min_layers: int | None = None, warm_up: int = 1
    ) -> None:
        self.max_layers, self.min_layers, self.warm_up = max_layers, min_layers, warm_up

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.check(sequence.num_layers)

    def check(self, num_layers: int) -> None:
        """Raise InvalidRequestError unless a model of so many layers has such a schedule."""
        most, fewest = self._limits(num_layers)
        if not self.warm_up < fewest <= most <= num_layers:
            raise InvalidRequestError(
                f"skipdecode has warm_up={self.warm_up}, min_layers={fewest} and max_layers={most}:"
                " they must rise in this order, up to the model's"
                f" {num_layers} layers, with at least one layer behind those of warm_up"
            )

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        limit = len(sequence.tokens) + sequence.remaining
        left_out = self.left_out(sequence.num_layers, index, limit)
        return SkippedParts(left_out, left_out) if left_out else None

    def left_out(self, num_layers: int, index: int, limit: int) -> frozenset[int]:
        """The layers that token `index` of a generated text of up to `limit` tokens does not run,
        of a model of so many layers."""
        most, fewest = self._limits(num_layers)
        share = index / max(1, limit)
        count = int((1 - share) * most + share * fewest + 0.5)
        return frozenset(range(self.warm_up, self.warm_up + num_layers - count))

    def _limits(self, num_layers: int) -> tuple[int, int]:
        fewest = self.min_layers or max(self.warm_up + 1, num_layers // 3)
        return self.max_layers or max(fewest, 2 * num_layers // 3), fewest
