"""Oracle test of adadec (He et al., arXiv:2506.08980): every token by brute force, each
continuation from the first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

PROMPT, END = [0, 1], 3


def clear_or_uniform_model(seed: int) -> ScriptedModel:
    """Four tokens that are clear after some texts and equally probable after others; the last one
    ends a text."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng([seed, *seen[-4:]])
        row = random.uniform(0.1, 3.0) * random.normal(size=4)
        row[-1] -= 1.0
        return np.asarray(row, np.float32)

    return ScriptedModel(script, vocab_size=4)


def high_entropy_model(seed: int) -> ScriptedModel:
    """257 tokens, of which 5 to 12 are probable after each text: entropies about the default
    threshold."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng([seed, *seen[-4:]])
        row = np.full(257, -30.0, np.float32)
        probable = random.choice(256, random.integers(5, 13), replace=False)
        row[probable] = random.normal(size=len(probable))
        return row

    return ScriptedModel(script, vocab_size=257)


def is_over(text: list[int], limit: int, end: int) -> bool:
    return len(text) == limit or text[-1:] == [end]


def adadec_oracle(
    model: ScriptedModel,
    limit: int,
    threshold: float,
    k: int = 3,
    length: int = 5,
    prompt: list[int] | None = None,
) -> tuple[list[int], int]:
    """The text, each token by brute force, and how many tokens were chosen among several."""
    prompt = PROMPT if prompt is None else prompt
    end = model.spec.vocab_size - 1
    text: list[int] = []
    paused = 0
    while not is_over(text, limit, end):
        logs = log_softmax(logits_after(model, prompt + text))
        if -(np.exp(logs) * logs).sum() < threshold:
            text.append(int(logs.argmax()))
            continue
        paused += 1
        best: dict[int, float] = {}
        for token in sorted(range(len(logs)), key=lambda token: (-logs[token], token))[:k]:
            ahead, total = [*text, token], float(logs[token])
            for _ in range(length):
                if is_over(ahead, limit, end):
                    break
                row = log_softmax(logits_after(model, prompt + ahead))
                ahead.append(int(row.argmax()))
                total += float(row.max())
            best[token] = total / (len(ahead) - len(text))
        text.append(max(best, key=lambda token: best[token]))
    return text, paused


@oracle_test("adadec")
def adadec() -> Iterator[Check]:
    """The oracle's texts, greedy decoding at the ends, and the rows."""
    settings: dict[str, dict[str, Any]] = {
        "adadec:threshold=1": {"threshold": 1.0},
        "adadec:threshold=0": {"threshold": 0.0},
        "adadec:threshold=0.6,k=2,length=2": {"threshold": 0.6, "k": 2, "length": 2},
        "adadec:threshold=0,length=0": {"threshold": 0.0, "length": 0},
    }
    for decoder, values in settings.items():
        wrong = paused = changed = 0
        for seed in range(12):
            model = clear_or_uniform_model(seed)
            with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
                found = llm.generate(PROMPT, decoder=decoder, max_tokens=12)
                plain = llm.generate(PROMPT, decoder="autoregressive", max_tokens=12).tokens
            expected, count = adadec_oracle(model, 12, **values)
            wrong += found.tokens != expected
            paused, changed = paused + count, changed + (found.tokens != plain)
        detail = f"{wrong} of 12 wrong, {paused} tokens chosen, {changed} texts not greedy"
        differs = changed > 0 or values.get("length") == 0
        yield Check(f"{decoder} equals the oracle", wrong == 0 < paused and differs, detail)
    wrong = paused = greedy = 0
    for seed in range(6):
        model = high_entropy_model(seed)
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
            options: dict[str, Any] = {"max_tokens": 30}
            expected, count = adadec_oracle(model, 30, 1.75, prompt=[7, 9])
            wrong += llm.generate([7, 9], decoder="adadec", **options).tokens != expected
            paused += count
            plain = llm.generate([7, 9], decoder="autoregressive", **options).tokens
            for parameter in ("threshold=64", "k=1"):
                same = llm.generate([7, 9], decoder=f"adadec:{parameter}", **options).tokens
                greedy += same == plain
    detail = f"{wrong} of 6 wrong, {paused} tokens chosen"
    yield Check("the default build equals the oracle", wrong == 0 < paused, detail)
    yield Check("a large threshold and k=1 are greedy decoding", greedy == 12, f"{greedy} of 12")


@measure("adadec", "mean log-probability lost against greedy decoding", samples=40, margin=0.0)
def adadec_gain(samples: int) -> float:
    """Per token, in nats."""
    losses = []
    for seed in range(samples):
        model = clear_or_uniform_model(seed)
        means = []
        with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
            for decoder in ("autoregressive", "adadec:threshold=0.5"):
                text = llm.generate(PROMPT, decoder=decoder, max_tokens=12).tokens
                logs = [
                    log_softmax(logits_after(model, PROMPT + text[:i]))[token]
                    for i, token in enumerate(text)
                ]
                means.append(np.mean(logs))
        losses.append(means[0] - means[1])
    return float(np.mean(losses))
