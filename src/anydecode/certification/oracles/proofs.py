"""Oracle tests of beam search and classifier-free guidance: every row is recomputed from its
text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.decoders.guidance.classifier_free import ClassifierFreeGuidance
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

PROMPTS = ("ab", "the cat sat on the cat", "0101")


def logits_after(model: ScriptedModel, tokens: Iterable[int]) -> np.ndarray:
    """float32 `[vocab_size]`, directly from the script."""
    return np.asarray(model.script(tuple(tokens)), np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 `[vocab_size]`."""
    shifted = logits.astype(np.float64) - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


def beam_oracle(
    model: ScriptedModel, prompt: list[int], width: int, limit: int, penalty: float
) -> list[int]:
    """Beam search that keeps no state between steps."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        grown = []
        for total, tokens in live:
            logs = log_softmax(logits_after(model, prompt + tokens))
            grown += [(total + logs[t], [*tokens, t]) for t in np.argsort(-logs)[: 2 * width]]
        grown.sort(key=lambda one: -one[0])
        live = []
        for rank, (total, tokens) in enumerate(grown[: 2 * width]):
            if tokens[-1] == EOS:
                if rank < width:
                    ended.append((total / length**penalty, tokens))
            elif len(live) < width:
                live.append((total, tokens))
        ended = sorted(ended, key=lambda one: -one[0])[:width]
        horizon = limit if penalty > 0 else length
        best = max(total / horizon**penalty for total, _ in live)
        if len(ended) == width and best <= ended[-1][0]:
            break
    ended += [(total / len(tokens) ** penalty, tokens) for total, tokens in live]
    return [int(token) for token in max(ended, key=lambda one: one[0])[1]]


@oracle_test("beam")
def beam() -> Iterator[Check]:
    """The output of an oracle that recomputes every hypothesis from its first token."""
    model = ScriptedModel(seed=5, vocab_size=257)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for width, penalty in ((1, 1.0), (3, 1.0), (4, 0.0), (5, 2.0)):
            wrong = 0
            for prompt in PROMPTS:
                expected = beam_oracle(model, list(prompt.encode()), width, 14, penalty)
                decoder = f"beam:width={width},penalty={penalty}"
                wrong += llm.generate(prompt, max_tokens=14, decoder=decoder).tokens != expected
            yield Check(f"width {width}, penalty {penalty} equals the oracle", wrong == 0)
        greedy = [llm.generate(p, max_tokens=14, decoder="autoregressive").tokens for p in PROMPTS]
        one = [llm.generate(p, max_tokens=14, decoder="beam:width=1").tokens for p in PROMPTS]
        yield Check("width 1 is greedy decoding", greedy == one)


@measure("beam", "log-probability lost against greedy decoding", samples=24, margin=0.0)
def beam_gain(samples: int) -> float:
    """Mean over prompts. Beam search finds more probable texts than greedy decoding, so the mean
    must not be above 0."""
    model = ScriptedModel(seed=6, vocab_size=64)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
        prompts = [[i % 64, (7 * i) % 64] for i in range(samples)]
        losses = []
        for prompt in prompts:
            texts = [llm.generate(prompt, decoder=d, **options) for d in ("autoregressive", "beam")]
            totals = [llm.score(prompt, text.tokens).total for text in texts]
            losses.append(totals[0] - totals[1])
    return float(np.mean(losses))


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
        options = {"max_tokens": 12, "ignore_eos": True, "decoder": "autoregressive"}
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
    """The largest difference between the probability of a sampled token and the formula's."""
    return formula_distance(samples, ClassifierFreeGuidance(2.5, list(b"no ")), scale=2.5)


def formula_distance(samples: int, decoder: ClassifierFreeGuidance, scale: float) -> float:
    """The largest difference between probabilities under `decoder` and under guidance of this
    scale, over `samples` texts of 8 tokens."""
    model, negative, temperature, worst = ScriptedModel(seed=9, memory=4), list(b"no "), 0.8, 0.0
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
                without = logits_after(model, negative + tokens)
                row = without + scale * (with_prompt - without)
                expected = log_softmax(row / temperature)[answer.tokens[position]]
                assert entry is not None
                worst = max(worst, abs(float(np.exp(entry.logprob) - np.exp(expected))))
    return worst
