"""FastKV: later layers see only the tokens that matter, and every layer keeps its own.

Jo et al., "FastKV: KV Cache Compression for Fast Long-Context Processing with Token-Selective
Propagation", arXiv:2502.01068.
"""

from __future__ import annotations

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.prefill.attention_probe import attention_probe
from anydecode.decoders.prefill.prefilled import (
    WORKS,
    Prefilled,
    check_thinnable,
    compact,
    finish,
    inputs,
    plain,
    walk,
)
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def window_scores(share: torch.Tensor, groups: int, kernel: int) -> torch.Tensor:
    """Scores float32 `[kv_heads, keys]` of the keys before the window: attention `[heads, rows,
    keys]` of the window's rows summed over the rows, averaged over `kernel` neighbours (zeros
    beyond the ends), and summed over the query heads of each key head. `rows` is the window."""
    window = share.shape[1]
    summed = share[:, :, : share.shape[2] - window].sum(1)
    pooled = torch.nn.functional.avg_pool1d(summed[None], kernel, 1, kernel // 2)[0]
    return pooled.view(groups, -1, pooled.shape[1]).sum(1)


def chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of each row of `scores`, ties to the first, in ascending order."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(-1).values


@register(
    Card(
        "fastkv",
        "serving",
        paper="Jo et al. 2025, FastKV, arXiv:2502.01068",
        exactness="lossy",
        summary="From one layer on only the tokens that the prompt's end looks at; a small cache.",
        works_with=WORKS,
        deviations=(
            "the prompt's last token runs behind the thinned cache, so the window ends before it",
            "every layer keeps the same number of positions",
            "where the kernels have packed the weights, queries are computed from the file's own",
        ),
    )
)
class FastKV(Prefilled):
    """Prompts of more than `budget` tokens (a share of the prompt, if below 1) keep that many
    positions per layer and key head: the `window` last, and those the window's rows look at most.
    Layers behind `layer` (-1: the middle) run `propagate` of the tokens only."""

    def __init__(
        self,
        budget: float = 512,
        propagate: float = 0.2,
        layer: int = -1,
        window: int = 8,
        kernel: int = 7,
        decoder: str = "autoregressive",
    ) -> None:
        super().__init__(decoder)
        if budget <= 0 or not 0 < propagate <= 1 or window < 1 or kernel < 1 or kernel % 2 == 0:
            raise InvalidRequestError(
                "fastkv needs budget > 0, 0 < propagate <= 1, window >= 1 and an odd kernel"
            )
        self.budget, self.propagate, self.layer = budget, propagate, layer
        self.window, self.kernel = window, kernel

    def prefill(self, sequence: Sequence, context: SequenceCache) -> Decoding:
        length, window = len(sequence.prompt) - 1, self.window
        kept = max(window + 1, int(self.budget * length if self.budget < 1 else self.budget))
        if length <= kept:
            yield plain(sequence, context, 0, length)
            return
        check_thinnable(context)
        depth = context.pool.model.spec.num_layers
        middle = depth // 2 - 1 if self.layer < 0 else self.layer
        if not 0 <= middle < depth - 1:
            raise UnsupportedCombinationError(f"fastkv's layer lies before the last of {depth}")
        every = np.arange(length, dtype=np.int32)
        scores: list[torch.Tensor] = []
        state = self._start(sequence, context, length)
        stretch = (0, middle + 1)
        span, score = walk(
            sequence, context, every, state, stretch, every[-window:].tolist(), range(middle + 1)
        )
        answer = yield score
        scores += self._scores(context, every, answer.hidden, stretch)
        some = max(kept, int(self.propagate * length))
        best = chosen(scores[-1].sum(0), some - window).numpy()
        positions = np.concatenate([every[best], every[-window:]]).astype(np.int32)
        state = span.ended[torch.from_numpy(positions.astype(np.int64))]
        stretch = (middle + 1, depth)
        last = range(len(positions) - window, len(positions))
        _, score = walk(sequence, context, positions, state, stretch, last, range(*stretch))
        answer = yield score
        later = self._scores(context, positions, answer.hidden, stretch)
        finish(sequence, context)
        compact(context, 0, self._kept(scores, every, kept) + self._kept(later, positions, kept))

    def _start(self, sequence: Sequence, context: SequenceCache, length: int) -> torch.Tensor:
        given = inputs(sequence, context, 0, length)
        if given is None:
            given = context.pool.model.embed(np.array(sequence.prompt[:length]))  # type: ignore[attr-defined]
        return given

    def _scores(
        self,
        context: SequenceCache,
        positions: np.ndarray,
        hidden: dict[int, torch.Tensor],
        layers: tuple[int, int],
    ) -> list[torch.Tensor]:
        model = context.pool.model
        found = []
        for layer in range(*layers):
            share = attention_probe(model).share(
                layer, hidden[layer], positions[-self.window :], context.pool.cache,
                context.table[positions], positions,
            )  # fmt: skip
            heads = model.spec.layers[layer].attention.num_kv_heads
            found.append(window_scores(share, heads, self.kernel))
        return found

    def _kept(
        self, scores: list[torch.Tensor], positions: np.ndarray, kept: int
    ) -> list[torch.Tensor]:
        """Per layer the positions to keep, int64 `[kv_heads, kept]`."""
        at = torch.from_numpy(positions.astype(np.int64))
        found = []
        for score in scores:
            best = at[chosen(score, kept - self.window)]
            last = at[-self.window :].expand(len(best), -1)
            found.append(torch.cat([best, last], 1))
        return found
