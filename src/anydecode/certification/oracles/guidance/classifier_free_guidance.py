"""Oracle test of classifier-free-guidance (arXiv:2306.17806): logits combined by hand from two
separate texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import PROMPTS
from anydecode.decoders.guidance.classifier_free_guidance import ClassifierFreeGuidance
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


@oracle_test("classifier-free-guidance")
def guidance() -> Iterator[Check]:
    """Greedy guided text against logits combined by hand from two separate texts."""
    model = ScriptedModel(seed=9, memory=4)
    scale, negative = 2.5, list(b"no ")
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for prompt in PROMPTS:
            text: list[int] = []
            for _ in range(12):
                with_prompt = log_softmax(logits_after(model, [*prompt.encode(), *text]))
                without = log_softmax(logits_after(model, negative + text))
                text.append(int(np.argmax(without + scale * (with_prompt - without))))
            options: dict[str, Any] = {
                "max_tokens": 12,
                "ignore_eos": True,
                "negative_prompt": "no ",
            }
            guided = llm.generate(prompt, guidance_scale=scale, **options)
            yield Check(f"{prompt!r} equals the formula", guided.tokens == text)
            drafted = llm.generate(prompt, guidance_scale=scale, decoder="prompt-lookup", **options)
            yield Check(f"{prompt!r} with drafts", drafted.tokens == text)
        options = {
            "max_tokens": 12,
            "ignore_eos": True,
            "decoder": "autoregressive",
        }
        plain = llm.generate("ab", **options).tokens
        decoder = ClassifierFreeGuidance(3.0, negative)
        guided = llm.generate("ab", max_tokens=12, ignore_eos=True, decoder=decoder).tokens
        yield Check("guidance changes the text", guided != plain)
        for prompt in PROMPTS:
            sampled: dict[str, Any] = {
                "max_tokens": 24,
                "ignore_eos": True,
                "temperature": 0.8,
                "seed": 5,
            }
            alone, drafted = (
                llm.generate(prompt, guidance_scale=scale, decoder=decoder, **sampled).tokens
                for decoder in ("autoregressive", "prompt-lookup")
            )
            yield Check(f"{prompt!r} with drafts, T=0.8", alone == drafted)


@measure(
    "classifier-free-guidance", "distance of a probability from the formula's", samples=24,
    margin=2e-6,
)  # fmt: skip
def guidance_error(samples: int) -> float:
    """The largest difference between the probability of a sampled token and the formula's: of the
    default build, with scale 1.5 and the prompt's last token as the other prompt, and of another
    one."""
    default = formula_distance(samples, "classifier-free-guidance", scale=1.5, negative=None)
    other = ClassifierFreeGuidance(2.5, list(b"no "))
    return max(default, formula_distance(samples, other, scale=2.5))


def formula_distance(
    samples: int,
    decoder: str | ClassifierFreeGuidance,
    scale: float,
    negative: bytes | None = b"no ",
) -> float:
    """The largest difference between probabilities under `decoder` and under guidance of this
    scale, over `samples` texts of 8 tokens. `negative` is the other prompt; None for the prompt's
    last token."""
    model, temperature, worst = ScriptedModel(seed=9, memory=4), 0.8, 0.0
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for seed in range(samples):
            prompt = PROMPTS[seed % len(PROMPTS)]
            answer = llm.generate(
                prompt, decoder=decoder, temperature=temperature, seed=seed, max_tokens=8,
                ignore_eos=True, logprobs=0, processed_logprobs=True,
            )  # fmt: skip
            for position, entry in enumerate(answer.logprobs or ()):
                tokens = answer.tokens[:position]
                with_prompt = logits_after(model, [*prompt.encode(), *tokens])
                other = list(prompt[-1:].encode() if negative is None else negative)
                without = logits_after(model, other + tokens)
                row = without + scale * (with_prompt - without)
                expected = log_softmax(row / temperature)[answer.tokens[position]]
                assert entry is not None
                worst = max(worst, abs(float(np.exp(entry.logprob) - np.exp(expected))))
    return worst
