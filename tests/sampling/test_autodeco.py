"""AutoDeco: its certificate, mistakes that it rejects, files of heads, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.autodeco import Mixed, random_heads
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling import autodeco
from anydecode.sampling.autodeco import AutoDeco, Heads
from anydecode.sampling.params import SamplingParams
from certificates import assert_certified, assert_rejected
from toy_models import PROMPTS, toy_llm


def import_training() -> Any:
    """The training of AutoDeco's heads; the test is skipped without torch."""
    pytest.importorskip("torch")
    from anydecode.training import autodeco

    return autodeco


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("autodeco")


def test_certificate_rejects_the_parameters_of_the_first_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stale(self: AutoDeco, state: np.ndarray, logits: np.ndarray) -> None:
        self.parameters = self.parameters or self.heads(state, logits)

    monkeypatch.setattr(AutoDeco, "observe_hidden", stale)
    assert_rejected("autodeco")


def test_certificate_rejects_features_without_the_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = autodeco.features
    monkeypatch.setattr(autodeco, "features", lambda logits, temperature: features(logits, 1.0))
    assert_rejected("autodeco")


def test_heads_that_learned_nothing_fail_their_measure() -> None:
    (measure,) = measures_of("autodeco")
    model = Mixed()
    training = import_training()
    gain = training.measure(model, model.rows(500, 2), training.HeadsModule(7, 8))
    assert gain.heads - gain.fixed > measure.margin


def test_autodeco_sets_temperature_and_nucleus_alone() -> None:
    heads = random_heads()
    for other in ({"temperature": 0.7}, {"top_p": 0.9}, {"mirostat": 2}, {"temperature": 0}):
        with pytest.raises(InvalidRequestError, match="autodeco"):
            SamplingParams(autodeco=heads, **other)


def test_uncaptured_hidden_states_do_not_affect_drafts() -> None:
    """Early-exit rows pass no hidden states to the sampler, without an error."""
    heads = random_heads()
    options = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    options["sampler"] = catalogue.build("autodeco", heads=heads)
    with toy_llm() as llm:
        plain = llm.generate(PROMPTS, **options)
        for decoder in ("layerskip", "pearl", "awrs", "s2d"):
            try:
                found = llm.generate(PROMPTS, decoder=decoder, **options)
            except UnsupportedCombinationError:
                continue
            if decoder != "awrs":
                assert [one.tokens for one in found] == [one.tokens for one in plain]


class TestHeads:
    def test_files_that_are_none(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        (tmp_path / "torn").write_bytes(b"\x08")
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / "other")
        tensors = random_heads().tensors()
        tensors["top_p_head.mlp.0.weight"] = np.zeros((5, 4), np.float32)
        save_file(tensors, tmp_path / "crooked")
        for name in ("torn", "other", "crooked", "absent"):
            with pytest.raises(CheckpointError, match="autodeco heads") as caught:
                Heads.load(tmp_path / name)
            assert "\n" not in str(caught.value)

    def test_the_learner_and_the_engine_agree(self) -> None:
        torch = pytest.importorskip("torch")
        torch.manual_seed(1)
        learner = import_training().HeadsModule(6, 9)
        for part in learner.parameters():
            torch.nn.init.normal_(part, std=0.5)
        rows, logits = torch.randn(5, 6), 3 * torch.randn(5, 40)
        temperatures = learner.temperature(rows)
        edges = learner.top_p(rows, logits, temperatures)
        heads = learner.heads()
        for row in range(5):
            found = heads(rows[row].numpy(), logits[row].numpy())
            assert found == pytest.approx((temperatures[row].item(), edges[row].item()), abs=1e-5)

    def test_heads_are_trained_on_a_models_own_text(self, tmp_path: Path) -> None:
        training = import_training()
        recipe = training.AutoDecoRecipe(prompts=6, samples=2, tokens=6, width=3, epochs=2, batch=8)
        with toy_llm() as llm:
            learner, gain = training.train_autodeco(llm, recipe)
            given, _ = training.train_autodeco(llm, recipe, ["abc", "de"])
            learner.heads().save(tmp_path / "heads.safetensors")
            named = f"autodeco:heads={tmp_path / 'heads.safetensors'}"
            answers = llm.generate(PROMPTS, decoder=named, max_tokens=5, seed=1)
            with pytest.raises(InvalidRequestError, match="at least two prompts"):
                training.train_autodeco(llm, recipe, ["abc"])
        assert gain.rows > 0 and np.isfinite(gain.heads) and "held-out" in gain.summary()
        assert given.heads().temperature.inner.shape == (3, 4)
        assert all(answer.tokens for answer in answers)

    def test_the_heads_that_come_along_fit_the_default_model(self) -> None:
        heads = autodeco.default_heads()
        heads.check(576)
        rng = np.random.default_rng(0)
        for _ in range(5):
            state = rng.normal(size=576).astype(np.float32)
            temperature, top_p = heads(state, rng.normal(0, 3, 2000).astype(np.float32))
            assert 0 < temperature < 2 and 0 < top_p <= 1
