"""SpecBound: drafts that leave the model at the first layer that is sure enough, within bounds of
depth and length ("SpecBound: Adaptive Bounded Self-Speculation with Layer-wise Confidence
Calibration", arXiv:2604.12247).

Pending tokens stand at different depths. A token goes deeper together with all pending tokens that
have not been there, so that every layer has the keys and values of all tokens before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.self_speculation import DepthSession, Drafting, SelfSpeculative
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_files import network_of
from anydecode.models.exit_heads import ExitHeads
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence


class _Session(DepthSession):
    def __init__(self, sequence: Sequence, method: SpecBound) -> None:
        super().__init__(sequence)
        self.method, self.exits = method, method.exits(sequence.num_layers)
        self.model: Any = sequence.model()
        self.is_last_read = False  # whether the last draft has run, and left at no exit

    def size(self) -> int:
        return self.method.max_drafts

    def draft(self, token: int, size: int) -> Drafting:
        sequence = self.sequence
        sampler, position = sequence.sampler.fork(), sequence.length
        drafts: list[int] = []
        while True:
            for layers in self.exits:
                has_head = self.method.heads is not None
                hidden = (layers,) if has_head else ()
                if layers == self.exits[0]:
                    scores = yield sequence.score(
                        [token], layers=(0, layers), hidden=hidden, logits=not has_head
                    )
                else:
                    scores = yield sequence.complete(
                        stop=layers, hidden=hidden, logits=not has_head
                    )
                row = self._row(scores, layers)
                if self._confidence(row, layers) >= self.method.threshold:
                    break
            else:
                self.is_last_read = True
                return drafts
            token = self.sample(sampler, row, position + len(drafts))
            drafts.append(token)
            if len(drafts) == size or sequence.stops_at(token):
                self.is_last_read = False
                return drafts

    def verification(self, drafts: list[int]) -> ScoreRequest:
        return self.sequence.complete(() if self.is_last_read else drafts[-1:])

    def _row(self, scores: Scores, layers: int) -> np.ndarray:
        """The logits of the last position, float32 `[vocab_size]`."""
        heads = self.method.heads
        if heads is None:
            return scores.row(-1)
        row: np.ndarray = self.model.head(heads(layers, scores.hidden[layers][-1:]))[0]
        return row

    def _confidence(self, row: np.ndarray, layers: int) -> float:
        """The largest probability, at a temperature that falls with depth."""
        temperature = 1 + self.method.slope * (1 - layers / self.sequence.num_layers)
        return float(1 / np.exp((row - row.max()) / temperature).sum())


@register(
    Card(
        "specbound",
        "depth",
        paper="SpecBound (arXiv:2604.12247)",
        exactness="token-exact",
        summary="Each draft leaves the model at the first layer that is sure enough; a token that"
        " leaves at none ends the draft.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        measured=(
            "0.19 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1) (AMD EPYC,"
            " 2 cores; `anydecode bench depth`, docs/performance.md)",
            "0.99 times the speed of plain decoding on early-8b.Q4_0 with first=8 and interval=4,"
            " and 0.61 times on early-1b.Q4_0 (random weights whose exits agree often; AMD EPYC"
            " with AVX2, 2 cores; `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "without heads= exits read the model's own norm and head, as those of `layerskip`, for"
            " which `anydecode train depth --recipe layerskip` trains a model",
            "the form of the paper's heads is not known: those of `anydecode train depth --recipe"
            " specbound` map the state linearly before the model's own norm and head, and learn the"
            " distributions of the last layer on the model's own answers",
            "the values of slope, threshold and bounds are not known: the paper chooses them by"
            " task",
            "which layers are checked is not known: by default those after a fifth of them, and"
            " every seventh or eighth part on",
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " the rejection rule is acceptance='rejection'",
            CHAIN_NOISE,
        ),
        remote={
            "size": Range(1, 64),
            "threshold": Range(0, 1),
            "slope": Range(0, 16),
            "first": Range(1, 1024),
            "interval": Range(1, 1024),
            "depth": Range(1, 1024),
            "acceptance": LOGIT_RULES,
        },
    )
)
class SpecBound(SelfSpeculative):
    """Drafts at the first exit whose confidence reaches a threshold.

    The confidence after l of L layers is the largest probability at the temperature 1 + slope * (1
    - l / L), so that early layers must be more certain.

    Args:
        size: Maximum number of draft tokens per round.
        threshold: The confidence at which a token leaves.
        slope: How much the temperature falls with depth.
        first: Layers before the first exit (default: a fifth of the model's).
        interval: Layers between exits (default: two fifteenths of the model's).
        depth: Layers before the last exit at most (default: three fifths of the model's).
        heads: The file of `anydecode train depth --recipe specbound`, which has a head for each
            exit; None: exits read the model's own norm and head.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        size: int = 8,
        threshold: float = 0.7,
        slope: float = 0.5,
        first: int | None = None,
        interval: int | None = None,
        depth: int | None = None,
        heads: str | Path | None = None,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        counts = [one for one in (size, first, interval, depth) if one is not None]
        if min(counts) < 1 or not 0 <= threshold <= 1 or slope < 0:
            raise InvalidRequestError(
                "specbound needs size, first, interval and depth of at least 1, 0 <= threshold <= 1"
                " and slope >= 0"
            )
        self.max_drafts, self.threshold, self.slope = size, threshold, slope
        self.first, self.interval, self.depth = first, interval, depth
        self.heads = None if heads is None else ExitHeads.load(Path(heads))

    def exits(self, num_layers: int) -> list[int]:
        """Numbers of layers after which a token may leave."""
        first = self.first or max(1, num_layers // 5)
        interval = self.interval or max(1, 2 * num_layers // 15)
        return list(range(first, (self.depth or max(1, 3 * num_layers // 5)) + 1, interval))

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        num_layers = sequence.num_layers
        exits = self.exits(num_layers)
        if not exits or exits[-1] >= num_layers:
            raise InvalidRequestError(
                f"specbound has the exits {exits} of {num_layers} layers; choose first and depth so"
                f" that there is one from 1 to {num_layers - 1}"
            )
        self.check_exit(sequence, exits[-1])
        if self.heads is not None:
            self._check_heads(self.heads, sequence.model(), exits)

    @staticmethod
    def _check_heads(heads: ExitHeads, model: Any, exits: list[int]) -> None:
        heads.check(network_of(model, "layers to leave: heads are for a transformer"))
        if not set(exits) <= set(heads.exits):
            raise InvalidRequestError(
                f"specbound has the exits {exits}, and the file has heads after {heads.exits}"
                " layers: choose first, interval and depth so that each exit has one"
            )

    def open(self, sequence: Sequence) -> DepthSession:
        return _Session(sequence, self)
