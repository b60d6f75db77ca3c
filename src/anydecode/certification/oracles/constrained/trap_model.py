"""A model with known probabilities of all texts, for which masking is far from the distribution
given the constraint."""

from __future__ import annotations

from collections import Counter

import numpy as np

from anydecode.api.llm import LLM
from anydecode.constraints.languages import Regex
from anydecode.decoders.decoder import Decoder
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

#: After "a" the model rarely generates a second "a", which the constraint needs.
TABLE = {"": {"a": 0.6, "b": 0.4}, "a": {"a": 0.05, "b": 0.95}, "b": {"a": 0.9, "b": 0.1}}


WORDS = Regex("aa|ba|bb")


TRUTH = {"aa": 0.6 * 0.05, "ba": 0.4 * 0.9, "bb": 0.4 * 0.1}


def trap_llm(longer: bool = False) -> LLM:
    """A model whose distribution over texts is given by `TABLE`; with `longer`, one more letter
    follows, "a" or "b" with equal probability."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.full(259, -1e9)
        logits[EOS] = 0.0
        text = bytes(seen[1:]).decode("latin-1")
        last = {"a": 0.5, "b": 0.5} if longer and len(text) == 2 else {}
        for letter, probability in TABLE.get(text, last).items():
            logits[EOS] = -1e9
            logits[ord(letter)] = np.log(probability)
        return logits

    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer(), cache_positions=1024)


def distance(decoder: Decoder, samples: int, first: int = 0) -> float:
    """Total variation distance between the texts of `decoder` and the model's distribution given
    the constraint."""
    with trap_llm() as llm:
        counts = Counter(
            llm.generate("?", decoder=decoder, constraint=WORDS, temperature=1.0, seed=seed).text
            for seed in range(first, first + samples)
        )
    total = sum(TRUTH.values())
    return sum(abs(counts[word] / samples - TRUTH[word] / total) for word in TRUTH) / 2
