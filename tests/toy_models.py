"""An engine over a scripted model with embeddings and hidden states, for tests of sampling."""

from __future__ import annotations

from anydecode.api.llm import LLM
from anydecode.certification.samplers import ToyModel
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

PROMPTS = ["the cat sat on the cat", "a", "name: name: na"]


def toy_llm() -> LLM:
    """A target, and a draft model that often agrees with it."""
    draft = ScriptedModel(seed=1, noise=0.5)
    return LLM(ToyModel(seed=1), tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048)
