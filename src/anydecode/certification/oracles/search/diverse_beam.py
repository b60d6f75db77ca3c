"""Oracle test of diverse-beam (Vijayakumar et al., arXiv:1610.02424): every group's choices
recomputed from the first token; and the n-grams that the texts of one search share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer, beam_oracle, short_model
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

Text = tuple[int, ...]


def diverse_oracle(
    model: ScriptedModel,
    prompt: list[int],
    width: int,
    groups: int,
    limit: int,
    strength: float,
    end: int = -1,
) -> list[list[Text]]:
    """The texts of each group, best first, at a length penalty of 1. Keeps only the chosen texts
    between steps, and always continues up to the limit, so the sums are those of whole texts."""
    size = width // groups
    costs: dict[tuple[int, Text], float] = {(group, ()): 0.0 for group in range(groups)}

    def total(group: int, text: Text) -> float:
        return raw_score(model, prompt, text) * len(text) - costs[group, text]

    live: list[list[Text]] = [[()] for _ in range(groups)]
    ended: list[list[Text]] = [[] for _ in range(groups)]
    for position in range(limit):
        for group in range(groups):
            earlier = [text[position] for other in live[:group] for text in other]
            grown = []
            for text in live[group]:
                for token in range(model.spec.vocab_size):
                    cost = strength * earlier.count(token)
                    costs[group, (*text, token)] = costs[group, text] + cost
                    grown.append((*text, token))
            totals = {text: total(group, text) for text in grown}
            grown.sort(key=lambda text: (-totals[text], text))
            ended[group] += [text for text in grown[:size] if text[-1] == end]
            live[group] = [text for text in grown if text[-1] != end][:size]
    return [
        sorted(ended[group] + live[group], key=lambda text: -total(group, text) / len(text))
        for group in range(groups)
    ]


def raw_score(model: ScriptedModel, prompt: list[int], text: Text) -> float:
    """The mean log-probability of the tokens, each from the whole text before it."""
    rows = [log_softmax(logits_after(model, prompt + [*text[:i]])) for i in range(len(text))]
    return sum(float(row[token]) for row, token in zip(rows, text, strict=True)) / len(text)


@oracle_test("diverse-beam")
def diverse_beam() -> Iterator[Check]:
    """The best text of every group; beam search with one group; and groups that all differ."""
    prompt = [0, 1]
    settings: dict[str, tuple[int, int, float]] = {
        "diverse-beam": (4, 4, 0.5),
        "diverse-beam:groups=2": (4, 2, 0.5),
        "diverse-beam:width=6,groups=3,strength=2": (6, 3, 2.0),
    }
    for decoder, (width, groups, strength) in settings.items():
        wrong = differ = 0
        for seed in range(8):
            model = short_model(seed)
            texts = diverse_oracle(model, prompt, width, groups, 4, strength, end=3)
            best = {found[0]: raw_score(model, prompt, found[0]) for found in texts}
            expected = sorted(best, key=lambda text: -best[text])
            options: dict[str, Any] = {"n": len(expected), "max_tokens": 4, "decoder": decoder}
            with LLM(model, tokenizer=ShortTokenizer(), cache_positions=1024) as llm:
                samples = llm.generate(prompt, **options).samples
            wrong += [tuple(one.tokens) for one in samples] != expected
            wrong += any(
                abs((one.score or 0) - best.get(tuple(one.tokens), 0)) > 1e-5 for one in samples
            )
            differ += len(expected) > 1
        detail = f"{wrong} of 8 wrong, {differ} with several texts"
        yield Check(f"{decoder}: the best text of every group", wrong == 0 < differ, detail)
    same = alone = 0
    for seed in range(8):
        model = short_model(seed)
        with LLM(model, tokenizer=ShortTokenizer(), cache_positions=1024) as llm:
            one = llm.generate(prompt, decoder="diverse-beam:groups=1", n=4, max_tokens=6)
            off = llm.generate(prompt, decoder="diverse-beam:width=8,groups=2,strength=0", n=4,
                               max_tokens=6)  # fmt: skip
        expected_texts = beam_oracle(model, prompt, 4, 6, 1.0, end=3)[:4]
        same += [text.tokens for text in one.samples] == expected_texts
        alone += [text.tokens for text in off.samples] == expected_texts
    yield Check("one group is beam search", same == 8, f"{same} of 8")
    yield Check("without a strength all groups are beam search", alone == 8, f"{alone} of 8")
    with LLM(ScriptedModel(seed=6, vocab_size=64), tokenizer=ByteTokenizer()) as llm:
        far = llm.generate(prompt, decoder="diverse-beam:strength=1000", n=4, max_tokens=5)
    firsts = {text.tokens[0] for text in far.samples}
    yield Check("a large strength makes all first tokens differ", len(firsts) == 4, f"{firsts}")


@measure(
    "diverse-beam",
    "distinct 2-grams of four texts, beam search's less its own",
    samples=24,
    margin=-0.1,
)
def diverse_claim(samples: int) -> float:
    """The mean share of distinct 2-grams, at equal width and number of texts; below 0: more diverse
    than beam search."""
    return distinct(samples, "beam") - distinct(samples, "diverse-beam")


def distinct(samples: int, decoder: str) -> float:
    """The mean over prompts of the share of 2-grams, of all in four texts, that are different."""
    shares = []
    with LLM(ScriptedModel(seed=6, vocab_size=64), tokenizer=ByteTokenizer()) as llm:
        options: dict[str, Any] = {"n": 4, "max_tokens": 12, "ignore_eos": True}
        for i in range(samples):
            prompt = [i % 64, (7 * i) % 64]
            texts = [one.tokens for one in llm.generate(prompt, decoder=decoder, **options).samples]
            grams = [pair for text in texts for pair in zip(text, text[1:], strict=False)]
            shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))
