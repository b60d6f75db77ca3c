"""Multi-token prediction at mask tokens, whose rows alone have a LoRA adapter, with a head that
reads the token before.

Samragh et al., "Your LLM Knows the Future: Uncovering Its Multi-Token Prediction Potential",
arXiv:2507.11851.

The rows of the text run the model as it is. Those of the masks run it with the adapter. A mask's
state and the embedding of the token before give the logits of its token (`models/future_masks.py`).
With quadratic decoding, k masks stand behind the text and behind each of k candidates: whatever is
accepted, k fresh predictions stand behind it. With linear decoding they stand behind the last
candidate only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_candidates
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.mask_groups import MaskOutput
from anydecode.decoders.speculative.space import SpaceDrafter
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.exit_files import network_of
from anydecode.models.future_masks import MAX_MASKS, FutureMasks
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class FutureDrafter(SpaceDrafter):
    """A chain of the candidates of the masks behind the text, each given the candidate before.

    Args:
        num_masks: Number of masks of a group, and of candidates.
        is_linear: Whether masks stand behind the last candidate only.
        parts: The masks, the adapter and the head; None: those of the model's folder.
        rule: The acceptance rule.
    """

    requirements = Requirements(reads_future_masks=True)
    reads_states = True

    def __init__(
        self, num_masks: int, is_linear: bool, parts: FutureMasks | None, rule: Acceptance
    ) -> None:
        super().__init__(num_masks, rule)
        self.is_linear = is_linear
        self._parts = parts

    def prepare(self, sequence: Sequence) -> None:
        model = _model(sequence)
        parts = self.parts(sequence)
        lacks = "layers with adapters: mtp-future needs a transformer"
        parts.check(network_of(model, lacks))
        if len(parts.masks) < self.num_masks:
            raise InvalidRequestError(
                f"mtp-future has masks={self.num_masks}, and the model has learned"
                f" {len(parts.masks)}: give that number or less"
            )
        parts.adapter_of(model)

    def parts(self, sequence: Sequence) -> FutureMasks:
        """The masks, the adapter and the head. Raises `UnsupportedCombinationError` if there are
        none."""
        found: FutureMasks | None = self._parts or getattr(_model(sequence), "future_masks", None)
        if found is None:
            raise UnsupportedCombinationError(
                "mtp-future needs trained mask tokens: `anydecode train future-masks` makes them,"
                " and mtp-future:parts=FOLDER reads them"
            )
        return found

    def draft(
        self, sequence: Sequence, masks: Seq[MaskOutput], size: int
    ) -> tuple[TokenTree, dict[int, int]]:
        if not self.is_linear:
            return super().draft(sequence, masks, size)
        if size < self.num_masks:
            return TokenTree(), {}
        tree = self.candidates(sequence, masks[: size - self.num_masks])
        return tree, {len(tree) - 1: self.num_masks}

    def logits(
        self, sequence: Sequence, sampler: Sampler, mask: MaskOutput, last: int
    ) -> np.ndarray:
        model = _model(sequence)
        tokens = draft_candidates(sequence, sampler, mask.logits, 0, has_noise=False).tokens
        assert mask.state is not None
        embedding = model.embed(np.array([last], np.int32))[0]
        inputs = self.parts(sequence).head_inputs(embedding, mask.state)
        row = np.full_like(mask.logits, -np.inf)
        row[tokens] = model.head_products(inputs[None], tokens)[0]
        return row

    def add_mask(self, sequence: Sequence, tree: TokenTree, parent: int, number: int) -> int:
        parts = self.parts(sequence)
        node = tree.add(-1, parent)
        tree.embeddings[node] = parts.masks[number]
        tree.adapters[node] = parts.adapter_of(_model(sequence))
        return node


def _model(sequence: Sequence) -> Any:
    return sequence.model()


@register(
    Card(
        "mtp-future",
        "speculative",
        paper="Samragh et al. 2025, Your LLM Knows the Future (arXiv:2507.11851)",
        exactness="token-exact",
        summary="Mask tokens with an adapter of their own and a head that reads the token before.",
        needs=("mask tokens with an adapter",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "above temperature 0 a candidate is sampled with the noise that the target will use,"
            " and verified token-exactly; acceptance='rejection' is the rule of speculative"
            " sampling",
            CHAIN_NOISE,
            "the head that reads the token before chooses among the 64 tokens that are the most"
            " probable by the mask's own logits (the paper: all tokens)",
            "2 masks by default, 9 rows, which is faster on processors (the paper: 8, 81 rows)",
            "anydecode train future-masks weighs the three losses equally, with groups behind up to"
            " 16 tokens of each of the model's own answers; the paper's weights are not known,"
            " and it has groups behind every token of texts of a data set",
            "rank 8 by default in training (the paper: 128)",
        ),
        bounds={"masks": Range(1, MAX_MASKS)},
        remote={"masks": Range(1, 8), "acceptance": ACCEPTANCE_WORDS},
    )
)
def mtp_future(
    masks: int = 2,
    linear: bool = False,
    parts: str | Path | None = None,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Multi-token prediction with masks, a gated adapter and a sampler head.

    Args:
        masks: Number of mask tokens of a group, and of candidates; a pass has (masks + 1)^2 rows.
        linear: Masks stand behind the last candidate only: 2 masks + 1 rows, and no candidates
            after a pass that rejects one.
        parts: The folder "future_masks" of `anydecode train future-masks`; by default that of the
            model's folder.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    loaded = None if parts is None else FutureMasks.load(Path(parts))
    size = 2 * masks if linear else masks * (masks + 2)
    return Speculative(FutureDrafter(masks, linear, loaded, rule), size, rule)
