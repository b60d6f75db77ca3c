"""DGLM: its certificate, mistakes that the certificate rejects, its parts and its options."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.oracles.guidance.dglm import classifier
from anydecode.certification.tiny import tiny_model
from anydecode.certification.tiny_sentence import (
    NUM_ROWS,
    random_parts,
    sentence_diffusion_model,
    tiny_encoder,
)
from anydecode.decoders.guidance import dglm
from anydecode.decoders.guidance.dglm import Dglm, signal_level
from anydecode.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.sentence_diffusion import (
    FILE_NAME,
    LEVEL_SCALE,
    NUM_WAVES,
    EmbeddingClassifier,
    ResidualMlp,
    SentenceDiffusion,
)
from anydecode.sampling.noise import Noise
from certificates import assert_certified, assert_rejected, replace_class_default

OPTIONS: dict[str, Any] = {"decoder": "dglm:steps=5", "max_tokens": 8, "ignore_eos": True}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dglm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [{"steps": 200}, {"level": 0.9}, {"variance": 0.0}, {"prompt_scale": 2.0}, {"sampler": "ddim"}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Dglm, name, value)
    assert_rejected("dglm")


def flat_gradient(method: Dglm, parts: SentenceDiffusion, points: np.ndarray) -> np.ndarray:
    """The gradient of the mean point alone, not brought to length 1."""
    [(_, probe, _)] = method.classifiers[:1]
    logit = float(probe.logits(points.mean(0) * parts.deviation + parts.mean))
    return -parts.deviation * probe.weight * (1 - math.tanh(logit / 2)) / 2


GRADIENT = Dglm._gradient


def first_gradient(method: Dglm, *given: Any) -> np.ndarray:
    """The gradient of the first classifier alone."""
    one = copy(method)
    one.classifiers = method.classifiers[:1]
    return GRADIENT(one, *given)


PREDICTED = Dglm._predicted


def guided_without_spread(self: Dglm, *given: Any) -> tuple[np.ndarray, np.ndarray]:
    """The gradient is not multiplied by the deviation of the noise."""
    parts, state, context, level, noise, step = given
    plain, found = Dglm(), PREDICTED(self, *given)[1]
    plain.prompt_scale = self.prompt_scale
    added = PREDICTED(plain, *given)[1]
    spread = math.sqrt(1 - level)
    added = added + (found - added) / spread
    return (state - spread * added) / math.sqrt(level), added


def unread_prompt(sequence: Any) -> Any:
    yield from ()
    return dglm._parts(sequence.model()).unconditional


SOFT_PROMPT = SentenceDiffusion.soft_prompt
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "fewer points": (dglm, "NUM_POINTS", 8),
    "a linear schedule": (dglm, "signal_level", lambda time: 1e-9 + (1 - 2e-9) * (1 - time)),
    "a gradient of one point": (Dglm, "_gradient", flat_gradient),
    "one of several classifiers": (Dglm, "_gradient", first_gradient),
    "a gradient that does not fall with the noise": (Dglm, "_predicted", guided_without_spread),
    "a prompt that is not read": (dglm, "_prompt_embedding", unread_prompt),
    "a soft prompt of noise": (
        SentenceDiffusion,
        "soft_prompt",
        lambda parts, noisy, level, size: SOFT_PROMPT(parts, 0 * noisy, level, size),
    ),
    "a level that is not told": (
        SentenceDiffusion,
        "soft_prompt",
        lambda parts, noisy, level, size: SOFT_PROMPT(parts, noisy, 1.0, size),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_certificate_rejects(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    assert_rejected("dglm")


def test_gradients_equal_differences() -> None:
    network: ResidualMlp = random_parts(tiny_model()).denoiser
    random = np.random.default_rng(0)
    inputs, by_output = random.normal(size=80), random.normal(size=24)
    _, pull_back = network.linearized(inputs)
    found = pull_back(by_output)
    for index in range(0, 80, 9):
        step = np.zeros(80)
        step[index] = 1e-6
        difference = (network(inputs + step) - network(inputs - step)) @ by_output / 2e-6
        assert abs(found[index] - difference) < 1e-6


class GaussianDenoiser:
    """The right velocity for normed embeddings around `centre` with variance 1."""

    def __init__(self, centre: np.ndarray) -> None:
        self.centre = centre

    def linearized(self, inputs: np.ndarray) -> tuple[np.ndarray, Callable[..., np.ndarray]]:
        slowest = LEVEL_SCALE * 1e-4
        level = math.asin(inputs[2 * len(self.centre) + NUM_WAVES - 1]) / slowest
        velocity = -math.sqrt(max(0.0, 1 - level)) * self.centre
        return velocity, lambda gradient: np.zeros_like(inputs)


def gaussian_parts(centre: np.ndarray) -> SentenceDiffusion:
    ones, nothing = np.ones(len(centre)), ResidualMlp({})
    denoiser: Any = GaussianDenoiser(centre)
    return SentenceDiffusion(denoiser, nothing, 0 * ones, 0.001 * ones, ones, "")


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_proposals_have_the_known_mean(sampler: str) -> None:
    """Embeddings of the Gaussian at (1000, 1, -2), seen from the origin: (1, .001, -.002)."""
    parts = gaussian_parts(np.array([1000.0, 1.0, -2.0]))
    method = Dglm(30, sampler=sampler)
    proposals = [method.proposal(parts, np.zeros(3), Noise(seed)) for seed in range(60)]
    mean = 1000 * np.mean(proposals, 0)
    assert np.abs(mean[1:] - [1.0, -2.0]).max() < 5 / math.sqrt(60)


@pytest.mark.parametrize("option", ["classifier", "without"])
@pytest.mark.parametrize("estimate", ["loss", "probability"])
def test_the_guidance_has_the_sign_of_the_attribute(
    tmp_path: Path, option: str, estimate: str
) -> None:
    EmbeddingClassifier(np.array([0.0, 500.0, 0.0]), 0.0).save(tmp_path / "file")
    parts = gaussian_parts(np.array([1000.0, 0.0, 0.0]))
    options: dict[str, Any] = {option: tmp_path / "file", "estimate": estimate}
    plain = Dglm(20).proposal(parts, np.zeros(3), Noise(1))
    method = Dglm(20, guidance=1.0, **options)
    change = method.proposal(parts, np.zeros(3), Noise(1)) - plain
    assert change[1] > 0 if option == "classifier" else change[1] < 0
    assert abs(change[1]) > 10 * abs(change[2])


def test_several_classifiers_lead_at_once(tmp_path: Path) -> None:
    """One attribute is wanted in each of two directions, and one not wanted in a third."""
    names = ("a", "b", "a+b")
    for name, weight in zip(names, 500 * np.eye(4)[1:], strict=True):
        EmbeddingClassifier(weight, 0.0).save(tmp_path / name)
    parts = gaussian_parts(np.array([1000.0, 0.0, 0.0, 0.0]))
    context, files = np.zeros(4), f"{tmp_path / 'a'}+{tmp_path / 'b'}"
    method = Dglm(20, guidance=1.0, classifier=files, without=str(tmp_path / "a+b"))
    change = method.proposal(parts, context, Noise(1)) - Dglm(20).proposal(parts, context, Noise(1))
    assert change[1] > 0 and change[2] > 0 > change[3]


def test_levels_fall_with_time() -> None:
    levels = [signal_level(time) for time in (0.0, 0.25, 0.5, 1.0)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > 1 - 1e-8 and abs(levels[2] - 0.5) < 1e-9 and 0 < levels[3] < 1e-8


def test_a_proposal_that_is_all_noise_does_not_change_the_text() -> None:
    with sentence_diffusion_model() as llm:
        texts = {
            tuple(llm.generate("abc", **{**OPTIONS, "decoder": decoder}, seed=2).tokens)
            for decoder in ("dglm:steps=5,level=0", "dglm:steps=5,level=0,prompt_scale=0")
        }
    assert len(texts) == 1


def test_requests_with_the_same_prompt_have_their_own_soft_prompts() -> None:
    """Rows behind a soft prompt are not shared; those of the prompt are."""
    prompt = "a prompt of several blocks of the cache " * 2
    with sentence_diffusion_model() as llm:
        first = [llm.generate(prompt, **OPTIONS, seed=seed) for seed in (1, 2, 1)]
    with sentence_diffusion_model() as llm:
        alone = llm.generate(prompt, **OPTIONS, seed=2)
    assert first[0].tokens == first[2].tokens != first[1].tokens == alone.tokens
    assert first[1].stats.num_cached_tokens > 0


def test_log_probabilities_and_samples() -> None:
    with sentence_diffusion_model() as llm:
        found = llm.generate("abc", **OPTIONS, n=2, temperature=1.0, seed=1, logprobs=0)
    assert len(found.logprobs or ()) == 8
    assert found.samples[0].tokens != found.samples[1].tokens


def test_parts_are_read_with_the_model(tmp_path: Path) -> None:
    parts = random_parts(tiny_model())
    parts.save(tmp_path / FILE_NAME)
    read = SentenceDiffusion.load(tmp_path / FILE_NAME)
    assert read.fingerprint == parts.fingerprint and np.allclose(read.mean, parts.mean)
    assert read.num_rows(64) == NUM_ROWS
    inputs = np.ones(80)
    assert np.allclose(read.denoiser(inputs), parts.denoiser(inputs), atol=1e-5)


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    classifier().save(file)
    assert np.allclose(EmbeddingClassifier.load(file).weight, classifier().weight)
    with pytest.raises(CheckpointError, match="do not fit together"):
        SentenceDiffusion.load(file)
    random_parts(tiny_model()).save(file)
    with pytest.raises(CheckpointError, match="other tensors"):
        EmbeddingClassifier.load(file)
    EmbeddingClassifier(np.array([math.nan]), 0.0).save(file)
    with pytest.raises(CheckpointError, match="not finite"):
        EmbeddingClassifier.load(file)
    tensors = {"bias": np.zeros((), np.float32), "weight": np.zeros((3, 2, 16), np.float32)}
    for name, tensor in tensors.items():
        parts = random_parts(tiny_model())
        network = ResidualMlp({**parts.prompter.tensors, f"last.{name}": tensor})
        replace(parts, prompter=network).save(file)
        with pytest.raises(CheckpointError, match="do not fit together"):
            SentenceDiffusion.load(file)
    file.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="classifier of embeddings"):
        EmbeddingClassifier.load(file)


def test_a_soft_prompt_of_no_whole_rows_is_refused() -> None:
    model = tiny_model()
    parts = random_parts(model)
    network = ResidualMlp({**parts.prompter.tensors, "last.bias": np.zeros(65)})
    with pytest.raises(InvalidRequestError, match="65 numbers, which are no rows of 64"):
        replace(parts, prompter=network).check(model.network)


def test_models_without_parts_or_encoder_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with (
        LLM(model, tokenizer=ByteTokenizer(), draft=tiny_encoder(), cache_positions=512) as llm,
        pytest.raises(UnsupportedCombinationError, match="anydecode train dglm"),
    ):
        llm.generate("a", **OPTIONS)
    with LLM(model, tokenizer=ByteTokenizer(), draft="none", cache_positions=512) as llm:
        with pytest.raises(UnsupportedCombinationError, match="needs a draft model"):
            llm.generate("a", **OPTIONS)
    model.sentence_diffusion = random_parts(tiny_model(layers=1))
    with (
        LLM(model, tokenizer=ByteTokenizer(), draft=tiny_encoder(), cache_positions=512) as llm,
        pytest.raises(InvalidRequestError, match="another model"),
    ):
        llm.generate("a", **OPTIONS)
    EmbeddingClassifier(np.zeros(7), 0.0).save(tmp_path / "file")
    with (
        sentence_diffusion_model() as llm,
        pytest.raises(
            InvalidRequestError, match="the classifier .*file was trained for embeddings of 7"
        ),
    ):
        llm.generate(
            "a", **{**OPTIONS, "decoder": Dglm(classifier=tmp_path / "file", guidance=1.0)}
        )


def test_texts_that_do_not_fit_are_refused() -> None:
    with sentence_diffusion_model() as llm:
        limit = llm.model.spec.max_positions
        with pytest.raises(ContextLengthError, match="adds 4 positions"):
            llm.generate("abc", **{**OPTIONS, "max_tokens": limit - 6})
        with pytest.raises(UnsupportedCombinationError, match="second prompt"):
            llm.generate("a", **OPTIONS, guidance_scale=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "dglm needs steps|allowed are"),
        ({"sampler": "euler"}, "a sampler of ddpm, ddim"),
        ({"estimate": "mean"}, "an estimate of loss, probability"),
        ({"level": 1.5}, "from 0 to 1"),
        ({"guidance": 5.0}, "guidance but no classifier"),
        ({"classifier": "file"}, "classifier but no guidance"),
        ({"without": "file+", "guidance": 5.0}, "joined with '.', not 'file.'"),
        ({"prompt_scale": 1e9}, "allowed are -1000 to 1000"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("dglm", **options)
