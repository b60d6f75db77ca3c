"""Models whose greedy text is a loop, and the share of 4-grams that repeat."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


def circular() -> ScriptedModel:
    """A model whose greedy text is a loop of five tokens, with other tokens nearly as probable."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        last = seen[-1]
        row = np.random.default_rng(last).normal(0, 0.6, 40)
        row[(last + 1) % 5] += 4.0
        return row

    return ScriptedModel(script, 40)


def repetition(model: ScriptedModel, length: int, **options: Any) -> float:
    """The share of 4-grams that repeat an earlier one."""
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        tokens = llm.generate([7, 0], max_tokens=length, ignore_eos=True, **options).tokens
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams)
