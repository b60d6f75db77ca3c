"""`anydecode doctor --model`: near-ties are told from real differences to `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.benchmarks import against_transformers
from anydecode.benchmarks.against_transformers import differences, is_same, lines
from anydecode.cli import main
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import load_checkpoint
from model_files import tokenizer_json
from tiny_models import hf_model

#: One row per token: the first is chosen by all; the second is nearly tied.
EXPECTED = np.array([[0.0, 4.0, 1.0], [2.0, 2.001, -3.0]], np.float32)


def test_a_token_that_the_format_decides_is_a_near_tie() -> None:
    rounded = EXPECTED + np.array([[0.1, 0.0, 0.0], [0.2, 0.0, 0.0]], np.float32)
    report = differences(rounded, EXPECTED + 1e-5, EXPECTED, np.array([1, 0]))
    (other,) = report["other_tokens"]
    assert (report["near_ties"], report["real_differences"]) == (1, 0)
    assert other["row"] == 1 and other["tokens"] == [0, 1] and other["is_near_tie"]
    assert other["probabilities"] == pytest.approx([0.498, 0.499], abs=1e-3)


def test_a_difference_in_float32_is_real() -> None:
    """Whether or not another token is chosen; so are logits that are not finite."""
    for change, tokens in ((1.0, [1, 0]), (-1.0, [1, 1]), (float("nan"), [1, 1])):
        exact = EXPECTED.copy()
        exact[1, 0] += change
        report = differences(exact, exact, EXPECTED, np.array(tokens))
        assert report["real_differences"] == 1 and report["near_ties"] == 0
        assert not is_same({**report, "same_tokenization": True})


def test_padded_vocabularies_are_cut() -> None:
    padded = np.pad(EXPECTED, ((0, 0), (0, 2)), constant_values=9.0)
    assert differences(EXPECTED, EXPECTED, padded, np.array([1, 1]))["real_differences"] == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of `transformers` and a tokenizer."""
    hf_model("Llama", vocab_size=300).save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "tiny"


def doctor(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["doctor", "--tokens", "6", *arguments])
    return int(ended.value.code or 0)


def test_a_model_equals_that_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--model", str(folder), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same_tokenization"] and report["real_differences"] == 0
    assert 3 <= report["tokens"] <= 18 and report["largest_difference"] < 1e-4
    assert doctor("--model", str(folder), "--dtype", "int4") == 0
    assert "real differences: 0" in capsys.readouterr().out


def test_a_model_that_is_read_wrongly_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(path: Any) -> Checkpoint:
        checkpoint = load_checkpoint(path)
        checkpoint.config["rms_norm_eps"] = 0.5
        return checkpoint

    monkeypatch.setattr(against_transformers, "load_checkpoint", wrong)
    assert doctor("--model", str(folder)) == 1
    assert "real differences: 0" not in capsys.readouterr().out


def test_other_tokenization_is_a_real_difference() -> None:
    report = differences(EXPECTED, EXPECTED, EXPECTED, np.array([1, 1]))
    report |= {"model": "tiny", "same_tokenization": False}
    assert not is_same(report)
    assert lines(report)[-1] == (
        "transformers splits the prompts into other tokens: a real difference"
    )


@pytest.mark.slow
def test_a_file_of_gguf_equals_that_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from gguf_models import make_tensors, write_gguf

    write_gguf(tmp_path / "tiny.gguf", "llama", make_tensors("llama"), "Q8_0")
    assert doctor("--model", str(tmp_path / "tiny.gguf"), "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["real_differences"] == 0
    assert captured.err == ""  # transformers shows a bar of its own


def test_what_cannot_be_compared_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--model", "tiny-diffusion") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "only causal language models" in line
    assert doctor("--model", "tiny-autoregressive", "--tokens", "100000") == 2
    assert "leaves no room for a prompt" in capsys.readouterr().err
