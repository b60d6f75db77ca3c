"""An engine over a scripted model with embeddings and hidden states, for tests of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.samplers import ToyModel
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

PROMPTS = ["the cat sat on the cat", "a", "name: name: na"]


def toy_llm() -> LLM:
    """A target, and a draft model that often agrees with it."""
    draft = ScriptedModel(seed=1, noise=0.5)
    return LLM(ToyModel(seed=1), tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048)


def letters_llm(letters: str = "abcde ", memory: int = 2, **options: Any) -> LLM:
    """A model that generates some of `letters` at random, by the last `memory` tokens, and a draft
    model that often agrees with it."""
    allowed = np.full(259, -30.0)
    allowed[[*map(ord, letters)]] = 0

    def script(seen: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([*seen[-memory:], 7]).normal(size=259)
        return np.asarray(allowed + 1.2 * noise)

    draft = ScriptedModel(script, noise=0.6)
    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer(), draft=draft, **options)
