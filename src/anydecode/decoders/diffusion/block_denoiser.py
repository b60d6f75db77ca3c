"""Block-wise denoising with the most confident tokens first (Chang et al., MaskGIT,
arXiv:2202.04200; Nie et al., LLaDA, arXiv:2502.09992): the plain loop that diffusion decoders vary.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "block-denoiser",
        "diffusion",
        paper="MaskGIT (arXiv:2202.04200); LLaDA (arXiv:2502.09992)",
        exactness="lossy",
        summary="Fills blocks of masks, the most confident positions first.",
        needs=("diffusion model",),
        works_with=("batches", "samplers"),
    )
)
class BlockDenoiser(Decoder):
    """`block` masks at a time; every pass commits `block / passes` of them."""

    causal = False

    def __init__(self, block: int = 8, passes: int = 4, mask: int | None = None) -> None:
        if block < 1 or not 1 <= passes <= block:
            raise InvalidRequestError("a denoiser needs 1 <= passes <= block")
        self.block = block
        self.passes = passes
        self.mask = mask

    def prepare(self, sequence: Sequence) -> None:
        if self.mask is None and sequence.mask_token is None:
            raise InvalidRequestError("this model's tokenizer has no mask token; give mask=")

    def decode(self, sequence: Sequence) -> Decoding:
        mask = self.mask if self.mask is not None else sequence.mask_token
        assert mask is not None
        while not sequence.finished:
            unscored = sequence.unscored()
            if unscored:
                yield sequence.block(unscored, store=True)
            state = sequence.state.setdefault("block", {"canvas": [mask] * self.block, "step": 0})
            canvas = state["canvas"]
            for step in range(state["step"], self.passes):
                masked = [i for i, token in enumerate(canvas) if token == mask]
                if not masked:
                    break
                scores = yield sequence.block(canvas)
                count = -(-len(masked) // (self.passes - step))
                picks = {i: scores.pick_at(i, attempt=step) for i in masked}
                sure = {i: scores.distribution(i).log_probability(picks[i]) for i in masked}
                order = sorted(masked, key=lambda i: (-np.float64(sure[i]), i))
                for i in order[:count]:
                    canvas[i] = picks[i]
                state["step"] = step + 1
            del sequence.state["block"]
            sequence.emit(canvas)
