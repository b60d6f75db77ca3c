"""FastKV (Jo et al., "FastKV: KV Cache Compression for Fast Long-Context Processing with
Token-Selective Propagation", arXiv:2502.01068).

From a chosen layer on, only the prompt tokens that get the most attention from the end of the
prompt are computed. Every layer keeps its own fixed number of positions in the key-value cache.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.attention_probe import attention_probe
from anydecode.decoders.prefill.prefilled import (
    WORKS_WITH,
    Prefilled,
    check_compressible,
    compact,
    input_embeddings,
    mark_computed,
    score_layer_range,
    score_prompt,
)
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def window_scores(attention: np.ndarray, groups: int, kernel: int) -> np.ndarray:
    """Importance scores of the keys before the window, float32 `[kv_heads, keys]`.

    The attention weights are summed over the window's rows, averaged over `kernel` neighbouring
    keys (zeros beyond the ends), and summed over the query heads of each key head.

    Args:
        attention: The attention weights of the window's rows, `[heads, rows, keys]`.
        groups: The number of key heads.
        kernel: The width of the average, odd.
    """
    window = attention.shape[1]
    summed = attention[:, :, : attention.shape[2] - window].sum(1)
    padded = np.pad(summed, ((0, 0), (kernel // 2, kernel // 2)))
    pooled = np.lib.stride_tricks.sliding_window_view(padded, kernel, 1).mean(-1)
    result: np.ndarray = pooled.reshape(groups, -1, pooled.shape[1]).sum(1)
    return result


def chosen(scores: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` largest of each row of `scores`, ascending; ties to the first."""
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    return np.sort(best, axis=-1)


@register(
    Card(
        "fastkv",
        "serving",
        paper="Jo et al. 2025, FastKV, arXiv:2502.01068",
        exactness="lossy",
        summary="Later layers compute only the prompt tokens with the most attention; small cache.",
        works_with=WORKS_WITH,
        deviations=(
            "the prompt's last token runs after the cache is compressed, so the window excludes it",
            "every layer keeps the same number of positions",
            "if the kernels have packed the weights, queries are computed from the file's weights",
        ),
        remote={
            "budget": Range(0, 65536),
            "propagate": Range(0, 1),
            "layer": Range(-1, 1024),
            "window": Range(1, 64),
            "kernel": Range(1, 31),
            "decoder": Nested(),
        },
    )
)
class FastKV(Prefilled):
    """Compresses the prompt's keys and values to `budget` positions per layer and key head.

    The last `window` positions are kept, and those with the most attention from the window's rows.
    Prompts of at most `budget` tokens are not compressed.

    Args:
        budget: The number of positions to keep; below 1, a share of the prompt.
        propagate: The share of the prompt's tokens that the layers after `layer` compute.
        layer: The last layer that computes every token of the prompt (-1: the middle one).
        window: The number of last positions whose attention selects the others.
        kernel: The width of the average over neighbouring keys, odd.
        decoder: The catalogue key of the decoder that generates.
    """

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

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        length, pool = len(sequence.prompt) - 1, sequence.pool()
        if length <= self._num_kept(length):
            return
        check_compressible(pool)
        num_layers = pool.model.spec.num_layers
        middle = self._middle(num_layers)
        if not 0 <= middle < num_layers - 1:
            raise UnsupportedCombinationError(
                f"layer={middle} must be at least 0 and before the last of the model's {num_layers}"
                " layers"
            )
        attention_probe(pool.model)

    def prefill(self, sequence: Sequence, kv_cache: SequenceCache) -> Decoding:
        length, window = len(sequence.prompt) - 1, self.window
        num_kept = self._num_kept(length)
        if length <= num_kept:
            yield score_prompt(sequence, kv_cache, 0, length)
            return
        num_layers = kv_cache.pool.model.spec.num_layers
        middle = self._middle(num_layers)
        all_positions = np.arange(length, dtype=np.int32)
        scores: list[np.ndarray] = []
        state = self._input_states(sequence, kv_cache, length)
        layers = (0, middle + 1)
        span, score = score_layer_range(
            sequence,
            kv_cache,
            all_positions,
            state,
            layers,
            all_positions[-window:].tolist(),
            range(middle + 1),
        )
        answer = yield score
        scores += self._scores(kv_cache, all_positions, answer.hidden, layers)
        num_propagated = max(num_kept, int(self.propagate * length))
        best = chosen(scores[-1].sum(0), num_propagated - window)
        positions = np.concatenate([all_positions[best], all_positions[-window:]]).astype(np.int32)
        state = span.output_states[positions]
        layers = (middle + 1, num_layers)
        last = range(len(positions) - window, len(positions))
        _, score = score_layer_range(
            sequence, kv_cache, positions, state, layers, last, range(*layers)
        )
        answer = yield score
        later = self._scores(kv_cache, positions, answer.hidden, layers)
        mark_computed(sequence, kv_cache)
        compact(
            kv_cache,
            0,
            self._positions_to_keep(scores, all_positions, num_kept)
            + self._positions_to_keep(later, positions, num_kept),
        )

    def _num_kept(self, length: int) -> int:
        """The number of positions that are kept of `length`."""
        kept = self.budget * length if self.budget < 1 else self.budget
        return max(self.window + 1, int(kept))

    def _middle(self, num_layers: int) -> int:
        """The last layer that computes every token."""
        return num_layers // 2 - 1 if self.layer < 0 else self.layer

    def _input_states(self, sequence: Sequence, kv_cache: SequenceCache, length: int) -> np.ndarray:
        states = input_embeddings(sequence, kv_cache, 0, length)
        if states is None:
            states = kv_cache.pool.model.embed(np.array(sequence.prompt[:length]))  # type: ignore[attr-defined]
        return states

    def _scores(
        self,
        kv_cache: SequenceCache,
        positions: np.ndarray,
        hidden: dict[int, np.ndarray],
        layers: tuple[int, int],
    ) -> list[np.ndarray]:
        """The importance scores of each of `layers`, as `window_scores`."""
        model = kv_cache.pool.model
        scores = []
        for layer in range(*layers):
            attention = attention_probe(model).attention(
                layer, hidden[layer], positions[-self.window :], kv_cache.pool.cache,
                kv_cache.table[positions], positions,
            )  # fmt: skip
            shape = model.spec.layers[layer].attention
            assert shape is not None, "checked by the requirements of `Prefilled`"
            scores.append(window_scores(attention, shape.num_kv_heads, self.kernel))
        return scores

    def _positions_to_keep(
        self, scores: list[np.ndarray], positions: np.ndarray, num_kept: int
    ) -> list[np.ndarray]:
        """Per layer the positions to keep, int64 `[kv_heads, num_kept]`."""
        positions, result = positions.astype(np.int64), []
        for score in scores:
            best = positions[chosen(score, num_kept - self.window)]
            last = np.tile(positions[-self.window :], (len(best), 1))
            result.append(np.concatenate([best, last], 1))
        return result
