"""A model whose answer is given."""

from __future__ import annotations

import numpy as np

from anydecode import LLM
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel


def replaying_llm(text: str) -> LLM:
    """A model that prefers to answer `text` and to stop."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        generated = bytes(token for token in seen if token < 256).rpartition(b"assistant: ")[2]
        logits = np.random.default_rng(list(generated)).normal(size=259).astype(np.float32)
        whole = text.encode()
        if whole.startswith(generated):
            logits[[*whole, EOS][len(generated)]] = 30
        return logits

    model = ScriptedModel(script)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)
