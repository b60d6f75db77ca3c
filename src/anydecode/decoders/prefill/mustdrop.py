"""MustDrop: vision tokens are merged, then dropped in stages by what the text makes of them.

Liu et al., "Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model",
arXiv:2411.10803.
"""

from __future__ import annotations

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.prefill.attention_probe import attention_probe
from anydecode.decoders.prefill.prefilled import (
    WORKS,
    Prefilled,
    finish,
    given,
    inputs,
    plain,
    walk,
)
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def merged(rows: torch.Tensor, side: int, alike: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of 3 x 3 of a grid of `side * side` rows whose mean pairwise cosine is at least
    `alike` become their mean, in the window's first place. Returns the rows and which remain."""
    rows, stays = rows.clone(), torch.ones(len(rows), dtype=torch.bool)
    grid = torch.arange(side * side).view(side, side)
    for top in range(0, side - 2, 3):
        for left in range(0, side - 2, 3):
            window = grid[top : top + 3, left : left + 3].flatten()
            unit = torch.nn.functional.normalize(rows[window], dim=1)
            cosines = unit @ unit.T
            if (cosines.sum() - cosines.trace()) / 72 >= alike:
                rows[window[0]] = rows[window].mean(0)
                stays[window[1:]] = False
    return rows, stays


def dropped(share: torch.Tensor, overall: float, single: float) -> torch.Tensor:
    """Which vision tokens the text does not look at, bool `[vision]`: of attention `[text, vision]`
    less than `overall` of all there is in sum, and less than `single` in every row."""
    return (share.sum(0) < overall * share.sum()) & (share.amax(0) < single)


@register(
    Card(
        "mustdrop",
        "serving",
        paper="Liu et al. 2024, MustDrop, arXiv:2411.10803",
        exactness="lossy",
        summary="Vision tokens are merged where alike, and dropped where the text does not look.",
        works_with=WORKS,
        deviations=(
            "works on the embeddings given with the prompt: alike neighbours are merged there, not"
            " within the vision encoder; the set never dropped goes by the importance given with"
            " them",
            "positions are not closed up: keys already written keep their rotation",
            "the text is what follows the vision tokens; rows before them do not see them",
        ),
    )
)
class MustDrop(Prefilled):
    """Behind four layers (2, 6, 10 and 14 of 32; others in proportion) a vision token goes if the
    text's attention to it is below `overall` of all and below `single` in every row. The share
    `key` of greatest importance stays. Square grids are merged where windows are `alike` (above 1:
    nowhere)."""

    def __init__(
        self,
        overall: float = 0.011,
        single: float = 0.010,
        key: float = 0.08,
        alike: float = 0.8,
        decoder: str = "autoregressive",
    ) -> None:
        super().__init__(decoder)
        if min(overall, single) < 0 or not 0 <= key <= 1:
            raise InvalidRequestError("mustdrop needs overall, single >= 0 and 0 <= key <= 1")
        self.overall, self.single, self.key, self.alike = overall, single, key, alike

    def prefill(self, sequence: Sequence, context: SequenceCache) -> Decoding:
        length = len(sequence.prompt) - 1
        media = given(sequence)
        if media is None:
            yield plain(sequence, context, 0, length)
            return
        state = inputs(sequence, context, 0, length)
        assert state is not None
        depth = context.pool.model.spec.num_layers
        stays = np.ones(length, bool)
        side = round(len(media.rows) ** 0.5)
        if side * side == len(media.rows) and side > 2:
            rows, remaining = merged(media.rows, side, self.alike)
            state[media.first : media.stop] = rows
            stays[media.first : media.stop] = remaining.numpy()
        protected = self._protected(media, length)
        positions = np.flatnonzero(stays).astype(np.int32)
        state, begin = state[torch.from_numpy(stays)], 0
        for stage in sorted({(2 + 4 * i) * depth // 32 for i in range(4)}):
            text = np.flatnonzero(positions >= media.stop)
            if stage + 1 >= depth or not len(text):
                break
            stretch = (begin, stage + 1)
            span, score = walk(
                sequence, context, positions, state, stretch, text.tolist(), (stage,)
            )
            answer = yield score
            share = attention_probe(context.pool.model).share(
                stage, answer.hidden[stage], positions[text], context.pool.cache,
                context.table[positions], positions,
            ).mean(0)  # fmt: skip
            vision = np.flatnonzero((positions >= media.first) & (positions < media.stop))
            gone = dropped(share[:, torch.from_numpy(vision)], self.overall, self.single).numpy()
            gone &= ~protected[positions[vision]]
            left = np.ones(len(positions), bool)
            left[vision[gone]] = False
            state, begin = span.ended[torch.from_numpy(left)], stage + 1
            positions = positions[left]
        _, score = walk(sequence, context, positions, state, (begin, depth), (), ())
        yield score
        finish(sequence, context)
        context.evict(np.setdiff1d(np.arange(length), positions).tolist())

    def _protected(self, media: PromptEmbeds, length: int) -> np.ndarray:
        """Which positions are never dropped."""
        stays = np.zeros(length, bool)
        count = int(self.key * len(media.rows) + 0.5)
        if media.importance is not None and count:
            order = torch.sort(media.importance, descending=True, stable=True).indices[:count]
            stays[media.first + order.numpy()] = True
        return stays
