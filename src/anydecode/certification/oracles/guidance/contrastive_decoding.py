"""Oracle test of contrastive-decoding (Li et al., arXiv:2210.15097): scores computed by hand from
two separate texts, and the law of sampled texts by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    PROMPT,
    TARGET_SCRIPT,
    VOCABULARY,
    Text,
    fit,
    small_llm,
)
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import PROMPTS
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


def contrast_scores(
    expert: np.ndarray, amateur: np.ndarray, ratio: float, weight: float, temperature: float
) -> dict[int, float]:
    """The scores of the plausible tokens, from the logits of both."""
    p = np.exp(log_softmax(expert))
    q = np.exp(np.asarray(amateur, np.float64) / temperature)
    q /= q.sum()
    plausible = [token for token in range(len(p)) if p[token] >= ratio * p.max()]
    return {token: float(np.log(p[token]) - weight * np.log(q[token])) for token in plausible}


def contrast_llm() -> tuple[LLM, ScriptedModel, ScriptedModel]:
    """An expert, and an amateur that prefers similar tokens less clearly."""
    expert, other = ScriptedModel(seed=9, memory=3), ScriptedModel(seed=10, memory=3)

    def script(seen: tuple[int, ...]) -> np.ndarray:
        return np.asarray(0.6 * expert.script(seen) + 0.5 * other.script(seen), np.float32)

    amateur = ScriptedModel(script)
    return LLM(expert, tokenizer=ByteTokenizer(), draft=amateur), expert, amateur


@oracle_test("contrastive-decoding")
def contrastive_decoding() -> Iterator[Check]:
    """The oracle's greedy text; greedy decoding without a contrast; and the law of samples."""
    llm, expert, amateur = contrast_llm()
    with llm:
        options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
        settings = {
            "contrastive-decoding": (0.1, 1.0, 0.5),
            "contrastive-decoding:ratio=0.3,weight=0.5": (0.3, 0.5, 0.5),
            "contrastive-decoding:ratio=0.02,amateur_temperature=1": (0.02, 1.0, 1.0),
        }
        for decoder, (ratio, weight, temperature) in settings.items():
            wrong = 0
            for prompt in PROMPTS:
                text = list(prompt.encode())
                for _ in range(16):
                    rows = logits_after(expert, text), logits_after(amateur, text)
                    scores = contrast_scores(*rows, ratio, weight, temperature)
                    text.append(max(scores, key=lambda token: scores[token]))
                found = llm.generate(prompt, decoder=decoder, **options).tokens
                wrong += list(prompt.encode()) + found != text
            yield Check(f"{decoder} equals the oracle", wrong == 0, f"{wrong} wrong")
        greedy = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        for parameters in ("weight=0", "ratio=1"):
            decoder = f"contrastive-decoding:{parameters}"
            same = [llm.generate(p, decoder=decoder, **options).tokens for p in PROMPTS]
            yield Check(f"{parameters} is greedy decoding", same == greedy)
        answer = llm.generate(PROMPTS[0], decoder="contrastive-decoding", **options)
        yield Check("the contrast changes the text", answer.tokens != greedy[0])
        yield Check("one pass per token", answer.stats.passes == 16)
    law = sampled_law(0.8)
    with small_llm() as llm:
        samples = llm.generate(
            PROMPT, decoder="contrastive-decoding", n=400, seed=5, temperature=0.8, max_tokens=3
        ).samples
        result = fit([tuple(one.tokens) for one in samples], law)
        yield Check("law of samples, T=0.8", result.passed, str(result))


def sampled_law(temperature: float) -> dict[Text, float]:
    """The probability of every text of three tokens at a temperature above 0."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(3):
        grown: dict[Text, float] = {}
        for text, probability in law.items():
            seen = (*PROMPT, *text)
            scores = contrast_scores(TARGET_SCRIPT(seen), DRAFT_SCRIPT(seen), 0.1, 1.0, 0.5)
            weights = {token: np.exp(score / temperature) for token, score in scores.items()}
            total = sum(weights.values())
            for token in range(VOCABULARY):
                longer = (*text, token)
                grown[longer] = probability * float(weights.get(token, 0.0) / total)
        law = grown
    return law


@measure(
    "contrastive-decoding",
    "how much more probable the amateur finds the text than the expert, against greedy decoding",
    samples=24,
    margin=-0.3,
)
def contrast_gain(samples: int) -> float:
    """Mean over prompts, in nats per token, less that of greedy decoding."""
    llm, expert, amateur = contrast_llm()
    losses = []
    with llm:
        for number in range(samples):
            prompt = [number, (7 * number) % 251]
            both = []
            for decoder in ("contrastive-decoding", "autoregressive"):
                tokens = llm.generate(prompt, decoder=decoder, max_tokens=8, ignore_eos=True).tokens
                seen = [prompt + tokens[:i] for i in range(8)]
                both.append(
                    np.mean(
                        [
                            log_softmax(logits_after(amateur, text))[token]
                            - log_softmax(logits_after(expert, text))[token]
                            for text, token in zip(seen, tokens, strict=True)
                        ]
                    )
                )
            losses.append(both[0] - both[1])
    return float(np.mean(losses))
