"""llama.cpp in another interpreter: requests, results and errors, on a stand-in for its module."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import llama_cpp_stand_in
from anydecode import LLM
from anydecode.benchmarks import shapes
from anydecode.benchmarks.llama_cpp_baseline import LlamaCpp
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import load_library
from anydecode.quantization.gguf import quantize_file

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiled kernels here")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small file of random weights."""
    path = tmp_path_factory.mktemp("shapes") / "tiny.gguf"
    shapes.write(path, shapes.SHAPES["tiny"], "Q8_0")
    return str(path)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return llama_cpp_stand_in.install(tmp_path, monkeypatch)


def test_scores_are_those_of_the_same_tokens(path: str, python: str) -> None:
    with LLM(path, cache="float16", threads=1) as llm:
        greedy = llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True).tokens
        pairs = [([5, 6, 7], greedy), ([5, 6, 7], [9, 10]), ([8], [9])]
        expected = [(one.total, one.greedy) for one in llm.scores(pairs)]
        text = llm.generate([5, 6, 7], max_tokens=3).text
    engine = LlamaCpp(python, path, 1)
    found = engine.ask("scores", pairs=pairs)
    assert engine.version == "llama-cpp-python 0"
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected])
    assert [flag for _, flag in found] == [flag for _, flag in expected] == [True, False, False]
    # The wrong twin: the boundary between context and continuation moved by a token.
    moved = engine.ask("scores", pairs=[([5, 6, 7, 9], [10])])
    assert moved[0][0] != pytest.approx(expected[1][0])
    assert engine.ask("texts", prompts=[[5, 6, 7]], count=3, stops=[]) == [text]
    if text:
        assert engine.ask("texts", prompts=[[5, 6, 7]], count=3, stops=[text[0]]) == [""]


def test_files_and_caches_are_compared_with_those_of_llama_cpp(
    path: str, python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with the same format: the stand-in agrees in both."""
    coarse, file = tmp_path / "coarse.gguf", tmp_path / "divergence.json"
    quantize_file(Path(path), coarse, "q4_0")
    arguments = ["--models", f"{path},{coarse}", "--tokens", "24", "--window", "8"]
    arguments += ["--reference", path, "--threads", "1", "--caches", "float32,int4"]
    run_bench("divergence", [*arguments, "--baseline", python, "--json", str(file)])
    for result in json.loads(file.read_text())["models"]:
        engines = result["engines"]
        own, own_int4, other, other_int4 = (one["mean"] for one in engines.values())
        assert list(engines)[2:] == [
            "llama-cpp-python 0, float32 cache",
            "llama-cpp-python 0, int4 cache",
        ]
        assert (other, other_int4) == pytest.approx((own, own_int4)) and own < own_int4
        exact, rounded = result["beside_llama_cpp"]
        assert (exact["cache"], rounded["cache"]) == ("float32", "int4")
        assert rounded["divergence"][0] == pytest.approx(rounded["divergence"][1])
        assert rounded["divergence"][0][0] == pytest.approx(own_int4)
        assert rounded["loss_difference"] == pytest.approx([0, 0], abs=1e-9)
        losses = [one["loss"] for one in engines.values()]
        assert exact["perplexity"] == pytest.approx([np.exp(losses[0]), np.exp(losses[2])])
    assert "coarse.gguf int4" in " ".join(capsys.readouterr().out.split())


def test_a_failing_request_is_one_line(path: str, python: str) -> None:
    with pytest.raises(InvalidRequestError, match="llama.cpp failed under .*: KeyError: 'other'"):
        LlamaCpp(python, path, 1).ask("other")
