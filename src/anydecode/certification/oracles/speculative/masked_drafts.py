"""A scripted diffusion model that drafts for a target: the distributions of its masked positions
are recomputed."""

from __future__ import annotations

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.rounds import Logits, TracedRound, rounds, wordy
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel

TARGET = wordy()
PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


def draft_logits(path: tuple[int, ...]) -> np.ndarray:
    """Logits of the diffusion model: the target's after the text before the masks, with masks
    before the position replaced by the most probable tokens."""
    *seen, position = path
    text = [token for token in seen if token != MASK]
    row: np.ndarray = TARGET(tuple(text)) * 0.5
    for _ in range(position - len(text)):
        text.append(int(row.argmax()))
        row = TARGET(tuple(text)) * 0.5
    return row


def open_llm(logits: Logits = draft_logits) -> LLM:
    """An engine with the target `TARGET` and a diffusion model with `logits` as draft model."""
    draft = ScriptedModel(logits, causal=False)
    return LLM(ScriptedModel(TARGET), tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096)


def marginals(text: list[int], count: int, logits: Logits = draft_logits) -> list[np.ndarray]:
    """The diffusion model's logits of `count` masked positions after `text`."""
    canvas = (*text, *[MASK] * count)
    rows = [logits((*canvas, len(text) + ahead)).copy() for ahead in range(count)]
    for row in rows:
        row[MASK] = -np.inf
    return rows


def all_rounds(decoder: str, temperature: float) -> list[TracedRound]:
    """The rounds of `decoder` after each of `PROMPTS`."""
    with open_llm() as llm:
        return [
            one
            for prompt in PROMPTS
            for one in rounds(llm, decoder, prompt, temperature=temperature)
        ]
