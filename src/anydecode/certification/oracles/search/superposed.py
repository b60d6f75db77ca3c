"""Oracle test of superposed (Shen et al., arXiv:2405.18400): all passes replayed, with n-grams
counted by searching the texts for them. The embedding of a scripted model's token is its number, so
that a mixed input is a mean of numbers, of which the model reads the whole part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

LETTERS = b"abcdefgh"
PROMPTS = ("abcadbacbdabcacbda", "hgfedcbahgahfbgcedcab", "aabacadaeafagah")
TEXT = "abdceabcdhgebacdfaghbbacdeabhcgfdeacbda" * 3
LIMIT = 10


def letter_model(seed: int = 1) -> ScriptedModel:
    """Pseudo-random letters by the last two inputs, with probabilities that are close."""

    @cache
    def row_after(last: tuple[int, ...]) -> np.ndarray:
        row = np.full(259, -30.0, np.float32)
        row[[*LETTERS]] = 0.1 * np.random.default_rng([seed, *last]).normal(size=len(LETTERS))
        row[EOS] = -0.1
        return row

    return ScriptedModel(lambda seen: row_after(tuple(seen[-2:])))


def share(token: int, seen: list[int], corpora: list[list[int]]) -> float:
    """How probable the n-grams find `token` behind `seen`."""
    total = 0.0
    for size, weight in ((1, 0.01), (2, 0.04), (3, 0.15), (4, 0.18), (5, 0.12)):
        if size > len(seen):
            continue
        found = hits = 0
        for corpus in corpora:
            for start in range(len(corpus) - size):
                if corpus[start : start + size] == seen[-size:]:
                    found += 1
                    hits += corpus[start + size] == token
        total += weight * hits / found if found else 0.0
    return total


def replay(
    model: ScriptedModel,
    prompt: list[int],
    text: list[int],
    *,
    k: int = 3,
    alpha: float = 0.54,
    heat: float = 0.06,
) -> list[list[int]]:
    """The texts, the best first."""
    path = list(prompt)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    while live and len(ended) < k:
        row = logits_after(model, path).astype(np.float64) / heat
        top = np.argsort(-row, kind="stable")[: 3 * k]
        logs = log_softmax(row[top])
        grown = []
        for score, tokens in live:
            shares = [share(int(token), prompt + tokens, [prompt, text]) for token in top]
            for token, log, part in zip(top.tolist(), logs, shares, strict=True):
                if alpha == 0:
                    grown.append((score + float(log), [*tokens, token]))
                elif not any(shares):
                    grown.append((score + (1 - alpha) * float(log) - 200, [*tokens, token]))
                elif part:
                    added = (1 - alpha) * float(log) + alpha * math.log(part)
                    grown.append((score + added, [*tokens, token]))
        grown = sorted(grown, key=lambda one: -one[0])[: 2 * k]
        over = [one for one in grown if one[1][-1] == EOS or len(one[1]) == LIMIT]
        ended = sorted(ended + over, key=lambda one: -one[0])[:k]
        live = [one for one in grown if one not in over][:k]
        if live:
            weights = [math.exp(score - live[0][0]) for score, _ in live]
            last = [tokens[-1] for _, tokens in live]
            mean = sum(w * t for w, t in zip(weights, last, strict=True)) / sum(weights)
            path.append(int(np.float32(mean)))
    return [tokens for _, tokens in sorted(ended + live, key=lambda one: -one[0])[:k]]


@oracle_test("superposed")
def superposed() -> Iterator[Check]:
    """The replays, with and without a file, and greedy decoding."""
    model = letter_model()
    settings: dict[str, dict[str, Any]] = {
        "superposed": {},
        "superposed:k=5,alpha=0.3": {"k": 5, "alpha": 0.3},
        "superposed:k=2,temperature=0.5": {"k": 2, "heat": 0.5},
    }
    with (
        TemporaryDirectory() as folder,
        LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm,
    ):
        path = Path(folder) / "text"
        path.write_text(TEXT)
        for decoder, values in settings.items():
            for text in ("", TEXT):
                wrong = texts = 0
                for prompt in PROMPTS:
                    separator = "," if ":" in decoder else ":"
                    named = decoder + (f"{separator}texts={path}" if text else "")
                    count = values.get("k", 3)
                    samples = llm.generate(prompt, decoder=named, n=count, max_tokens=LIMIT).samples
                    found = [one.tokens for one in samples]
                    expected = replay(model, list(prompt.encode()), list(text.encode()), **values)
                    wrong += found != expected
                    texts += len(found)
                name = f"{decoder} equals its replay" + (", with a file" if text else "")
                detail = f"{wrong} of {len(PROMPTS)} wrong, {texts} texts"
                yield Check(name, wrong == 0 and texts > len(PROMPTS), detail)
        yield equal_tokens(
            "one text without n-grams is that of greedy decoding",
            [llm.generate(p, decoder="superposed:k=1,alpha=0", max_tokens=LIMIT).tokens
             for p in PROMPTS],
            [llm.generate(p, decoder="autoregressive", max_tokens=LIMIT).tokens for p in PROMPTS],
        )  # fmt: skip
        stats = llm.generate(PROMPTS[1], decoder="superposed", n=3, max_tokens=LIMIT).stats
        rows = stats.rows + stats.num_cached_tokens - len(PROMPTS[1])
        yield Check("one row per token for all texts", 0 < rows < LIMIT, f"{rows} rows")


@measure("superposed", "rows per token of all texts, against one", samples=3, margin=-0.4)
def superposed_rows(samples: int) -> float:
    """The mean number of rows behind the prompt, divided by the tokens of all texts, less 1."""
    shares = []
    with LLM(letter_model(), tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        for prompt in PROMPTS[:samples]:
            found = llm.generate(prompt, decoder="superposed", n=3, max_tokens=LIMIT)
            tokens = sum(len(one.tokens) for one in found.samples)
            shares.append((found.stats.rows - len(prompt)) / tokens)
    return float(np.mean(shares)) - 1.0
