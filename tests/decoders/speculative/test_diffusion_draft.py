"""What the rows of a diffusion draft model attend to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from anydecode import LLM
from anydecode.models.scripted import BYTE_VOCABULARY, MASK, ByteTokenizer, ScriptedModel


@pytest.mark.parametrize("block_size", [0, 4])
def test_rows_attend_to_their_block_and_those_before_it(block_size: int) -> None:
    """Without blocks, to the whole canvas: the text and the drafts."""
    seen: set[tuple[int, int, int]] = set()

    def script(path: tuple[int, ...]) -> np.ndarray:
        *visible, position = path
        seen.add((visible.index(MASK), position, len(visible)))
        logits = np.zeros(BYTE_VOCABULARY)
        logits[ord("a")] = 9.0
        return logits

    draft = ScriptedModel(script, causal=False)
    if block_size:
        draft.spec = replace(draft.spec, block_size=block_size)
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), draft=draft) as llm:
        llm.generate("abcde", decoder="specdiff-2:size=6,paths=1", max_tokens=6, ignore_eos=True)
    assert len(seen) >= 6
    for start, position, num_visible in seen:
        length = start + 6
        stop = (position // block_size + 1) * block_size if block_size else length
        assert num_visible == min(stop, length), (start, position)
