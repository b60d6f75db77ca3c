"""Oracle test of foreal (Li et al., arXiv:2506.06998): which model writes each token, replayed from
the texts alone, and the texts of each model at both ends of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens, measure, oracle_test
from anydecode.certification.oracles.depth.ead import loss_share
from anydecode.certification.oracles.scripted_rows import logits_after
from anydecode.certification.oracles.search.beam import PROMPTS
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

_ENDED = re.compile(rb"(?:[?!\n]|(?<![0-9])\.)\Z")
LETTERS = b"abc12.. ?!\n"
#: Tokens of several bytes: marks within and at the end of tokens, numbers, and two-byte letters.
PIECES = ("a", "1", ".", "é", "b.", "2.", "c!", "! a", "?\n", "é?", "\n\n", "3.1", "...")


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


def piece_models() -> tuple[ScriptedModel, ScriptedModel]:
    """A large and a small model of `PIECES` and an end token, which they never generate."""

    def model(seed: int) -> ScriptedModel:
        def script(seen: tuple[int, ...]) -> np.ndarray:
            row = np.random.default_rng([seed, *seen[-3:]]).normal(size=len(PIECES) + 1)
            row[[0, 1, 3, 11]] += 2.0  # those without a mark, so that some sentences are long
            row[-1] = -30.0
            return row.astype(np.float32)

        return ScriptedModel(script, vocab_size=len(PIECES) + 1)

    return model(1), model(2)


def replay(
    large: ScriptedModel,
    small: ScriptedModel,
    prompt: list[int],
    limit: int,
    pieces: Seq[bytes],
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
    start = 0
    for position in range(len(prompt), len(prompt) + limit):
        text = b"".join(pieces[token] for token in prompt + written)
        if written and _ENDED.search(text):
            start = len(written)
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
    settings: dict[str, dict[str, Any]] = {
        "foreal": {},
        "foreal:lead=3": {"lead": 3},
        "foreal:lead=2,probability=0.5": {"lead": 2, "probability": 0.5},
    }
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 5}
    letters = [bytes([byte]) for byte in range(256)]
    large, small = sentence_models()
    llm = LLM(large, tokenizer=ByteTokenizer(), draft=small)
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    yield from _replays(llm, (large, small), letters, prompts, settings, options)
    pieces = [piece.encode() for piece in PIECES]
    llm = LLM(piece_models()[0], tokenizer=PieceTokenizer(*PIECES), draft=piece_models()[1])
    yield from _replays(llm, piece_models(), pieces, [[0], [3, 1], [4, 5]], settings, options)
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


def _replays(
    llm: LLM,
    models: tuple[ScriptedModel, ScriptedModel],
    pieces: Seq[bytes],
    prompts: list[list[int]],
    settings: dict[str, dict[str, Any]],
    options: dict[str, Any],
) -> Iterator[Check]:
    """Compares the texts of `llm`, which is closed, with their replays."""
    large, small = models
    with llm:
        for decoder, values in settings.items():
            wrong = led = total = 0
            for prompt in prompts:
                for temperature in (0.0, 1.0, 3.0):
                    expected, by_large = replay(
                        large, small, prompt, 80, pieces, seed=5, temperature=temperature, **values
                    )
                    found = llm.generate(
                        prompt, decoder=decoder, temperature=temperature, **options
                    )
                    wrong += found.tokens != expected or found.stats.passes != sum(by_large)
                    led, total = led + sum(by_large), total + len(by_large)
            detail = f"{wrong} of {3 * len(prompts)} wrong, the large model wrote {led} of {total}"
            longest = max(map(len, pieces))
            name = f"{decoder} equals its replay, tokens of up to {longest} bytes"
            yield Check(name, wrong == 0 < led < total, detail)


@measure("foreal", "share of the small model's loss of log-probability", samples=24, margin=0.8)
def foreal_loss(samples: int) -> float:
    """Under the large model."""
    return loss_share("foreal", ("foreal:lead=4096", "foreal:lead=0"), samples)
