"""Oracle test of ead (Simonds, arXiv:2502.06833): which model writes each token, replayed from the
texts alone, and the texts of each model at both ends of the threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import PROMPTS
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise


def bits(logits: np.ndarray) -> float:
    """The entropy of the next token."""
    logs = log_softmax(logits)
    return float(-(np.exp(logs) * logs).sum() / np.log(2))


def uneven_script(seed: int) -> Any:
    """Logits that are clear after some tokens and flat after others."""
    script = ScriptedModel(seed=seed).script

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        spread = np.random.default_rng([seed, *seen[-2:]]).uniform(0.5, 6.0)
        return np.asarray(spread * np.asarray(script(seen)), np.float32)

    return logits


def uneven_models() -> tuple[ScriptedModel, ScriptedModel]:
    """A large and a small model of which each is sometimes uncertain."""
    return ScriptedModel(uneven_script(4)), ScriptedModel(uneven_script(5))


def replay(
    large: ScriptedModel,
    small: ScriptedModel,
    prompt: list[int],
    limit: int,
    *,
    seed: int | None = None,
    threshold: float = 1.5,
    window: int = 5,
    dwell: int = 4,
    clears: bool = False,
) -> tuple[list[int], list[bool]]:
    """The text, and which of its tokens the large model wrote. Greedy without a seed."""
    text, by_large = list(prompt), list[bool]()
    recent: list[float] = []
    last_switch: int | None = None
    is_large = False
    for step in range(limit):
        recent.append(bits(logits_after(large if is_large else small, text)))
        uncertain = float(np.mean(recent[-window:])) > threshold
        may = last_switch is None or step - last_switch >= dwell
        if uncertain != is_large and may:
            is_large, last_switch = uncertain, step
            recent = [] if clears else recent
        row = logits_after(large if is_large else small, text).astype(np.float64)
        if seed is not None:
            row = row + Noise(seed).gumbel(range(len(row)), len(text))
        text.append(int(row.argmax()))
        by_large.append(is_large)
    return text[len(prompt) :], by_large


@oracle_test("ead")
def ead() -> Iterator[Check]:
    """The replays, the ends, and the passes of both models."""
    large, small = uneven_models()
    settings: dict[str, dict[str, Any]] = {
        "ead": {},
        "ead:threshold=0.7,min_tokens=1": {"threshold": 0.7, "dwell": 1},
        "ead:window=2,min_tokens=9": {"window": 2, "dwell": 9},
        "ead:clear=true,min_tokens=2": {"clears": True, "dwell": 2},
    }
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    with LLM(large, tokenizer=ByteTokenizer(), draft=small) as llm:
        for decoder, values in settings.items():
            wrong, switches = 0, 0
            for prompt in PROMPTS:
                ids = list(prompt.encode())
                expected, by_large = replay(large, small, ids, 60, **values)
                found = llm.generate(prompt, decoder=decoder, **options)
                wrong += found.tokens != expected
                switches += int(np.diff(by_large).astype(bool).sum())
                sampled, _ = replay(large, small, ids, 60, seed=7, **values)
                found = llm.generate(prompt, decoder=decoder, temperature=1.0, seed=7, **options)
                wrong += found.tokens != sampled
            detail = f"{wrong} of {2 * len(PROMPTS)} wrong, {switches} switches"
            yield Check(f"{decoder} equals its replay", wrong == 0 and switches > 3, detail)
    ends = {"threshold=-1": large, "threshold=64": small}
    for parameter, model in ends.items():
        with (
            LLM(large, tokenizer=ByteTokenizer(), draft=small) as both,
            LLM(model, tokenizer=ByteTokenizer()) as alone,
        ):
            for temperature in (0.0, 0.9):
                options["temperature"], options["seed"] = temperature, 3
                yield equal_tokens(
                    f"{parameter} is one model's text, T={temperature}",
                    [both.generate(p, decoder=f"ead:{parameter}", **options).tokens
                     for p in PROMPTS],
                    [alone.generate(p, decoder="autoregressive", **options).tokens
                     for p in PROMPTS],
                )  # fmt: skip


def loss_share(key: str, ends: tuple[str, str], samples: int) -> float:
    """How much log-probability under the large model the texts of the method lose against those of
    the large model, as a share of what the texts of the small model lose.

    Args:
        key: The method.
        ends: The builds that are the large and the small model.
        samples: The number of texts.
    """
    large, small = uneven_models()
    means = []
    with LLM(large, tokenizer=ByteTokenizer(), draft=small) as llm:
        for decoder in (ends[0], key, ends[1]):
            total = 0.0
            for number in range(samples):
                prompt = [number, (7 * number) % 251]
                options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
                text = llm.generate(prompt, decoder=decoder, **options).tokens
                seen = [*prompt, *text]
                total += sum(
                    log_softmax(logits_after(large, seen[:i]))[seen[i]] for i in range(2, len(seen))
                )
            means.append(total / (samples * 24))
    best, mixed, worst = means
    return (best - mixed) / (best - worst)


@measure("ead", "share of the small model's loss of log-probability", samples=24, margin=0.8)
def ead_loss(samples: int) -> float:
    """Under the large model."""
    return loss_share("ead", ("ead:threshold=-1", "ead:threshold=64"), samples)
