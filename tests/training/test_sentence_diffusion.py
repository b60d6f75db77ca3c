"""The parts of dglm and classifiers of embeddings: trained, resumed, and used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode.api.llm import LLM
from anydecode.certification.tiny_sentence import tiny_encoder
from anydecode.cli.main import run
from anydecode.decoders.guidance.dglm import Dglm
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.sentence_diffusion import FILE_NAME, SentenceDiffusion, level_features
from anydecode.training import sentence_diffusion
from anydecode.training.embedding_classifier import fit_classifier
from anydecode.training.logistic import fit_logistic
from anydecode.training.pairs import read_labels, read_texts
from anydecode.training.sentence_diffusion import SentenceRecipe, SentenceRun, waves
from encoder_models import declare_pooling, hf_encoder, save_encoder
from interrupted_runs import trained

SMALL: dict[str, Any] = {"cuts": 2, "rows": 2, "width": 64, "blocks": 1, "rank": 8, "rate": 3e-3}


def names(count: int) -> list[str]:
    """Texts of one name, said several times."""
    random = Random(0)
    return [
        "copy " + " ".join([random.choice(["Ada", "Leo"])] * random.randint(3, 5))
        for _ in range(count)
    ]


def byte_encoder() -> LLM:
    return LLM(tiny_encoder(), tokenizer=ByteTokenizer(), draft="none", cache_positions=1024)


def sentence_run(folder: Path, encoder: LLM, texts: list[str], **options: Any) -> SentenceRun:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = SentenceRecipe(**{**SMALL, "batch": 4, **options})
    return SentenceRun(checkpoint, encoder, folder, recipe, texts)


def command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(list(arguments))
    assert ended.value.code == 0


def test_waves_are_those_of_the_decoder() -> None:
    for level in (0.0, 0.3, 0.95, 1.0):
        found = waves(torch.tensor([level], dtype=torch.float64))[0].numpy()
        assert np.allclose(found, level_features(level), atol=1e-4)


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    with byte_encoder() as encoder:
        whole = trained(sentence_run(tmp_path / "a", encoder, names(8), steps=3))
        with pytest.raises(KeyboardInterrupt):
            trained(sentence_run(tmp_path / "b", encoder, names(8), steps=3), stop=1)
        resumed = trained(sentence_run(tmp_path / "b", encoder, [], steps=3))
        assert resumed.step == 3 and resumed.evaluate() == whole.evaluate()
        with pytest.raises(InvalidRequestError, match="another model, encoder or size"):
            sentence_run(tmp_path / "b", encoder, names(8), steps=3, width=32)
    parts = SentenceDiffusion.load(tmp_path / "b" / FILE_NAME)
    assert parts.num_rows(load_checkpoint(tmp_path / "b").config["hidden_size"]) == 2
    first = resumed.denoiser.trained()(np.zeros(2 * 24 + 32))
    assert np.allclose(parts.denoiser(np.zeros(2 * 24 + 32)), first, atol=1e-5)


def test_texts_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    with byte_encoder() as encoder:
        with pytest.raises(InvalidRequestError, match="at least 2 texts"):
            sentence_run(tmp_path, encoder, ["copy Ada"], steps=1)
    model = LLM("tiny-autoregressive", draft="none", cache_positions=256)
    with model, pytest.raises(InvalidRequestError, match="is no sentence encoder"):
        sentence_run(tmp_path, model, names(8), steps=1)
    with pytest.raises(InvalidRequestError, match="must be more than 0"):
        SentenceRecipe(steps=1, rows=0)


def test_a_logistic_regression_finds_its_law() -> None:
    random = np.random.default_rng(0)
    inputs, law = random.normal(size=(20_000, 3)), np.array([1.0, -2.0, 0.0])
    labels = random.random(20_000) < 1 / (1 + np.exp(-(inputs @ law + 0.5)))
    weight, bias = fit_logistic(inputs, labels, 1e-3)
    assert np.abs(weight - law).max() < 0.15 and abs(bias - 0.5) < 0.1
    small, _ = fit_logistic(inputs, labels, 1e5)
    assert np.abs(small).max() < 0.1


def test_classifiers_are_fitted_to_texts_of_both_labels() -> None:
    pairs = [(text, "Ada" in text) for text in names(60)]
    with byte_encoder() as encoder:
        found = fit_classifier(encoder, pairs)
        assert found.accuracy == 1.0 and found.num_texts == 53
        with pytest.raises(InvalidRequestError, match="texts of both labels"):
            fit_classifier(encoder, [(text, True) for text, _ in pairs])


def test_soft_prompts_are_learned_with_less_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logarithm of the ratio of signal and noise is 2 ln 3 more than at an even time."""
    run_class, seen, even = sentence_diffusion.SentenceRun, dict[str, Any](), list[torch.Tensor]()
    levels_of = sentence_diffusion._levels

    def noted_levels(*given: Any) -> torch.Tensor:
        even.append(levels_of(*given))
        return even[-1]

    def noted(name: str) -> Any:
        loss = getattr(run_class, name)

        def inner(self: Any, rows: Any, levels: torch.Tensor, *given: Any) -> Any:
            seen.setdefault(name, levels)
            return loss(self, rows, levels, *given)

        return inner

    with byte_encoder() as encoder:
        training = sentence_run(tmp_path / "run", encoder, names(8), steps=1)
        monkeypatch.setattr(sentence_diffusion, "_levels", noted_levels)
        for name in ("_text_loss", "_velocity_loss"):
            monkeypatch.setattr(run_class, name, noted(name))
        training._update()
    assert torch.equal(seen["_velocity_loss"], even[1])
    shift = torch.logit(seen["_text_loss"].double()) - torch.logit(even[0].double())
    assert (shift - 2 * math.log(3)).abs().max() < 1e-2


@pytest.mark.parametrize(
    "line", ['{"text": "a"}', '{"text": "a", "label": 2}', '{"text": 3, "label": 1}', "no json"]
)
def test_malformed_labels_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text('{"text": "b", "label": false}\n' + line)
    with pytest.raises(InvalidRequestError, match="no text with the label|cannot be read"):
        read_labels(file)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_texts(tmp_path / "missing")


@pytest.mark.slow
def test_a_classifier_leads_a_trained_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained by the commands; texts of one name, and one of the names is asked for."""
    folder = save_encoder(hf_encoder("Bert"), tmp_path / "encoder")
    declare_pooling(folder, "mean_tokens")
    texts, labels = tmp_path / "texts.txt", tmp_path / "labels.jsonl"
    texts.write_text("\n".join(names(200)))
    lines = [{"text": text.partition(" ")[2], "label": "Ada" in text} for text in names(200)]
    labels.write_text("\n".join(map(json.dumps, lines)))
    out, file = tmp_path / "out", tmp_path / "classifier.safetensors"
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    encoder = ["--encoder", str(folder)]
    command(
        "train", "dglm", "--model", "tiny-autoregressive", *encoder, "--data", str(texts),
        "--steps", "150", "--out", str(out), *sizes, "--json",
    )  # fmt: skip
    history = json.loads(capsys.readouterr().out)["history"]
    losses = [one["held_out"] for one in history if "held_out" in one]
    assert losses[-1]["velocity"] < losses[0]["velocity"]
    assert losses[-1]["text"] < 0.5 * losses[-1]["text of noise"]
    command("train", "classifier", *encoder, "--data", str(labels), "--out", str(file))
    with LLM(out, draft=folder) as llm:
        for option, name, other in (("classifier", "Ada", "Leo"), ("without", "Leo", "Ada")):
            named: dict[str, Any] = {option: file}
            method = Dglm(25, guidance=5.0, **named)
            options: dict[str, Any] = {"decoder": method, "temperature": 1.0, "max_tokens": 12}
            found = [llm.generate("copy", seed=seed, **options).text for seed in range(16)]
            assert sum(name in text and other not in text for text in found) >= 13
