"""M2R2: drafts of a second residual stream that adapters carry ahead of the model's own (Bhendawade
et al., "M2R2: Mixture of Multi-Rate Residuals for Efficient Transformer Inference",
arXiv:2502.02040)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.self_speculation import DepthSession, Drafting, SelfSpeculative
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.attention_probe import check_float
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.host import select
from anydecode.models.accelerators import Accelerators
from anydecode.models.exit_files import network_of
from anydecode.scoring.sequence import TARGET, Sequence


class _Session(DepthSession):
    def __init__(self, sequence: Sequence, max_drafts: int, accelerators: Accelerators) -> None:
        super().__init__(sequence)
        self.max_drafts, self.accelerators = max_drafts, accelerators
        self.model: Any = sequence.model()
        layers = accelerators.layers
        self.first, self.exit = layers[0], layers[-1] + 1

    def size(self) -> int:
        return self.max_drafts

    def draft(self, token: int, size: int) -> Drafting:
        sequence = self.sequence
        sampler, position = sequence.sampler.fork(), sequence.length
        drafts: list[int] = []
        while len(drafts) < size:
            scores = yield sequence.score(
                [token], layers=(0, self.exit), hidden=(self.first,), logits=False
            )
            row = self._logits(scores.hidden[self.first][-1])
            token = self.sample(sampler, row, position + len(drafts))
            drafts.append(token)
            if sequence.stops_at(token):
                break
        return drafts

    def _logits(self, state: np.ndarray) -> np.ndarray:
        """The logits of the last position, float32 `[vocab_size]`, from the model's state where the
        accelerated stream begins."""
        kv_cache = self.sequence.kv_cache()
        cache, slots = kv_cache.pool.cache, kv_cache.table
        slots = slots[slots >= 0]  # positions may be left out

        def keys_values(layer: int) -> tuple[np.ndarray, np.ndarray]:
            keys, values = (select(one[layer], slots) for one in (cache.keys, cache.values))
            return keys.astype(np.float32), values.astype(np.float32)

        position = kv_cache.length - 1
        accelerated = self.accelerators(self.model.spec, state, position, keys_values)
        row: np.ndarray = self.model.head(accelerated[None])[0]
        return row


@register(
    Card(
        "m2r2",
        "depth",
        paper="Bhendawade et al. 2025, M2R2 (arXiv:2502.02040)",
        exactness="token-exact",
        summary="Adapters beside the first layers carry a second residual stream, which attends to"
        " the model's own keys and values, to the last layer's token; the model verifies.",
        needs=("accelerators",),
        works_with=("constraints", "samplers", "batches"),
        missing=(
            "exits of single tokens by a router over the accelerated states (ARLA)",
            "several intervals with rates of their own: one interval reaches for the last layer",
            "experts of a mixture that are loaded ahead of time",
        ),
        measured=(
            "0.31 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 4.7% of"
            " drafts accepted after 5 minutes of training (AMD EPYC, 2 cores; `anydecode bench"
            " depth`, docs/performance.md)",
            "tokens of held-out answers that are the last layer's, after 5 minutes of training on a"
            " busy machine (AMD EPYC with AVX2, 2 cores; `anydecode train depth --recipe m2r2"
            " --threads 1 --minutes 5 --answers 96`): 0.080 on SmolLM2-135M-Instruct,"
            " where the model's own"
            " state after as many layers has 0.072; so nearly every draft is rejected",
        ),
        deviations=(
            "the paper's equations were not available: the adapters (a low-rank attention and MLP"
            " per layer), their rank, and the numbers of layers and drafts are guesses",
            "the adapters learn the distributions of the last layer on the model's own answers",
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " the rejection rule is acceptance='rejection'",
            CHAIN_NOISE,
        ),
        remote={"size": Range(1, 64), "acceptance": LOGIT_RULES},
    )
)
class M2R2(SelfSpeculative):
    """Drafts from an accelerated state beside the first layers, then runs the remaining layers.

    Each draft runs the model's first layers, which store their keys and values as always. Beside
    the last of these, the accelerated state reads what they have stored and stores nothing, so that
    the model that verifies is the original one.

    Args:
        size: Maximum number of draft tokens per round.
        accelerators: The file of `anydecode train depth --recipe m2r2`; by default that of the
            model's folder, accelerators.safetensors.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    requirements = Requirements(reads_accelerators=True, attention_only=(TARGET,))

    def __init__(
        self,
        size: int = 3,
        accelerators: str | Path | None = None,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        if size < 1:
            raise InvalidRequestError(f"m2r2 needs size >= 1, not {size}")
        self.max_drafts = size
        self._own = None if accelerators is None else Accelerators.load(Path(accelerators))

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        check_float(sequence.pool())
        model: Any = sequence.model()
        found = self._accelerators(model)
        found.check(network_of(model, "layers to accelerate: m2r2 needs a transformer"))
        self.check_exit(sequence, found.layers[-1] + 1)

    def open(self, sequence: Sequence) -> DepthSession:
        accelerators = self._accelerators(sequence.model())
        return _Session(sequence, self.max_drafts, accelerators)

    def _accelerators(self, model: Any) -> Accelerators:
        """Those of the decoder, or of the model's folder.

        Raises:
            UnsupportedCombinationError: There are none.
        """
        found: Accelerators | None = self._own or getattr(model, "accelerators", None)
        if found is None:
            raise UnsupportedCombinationError(
                "m2r2 needs accelerators: `anydecode train depth --recipe m2r2` makes them, and"
                " m2r2:accelerators=FILE reads them"
            )
        return found
