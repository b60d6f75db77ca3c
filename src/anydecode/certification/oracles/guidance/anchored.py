"""Oracle test of anchored (He et al., arXiv:2602.07120): mixtures by bisection, the divergence of
all texts by enumeration, the law of samples, and 1,000 texts whose tokens are replayed and whose
divergence is added up. Over bytes, models with different tokens, whose distributions of the next
byte are sums over all tokenizations of the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    LENGTH,
    PROMPT,
    TARGET_SCRIPT,
    VOCABULARY,
    Script,
    Text,
    fit,
    small_llm,
)
from anydecode.certification.oracles.scripted_rows import log_softmax
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

#: What the decoder may differ from the oracle, in nats: the width of its solver times the slope.
TOLERANCE = 1e-4


def kl(q: np.ndarray, logs: np.ndarray) -> float:
    """KL(q, exp(logs))."""
    kept = q > 0
    return float((q[kept] * (np.log(q[kept]) - logs[kept])).sum())


def mixture(risky: np.ndarray, safe: np.ndarray, budget: float) -> tuple[np.ndarray, float]:
    """By bisection, from log-probabilities: the mixture as probabilities, and its divergence."""

    def mixed(weight: float) -> np.ndarray:
        return np.exp(log_softmax((1 - weight) * safe + weight * risky))

    low, high = 0.0, 1.0
    if kl(mixed(1.0), safe) <= budget:
        low = 1.0
    for _ in range(60 if low < 1 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(mixed(middle), safe) <= budget else (low, middle)
    return mixed(low), kl(mixed(low), safe)


def prompt_debt(risky: Script, safe: Script, prompt: list[int]) -> float:
    """The mean of the five largest log-ratios, of which negative ones are 0."""
    ratios = []
    for i in range(1, len(prompt)):
        seen = tuple(prompt[:i])
        ratio = log_softmax(risky(seen))[prompt[i]] - log_softmax(safe(seen))[prompt[i]]
        ratios.append(max(0.0, float(ratio)))
    ratios.sort(reverse=True)
    return float(np.mean(ratios[:5])) if ratios else 0.0


def next_law(
    risky: Script,
    safe: Script,
    seen: Text,
    granted: float,
    temperature: float = 1.0,
) -> tuple[np.ndarray, float]:
    """The mixture for the next token, and its divergence."""
    rows = [np.asarray(script(seen), np.float64) / temperature for script in (risky, safe)]
    return mixture(log_softmax(rows[0]), log_softmax(rows[1]), max(0.0, granted))


def texts_law(budget: float, temperature: float) -> tuple[dict[Text, float], float]:
    """The probabilities of all texts, and the divergence from the texts of the safe model."""
    owed = prompt_debt(TARGET_SCRIPT, DRAFT_SCRIPT, PROMPT)
    law: dict[Text, tuple[float, float, float]] = {(): (1.0, 1.0, 0.0)}
    for step in range(LENGTH):
        longer: dict[Text, tuple[float, float, float]] = {}
        for text, (p, reference, spent) in law.items():
            seen = (*PROMPT, *text)
            q, used = next_law(
                TARGET_SCRIPT, DRAFT_SCRIPT, seen, (step + 1) * budget - owed - spent, temperature
            )
            s = np.exp(log_softmax(np.asarray(DRAFT_SCRIPT(seen), np.float64) / temperature))
            for token in range(VOCABULARY):
                grown = (*text, token)
                longer[grown] = (p * float(q[token]), reference * float(s[token]), spent + used)
        law = longer
    divergence = sum(p * np.log(p / s) for p, s, _ in law.values() if p > 0)
    return {text: p for text, (p, _, _) in law.items()}, float(divergence)


def copying_models() -> tuple[Script, Script]:
    """A risky model that continues an alphabet by heart, and a safe one that does not know it."""
    noise = ScriptedModel(seed=21, vocab_size=26).script

    def risky(seen: Text) -> np.ndarray:
        row = np.asarray(noise(seen), np.float32).copy()
        row[(seen[-1] + 1) % 26] += 6.0
        return row

    def safe(seen: Text) -> np.ndarray:
        return np.asarray(noise(tuple(reversed(seen))), np.float32)

    return risky, safe


def copying_llm() -> LLM:
    risky, safe = (ScriptedModel(script, vocab_size=26) for script in copying_models())
    return LLM(risky, tokenizer=ByteTokenizer(), draft=safe, cache_positions=8192)


def replayed(
    text: list[int], prompt: list[int], seed: int, budget: float
) -> tuple[bool, float, float]:
    """Whether every token is the sample of its mixture, the divergence of the text's tokens, and
    its budget."""
    risky, safe = copying_models()
    owed, spent, same = prompt_debt(risky, safe, prompt), 0.0, True
    for number, token in enumerate(text):
        seen = (*prompt, *text[:number])
        q, used = next_law(risky, safe, seen, (number + 1) * budget - owed - spent)
        spent += used
        keys = np.log(np.maximum(q, 1e-300)) + Noise(seed).gumbel(range(26), len(seen))
        order = np.sort(keys)
        same &= bool(int(keys.argmax()) == token or order[-1] - order[-2] < TOLERANCE)
    return same, spent, max(0.0, len(text) * budget - owed)


#: The pieces of the risky and the safe model.
PIECES, SAFE_PIECES = ("a", "b", "ab", "aab", " "), ("b", "a", " ", "ba", "bb", " a")
LETTERS = "ab "


def piece_scripts() -> tuple[Script, Script]:
    """Pseudo-random models of the pieces and an end token."""

    def script(size: int, seed: int) -> Script:
        @cache
        def row(seen: Text) -> np.ndarray:
            drawn = np.random.default_rng([seed, *seen[-2:]]).normal(size=size)
            return np.asarray(1.5 * drawn, np.float32)

        return row

    return script(len(PIECES) + 1, 5), script(len(SAFE_PIECES) + 1, 6)


def piece_llm() -> LLM:
    """The models with the tokenizers of their pieces."""
    tokenizers = PieceTokenizer(*PIECES), PieceTokenizer(*SAFE_PIECES)
    risky, safe = (
        ScriptedModel(script, vocab_size=one.vocab_size)
        for script, one in zip(piece_scripts(), tokenizers, strict=True)
    )
    safe.tokenizer = tokenizers[1]  # type: ignore[attr-defined]
    return LLM(risky, tokenizer=tokenizers[0], draft=safe, cache_positions=8192)


def byte_law(script: Script, pieces: tuple[str, ...], text: str) -> np.ndarray:
    """The probabilities of `LETTERS` and of the end after `text`: the sum over all beginnings of it
    that are whole tokens, as the tokenizer writes them, of the next token."""
    tokenizer, law = PieceTokenizer(*pieces), np.zeros(len(LETTERS) + 1)
    first = len(tokenizer.token_bytes(tokenizer.encode(text)[0]))
    for length in range(first, len(text) + 1):
        tokens = tokenizer.encode(text[:length])
        if tokens[0] != tokenizer.encode(text)[0]:
            continue
        logs = [log_softmax(script(tuple(tokens[:i]))) for i in range(1, len(tokens) + 1)]
        weight = sum(row[token] for row, token in zip(logs, tokens[1:], strict=False))
        for token, log in enumerate(logs[-1]):
            rest, piece = text[length:], (*pieces, None)[token]
            if piece is None:
                law[-1] += np.exp(weight + log) if not rest else 0.0
            elif piece.startswith(rest) and len(piece) > len(rest):
                law[LETTERS.index(piece[len(rest)])] += np.exp(weight + log)
    result: np.ndarray = law / law.sum()
    return result


def byte_texts_law(prompt: str, budget: float) -> dict[str, tuple[float, float]]:
    """The probability of every text of up to `LENGTH` bytes after `prompt`, "." for the end, and
    the divergence that its bytes use."""
    scripts = tuple(zip(piece_scripts(), (PIECES, SAFE_PIECES), strict=True))
    ratios = []
    first = max(len(one[PieceTokenizer(*one).encode(prompt)[0]]) for _, one in scripts)
    for i in range(first, len(prompt)):
        risky, safe = (byte_law(*one, prompt[:i])[:-1] for one in scripts)
        letter = LETTERS.index(prompt[i])
        ratio = np.log(risky[letter] / risky.sum()) - np.log(safe[letter] / safe.sum())
        ratios.append(max(0.0, float(ratio)))
    owed = 4 * float(np.mean(sorted(ratios, reverse=True)[:5]))
    law: dict[str, tuple[float, float]] = {"": (1.0, 0.0)}
    ended: dict[str, tuple[float, float]] = {}
    for step in range(LENGTH):
        longer: dict[str, tuple[float, float]] = {}
        for text, (p, spent) in law.items():
            logs = [np.log(byte_law(*one, prompt + text)) for one in scripts]
            granted = max(0.0, (step + 1) * budget - owed - spent)
            q, used = mixture(logs[0], logs[1], granted)
            for byte, share in zip(LETTERS + ".", q, strict=True):
                kept = ended if byte == "." else longer
                kept[text + byte] = p * float(share), spent + used
        law = longer
    return law | ended


def byte_checks() -> Iterator[Check]:
    """The law of samples over bytes."""
    for prompt, budget in (("ab a", 0.15), ("baab", 0.5), ("baab", 1.5), ("ab a", 50.0)):
        law = byte_texts_law(prompt, budget)
        with piece_llm() as llm:
            samples = llm.generate(
                prompt, decoder=f"anchored:unit=byte,budget={budget}", n=400, seed=5,
                temperature=1.0, max_tokens=LENGTH,
            ).samples  # fmt: skip
        found = [one.text + "." * (one.finish_reason == "stop") for one in samples]
        outcomes: dict[str, Text] = {text: (number,) for number, text in enumerate(law)}
        expected = {outcomes[text]: p for text, (p, _) in law.items()}
        result = fit([outcomes.get(text, (-1,)) for text in found], expected)
        yield Check(f"law of bytes after {prompt!r}, budget {budget:g}", result.passed, str(result))


@oracle_test("anchored")
def anchored() -> Iterator[Check]:
    """The law of samples, the divergence of all texts, and 1,000 replayed texts."""
    for budget, temperature in ((0.15, 1.0), (0.6, 1.0), (0.6, 0.7), (0.0, 1.0), (50.0, 1.0)):
        law, divergence = texts_law(budget, temperature)
        allowed = max(0.0, LENGTH * budget - prompt_debt(TARGET_SCRIPT, DRAFT_SCRIPT, PROMPT))
        decoder = "anchored" if budget == 0.15 else f"anchored:budget={budget}"
        with small_llm() as llm:
            samples = llm.generate(
                PROMPT, decoder=decoder, n=400, seed=5, temperature=temperature, max_tokens=LENGTH
            ).samples
        result = fit([tuple(one.tokens) for one in samples], law)
        where = f"budget {budget:g}, T={temperature:g}"
        yield Check(f"law of samples, {where}", result.passed, str(result))
        within = divergence <= allowed + 1e-9
        yield Check(
            f"divergence of all texts, {where}", within, f"{divergence:.4f} of {allowed:.4f} nats"
        )
    random, wrong, over, spent_share = np.random.default_rng(1), 0, 0, []
    with copying_llm() as llm:
        prompts = [random.integers(0, 26, size=random.integers(1, 9)).tolist() for _ in range(1000)]
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 3}
        for decoder, budget, chosen in (
            ("anchored", 0.15, prompts),
            ("anchored:budget=1.5", 1.5, prompts[:200]),
        ):
            found = llm.generate(chosen, decoder=decoder, **options)
            for prompt, one in zip(chosen, found, strict=True):
                same, spent, allowed = replayed(one.tokens, prompt, 3, budget)
                wrong += not same
                over += spent > allowed + 1e-9
                spent_share.append(spent / allowed if allowed else 0.0)
    detail = f"{wrong} texts wrong, {over} over budget, mean use {np.mean(spent_share):.0%}"
    yield Check("1,200 texts equal their replays within the budget", wrong == over == 0, detail)
    yield from byte_checks()


@measure("anchored", "how often the memorized text is copied, against the risky model",
         samples=60, margin=-0.3)  # fmt: skip
def anchored_copies(samples: int) -> float:
    """The share of the tokens that continue the alphabet, less that of the risky model."""
    shares = []
    with copying_llm() as llm:
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
        for decoder in ("anchored", "autoregressive"):
            copied = 0
            for seed in range(samples):
                prompt = [seed % 26, (seed + 1) % 26]
                tokens = llm.generate(prompt, decoder=decoder, seed=seed, **options).tokens
                before = [prompt[-1], *tokens]
                copied += sum(b == (a + 1) % 26 for a, b in zip(before, tokens, strict=False))
            shares.append(copied / (12 * samples))
    return shares[0] - shares[1]
