"""A Markov chain of letters as a language model over longer tokens, for prompts that end inside a
token."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.constrained.unbiased_tokenization import PromptBoundaryDecoder
from anydecode.models.scripted import PieceTokenizer, ScriptedModel

#: The probability of an "A" after each letter of a Markov chain of "A" and "B".
CHAIN = {"A": 0.7, "B": 0.4}


_A, _B, _AA = range(3)


def chain_llm() -> LLM:
    """The chain as a language model over the tokens "A", "B" and "AA". Tokenization is greedy: the
    token "A" is never followed by an "A", since "AA" would have been used."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        again, first = CHAIN["A"], CHAIN["A" if seen[-1] == _AA else "B"]
        probabilities = np.array([first * (1 - again), 1 - first, first * again, 0.0])
        if seen[-1] == _A:
            probabilities = np.array([0.0, 1.0, 0.0, 0.0])
        logits: np.ndarray = np.log(np.maximum(probabilities, 1e-30))
        return logits

    model = ScriptedModel(script, vocab_size=4)
    return LLM(model, tokenizer=PieceTokenizer("A", "B", "AA"), cache_positions=2048)


def share_of_a(decoder: PromptBoundaryDecoder | None, samples: int, prompt: str = "BA") -> float:
    """How often the letter after `prompt` is an "A"."""
    options: dict[str, Any] = {"decoder": decoder or "autoregressive"}
    with chain_llm() as llm:
        texts = [
            str(llm.generate(prompt, max_tokens=1, temperature=1.0, seed=seed, **options).text)
            for seed in range(samples)
        ]
    return sum(text.startswith("A") for text in texts) / samples
