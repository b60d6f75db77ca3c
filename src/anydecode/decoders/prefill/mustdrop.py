"""MustDrop (Liu et al., "Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large
Language Model", arXiv:2411.10803).

Similar neighbouring vision tokens are merged in the vision encoder (`models/clip.py`), which also
finds the key tokens; rows of another encoder are merged before the first layer. After some layers,
vision tokens with little attention from the text are dropped, unless they are key tokens.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.attention_probe import attention_probe
from anydecode.decoders.prefill.prefilled import (
    WORKS_WITH,
    Prefilled,
    input_embeddings,
    mark_computed,
    prompt_embeds_of,
    score_layer_range,
    score_prompt,
)
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.similar_windows import similar_windows
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def merged(rows: np.ndarray, side: int, alike: float) -> tuple[np.ndarray, np.ndarray]:
    """Merge similar neighbouring vision tokens.

    In a grid of `side * side` rows, each 3 x 3 window whose mean pairwise cosine is at least
    `alike` is replaced by its mean, at the window's first position.

    Returns:
        The rows, and a boolean array that is True for the rows that remain.
    """
    remain, windows = np.ones(len(rows), bool), similar_windows(rows, side, alike)
    rows = rows.copy()
    for window in windows:
        rows[window[0]] = rows[window].mean(0)
        remain[window[1:]] = False
    return rows, remain


def dropped(attention: np.ndarray, overall: float, single: float) -> np.ndarray:
    """Which vision tokens get too little attention from the text, bool `[vision]`.

    Of the attention weights `[text, vision]`, such a token has less than the share `overall` of the
    sum of all, and less than `single` in every row.
    """
    return (attention.sum(0) < overall * attention.sum()) & (attention.max(0) < single)


@register(
    Card(
        "mustdrop",
        "serving",
        paper="Liu et al. 2024, MustDrop, arXiv:2411.10803",
        exactness="lossy",
        summary="Merges similar vision tokens and drops those with little attention from the text.",
        needs=("embeddings in the prompt (prompt_embeds): without, nothing is dropped",),
        works_with=WORKS_WITH,
        deviations=(
            "works on the embeddings given with the prompt and their importance, which selects the"
            " tokens that are never dropped. `models/clip.py` computes both as published; of"
            " another encoder, similar neighbours among the embeddings are merged, at the position"
            " of the first",
            "the remaining tokens keep their positions, as their cached keys are already rotated",
            "only the text after the vision tokens counts, as earlier tokens do not see them",
        ),
        remote={
            "overall": Range(0, 1),
            "single": Range(0, 1),
            "key": Range(0, 1),
            "alike": Range(-1, 2),
            "decoder": Nested(),
        },
    )
)
class MustDrop(Prefilled):
    """Drops vision tokens after four layers: 2, 6, 10 and 14 of 32, other depths in proportion.

    Vision tokens that form a square grid are merged first, unless their encoder has merged them
    (`PromptEmbeds.is_grid`).

    Args:
        overall: A token is dropped if its share of the text's attention is below this ...
        single: ... and its attention from every single text token is below this.
        key: The share of the most important vision tokens, which are never dropped.
        alike: The mean cosine from which a 3 x 3 window is merged (above 1: never).
        decoder: The catalogue key of the decoder that generates.
    """

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
            raise InvalidRequestError("mustdrop needs overall >= 0, single >= 0 and 0 <= key <= 1")
        self.overall, self.single, self.key, self.alike = overall, single, key, alike

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if prompt_embeds_of(sequence) is not None:
            attention_probe(sequence.model())

    def prefill(self, sequence: Sequence, kv_cache: SequenceCache) -> Decoding:
        length = len(sequence.prompt) - 1
        media = prompt_embeds_of(sequence)
        if media is None:
            yield score_prompt(sequence, kv_cache, 0, length)
            return
        state = input_embeddings(sequence, kv_cache, 0, length)
        assert state is not None
        num_layers = kv_cache.pool.model.spec.num_layers
        is_kept = np.ones(length, bool)
        side = round(len(media.rows) ** 0.5)
        if media.is_grid and side * side == len(media.rows) and side > 2:
            rows, remaining = merged(media.rows, side, self.alike)
            state[media.first : media.stop] = rows
            is_kept[media.first : media.stop] = remaining
        protected = self._protected(media, length)
        positions = np.flatnonzero(is_kept).astype(np.int32)
        state, begin = state[is_kept], 0
        for stage in sorted({(2 + 4 * i) * num_layers // 32 for i in range(4)}):
            text = np.flatnonzero(positions >= media.stop)
            if stage + 1 >= num_layers or not len(text):
                break
            layers = (begin, stage + 1)
            span, score = score_layer_range(
                sequence, kv_cache, positions, state, layers, text.tolist(), (stage,)
            )
            answer = yield score
            attention = attention_probe(kv_cache.pool.model).attention(
                stage, answer.hidden[stage], positions[text], kv_cache.pool.cache,
                kv_cache.table[positions], positions,
            ).mean(0)  # fmt: skip
            vision = np.flatnonzero((positions >= media.first) & (positions < media.stop))
            is_dropped = dropped(attention[:, vision], self.overall, self.single)
            is_dropped &= ~protected[positions[vision]]
            remain = np.ones(len(positions), bool)
            remain[vision[is_dropped]] = False
            state, begin = span.output_states[remain], stage + 1
            positions = positions[remain]
        _, score = score_layer_range(
            sequence, kv_cache, positions, state, (begin, num_layers), (), ()
        )
        yield score
        mark_computed(sequence, kv_cache)
        kv_cache.evict(np.setdiff1d(np.arange(length), positions).tolist())

    def _protected(self, media: PromptEmbeds, length: int) -> np.ndarray:
        """Boolean `[length]`: the positions that are never dropped."""
        is_protected = np.zeros(length, bool)
        count = ceil(self.key * len(media.rows))
        if media.importance is not None and count:
            order = np.argsort(-media.importance, kind="stable")[:count]
            is_protected[media.first + order] = True
        return is_protected
