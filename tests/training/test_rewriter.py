"""The rewriter of P-Aligner: found rewritings, its losses, and a rewriter that is trained and
used."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode.api.llm import LLM
from anydecode.certification.oracles.search.p_aligner import INSTRUCTION, writing_model
from anydecode.decoders.search.p_aligner import PAligner
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.models.scripted import ByteTokenizer
from anydecode.training.rewriter import (
    RewriterRecipe,
    RewriterRun,
    Rewriting,
    search_rewritings,
)
from interrupted_runs import trained

NAMES = ("Ada", "Leo", "Ben", "Sam")


def rewritings(count: int = 64) -> list[Rewriting]:
    """The better rewriting of a name says it twice, the worse one says another."""
    random = Random(0)
    found = []
    for _ in range(count):
        name, other = random.sample(NAMES, 2)
        found.append(Rewriting(f"copy {name}", f"copy {name} {name}", f"copy {other}"))
    return found


def rewriter_run(folder: Path, **options: Any) -> RewriterRun:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = RewriterRecipe(**{"rank": 4, "batch": 4, **options})
    return RewriterRun(checkpoint, folder, recipe, rewritings)


def test_searches_give_the_best_and_the_worst_rewriting() -> None:
    def reward(prompt: str, texts: list[str]) -> list[float]:
        return [text.count("a") / max(1, len(text)) for text in texts]

    method = PAligner(4, 2, reward)
    with LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        found = search_rewritings(llm, [INSTRUCTION] * 2, method, max_tokens=12, seed=3)
        same = search_rewritings(
            llm, [INSTRUCTION], PAligner(2, 1, lambda prompt, texts: [1.0] * len(texts)),
            max_tokens=12,
        )  # fmt: skip
        with_search = llm.generate(INSTRUCTION, decoder=method, max_tokens=12, seed=3)
        with_best = llm.generate(found[0].better, decoder="autoregressive", max_tokens=12)
    assert found[0].text == INSTRUCTION and found[0].worse not in (None, found[0].better)
    assert with_search.tokens == with_best.tokens
    assert same == [Rewriting(INSTRUCTION, INSTRUCTION, None)]


@pytest.mark.slow
def test_preferences_begin_where_the_model_stands(tmp_path: Path) -> None:
    run = rewriter_run(tmp_path, steps=1, beta=0.5)
    pairs = [pair for pair in run.preferred[:3] if pair is not None]
    margins = run.margins(pairs).detach()
    for pair, margin in zip(pairs, margins, strict=True):
        better, worse = (run.log_probabilities([one]).detach() for one in pair)
        assert float(better - worse) == pytest.approx(float(margin), abs=1e-3)
    assert float(run.preference_loss(pairs, margins).detach()) == pytest.approx(
        math.log(2), abs=1e-5
    )
    expected = -torch.log(torch.sigmoid(0.5 * (margins + 2.0))).mean()
    found = run.preference_loss(pairs, torch.full((3,), -2.0)).detach()
    assert float(found) == pytest.approx(float(expected), abs=1e-4)


def test_malformed_recipes_and_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="preferring from 0 to 1"):
        RewriterRecipe(steps=1, preferring=2.0)
    checkpoint, recipe = load_checkpoint("tiny-autoregressive"), RewriterRecipe(steps=1)
    with pytest.raises(InvalidRequestError, match="at least 2 rewritten"):
        RewriterRun(checkpoint, tmp_path, recipe, lambda: rewritings(1))
    long = Rewriting("a", "copy " + "Ada " * 600, None)
    with pytest.raises(InvalidRequestError, match="are allowed"):
        RewriterRun(checkpoint, tmp_path, recipe, lambda: [long, long])


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 4, "preferring": 0.5}
    whole = trained(rewriter_run(tmp_path / "a", **options))
    with pytest.raises(KeyboardInterrupt):
        trained(rewriter_run(tmp_path / "b", **options), stop=3)
    resumed = trained(rewriter_run(tmp_path / "b", **options))
    assert resumed.evaluate() == whole.evaluate() and resumed.reference == whole.reference
    with pytest.raises(InvalidRequestError, match="another rank or model"):
        rewriter_run(tmp_path / "b", steps=4, rank=8)


@pytest.mark.slow
def test_a_trained_rewriter_rewrites_at_once(tmp_path: Path) -> None:
    run = trained(rewriter_run(tmp_path, steps=150, rate=1e-2, batch=8, rank=8))
    losses = [entry["held_out"] for entry in run.history if "held_out" in entry]
    assert losses[-1]["loss"] < 0.3 * losses[0]["loss"] and losses[-1]["preferred"] == 1.0
    with LLM("tiny-autoregressive", draft=tmp_path) as llm:
        for name in NAMES:
            options: dict[str, Any] = {"max_tokens": 12, "seed": 1}
            found = llm.generate(f"copy {name}", decoder="p-aligner:trained=true", **options)
            plain = llm.generate(f"copy {name} {name}", decoder="autoregressive", **options)
            assert found.tokens == plain.tokens
