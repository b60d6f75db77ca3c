"""Oracle test of foreal (Li et al., arXiv:2506.06998): which model writes each token, replayed from
the texts alone, and the texts of each model at both ends of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens, measure, oracle_test
from anydecode.certification.oracles.depth.ead import loss_share
from anydecode.certification.oracles.scripted_rows import logits_after
from anydecode.certification.oracles.search.beam import PROMPTS
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

_ENDED = re.compile(rb"[?!\n]|(?<![0-9])\.")
LETTERS = b"abc12.. ?\n"


def sentence_models() -> tuple[ScriptedModel, ScriptedModel]:
    """A large and a small model that write short sentences and numbers."""

    def model(seed: int) -> ScriptedModel:
        def script(seen: tuple[int, ...]) -> np.ndarray:
            row = np.full(259, -30.0, np.float32)
            drawn = np.random.default_rng([seed, *seen[-3:]]).normal(size=len(LETTERS))
            row[list(LETTERS)] = drawn
            return row

        return ScriptedModel(script)

    return model(1), model(2)


def replay(
    large: ScriptedModel,
    small: ScriptedModel,
    prompt: list[int],
    limit: int,
    *,
    seed: int,
    temperature: float = 0.0,
    lead: int = 15,
    probability: float = 1.0,
) -> tuple[list[int], list[bool]]:
    """The text, and which of its tokens the large model wrote."""
    noise, coins = Noise(seed), Noise(seed).with_purpose("coin")
    written: list[int] = []
    by_large: list[bool] = []
    for position in range(len(prompt), len(prompt) + limit):
        ends = [match.end() for match in _ENDED.finditer(bytes(written))]
        start = ends[-1] if ends else 0
        led = coins.coin(len(prompt) + start) < probability
        by_large.append(led and len(written) - start < lead)
        row = logits_after(large if by_large[-1] else small, prompt + written).astype(np.float64)
        if temperature:
            row = row / temperature + noise.gumbel(range(len(row)), position)
        written.append(int(row.argmax()))
    return written, by_large


@oracle_test("foreal")
def foreal() -> Iterator[Check]:
    """The replays, the ends, and the passes of the large model."""
    large, small = sentence_models()
    settings: dict[str, dict[str, Any]] = {
        "foreal": {},
        "foreal:lead=3": {"lead": 3},
        "foreal:lead=2,probability=0.5": {"lead": 2, "probability": 0.5},
    }
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 5}
    with LLM(large, tokenizer=ByteTokenizer(), draft=small) as llm:
        for decoder, values in settings.items():
            wrong = led = total = 0
            for prompt in PROMPTS:
                for temperature in (0.0, 1.0, 3.0):
                    expected, by_large = replay(
                        large, small, list(prompt.encode()), 80, seed=5, temperature=temperature,
                        **values,
                    )  # fmt: skip
                    found = llm.generate(
                        prompt, decoder=decoder, temperature=temperature, **options
                    )
                    wrong += found.tokens != expected or found.stats.passes != sum(by_large)
                    led, total = led + sum(by_large), total + len(by_large)
            detail = f"{wrong} of 9 wrong, the large model wrote {led} of {total}"
            yield Check(f"{decoder} equals its replay", wrong == 0 < led < total, detail)
    ends = {"lead=4096": large, "lead=0": small, "probability=0": small}
    for parameter, model in ends.items():
        with (
            LLM(large, tokenizer=ByteTokenizer(), draft=small) as both,
            LLM(model, tokenizer=ByteTokenizer()) as alone,
        ):
            for temperature in (0.0, 1.5):
                options["temperature"] = temperature
                yield equal_tokens(
                    f"{parameter} is one model's text, T={temperature}",
                    [both.generate(p, decoder=f"foreal:{parameter}", **options).tokens
                     for p in PROMPTS],
                    [alone.generate(p, decoder="autoregressive", **options).tokens
                     for p in PROMPTS],
                )  # fmt: skip


@measure("foreal", "share of the small model's loss of log-probability", samples=24, margin=0.8)
def foreal_loss(samples: int) -> float:
    """Under the large model."""
    return loss_share("foreal", ("foreal:lead=4096", "foreal:lead=0"), samples)
