"""Benchmarks on small models of random weights: what they write and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.benchmarks import shape_folders, shapes
from anydecode.benchmarks.divergence import divergences, losses
from anydecode.benchmarks.kernel_bench import fast_math_library
from anydecode.benchmarks.passes import first_logits, sequence_rows
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError
from anydecode.kernels.build import find_compiler
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.quantization.gguf import quantize_file

needs_kernels = pytest.mark.skipif(load_library() is None, reason="no compiled kernels here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that `bench shapes` has written."""
    folder = tmp_path_factory.mktemp("shapes")
    run_bench("shapes", ["--folder", str(folder), "--shape", "tiny"])
    return folder / "random-tiny.Q4_0.gguf"


def report(name: str, arguments: list[str], file: Path) -> dict[str, Any]:
    """What `anydecode bench NAME ARGUMENTS --json FILE` writes."""
    run_bench(name, [*arguments, "--json", str(file)])
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.parametrize("format", shapes.FORMATS)
def test_weights_have_the_same_deviation_in_every_format(format: str) -> None:
    blocks = shapes.random_blocks(format, 64, 2048, np.random.default_rng(3))
    values = dequantize(Weight(format, 64, 2048, blocks))
    # The scales of MXFP4 and NVFP4 are coarse; the codes of IQ4_NL are not symmetric.
    assert values.std() == pytest.approx(0.02, rel=0.2 if format.endswith("FP4") else 0.03)
    assert abs(values.mean()) < 0.003


@pytest.mark.parametrize("format", (*shapes.FORMATS, *shape_folders.FORMATS))
def test_a_written_shape_opens_and_generates(format: str, tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--shape", "tiny", "--format", format]
    result = report("shapes", arguments, tmp_path / "shape.json")
    with LLM(result["path"]) as llm:
        assert llm.model.spec.num_layers == result["layers"] == 2
        assert llm.generate("a", max_tokens=3, ignore_eos=True).stats.num_tokens == 3


@pytest.mark.parametrize("format", shape_folders.FORMATS)
def test_modules_of_bitsandbytes_have_the_same_deviation(format: str) -> None:
    stored = shape_folders.random_module(format, 64, 2048, np.random.default_rng(3))
    codes = np.hstack([stored["weight"] >> 4, stored["weight"] & 15]).reshape(-1, 64)
    values = stored["weight.quant_map"][codes] * stored["weight.absmax"][:, None]
    assert values.std() == pytest.approx(0.02, rel=0.03) and abs(values.mean()) < 0.003


def test_a_written_mixture_of_experts_opens_and_generates(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--shape", "tiny-experts", "--format", "Q4_K"]
    result = report("shapes", arguments, tmp_path / "shape.json")
    with LLM(result["path"]) as llm:
        routing = llm.model.spec.layers[0].routing
        assert routing is not None and routing.experts_per_token == result["experts_per_token"] == 2
        assert llm.generate("a", max_tokens=3, ignore_eos=True).stats.num_tokens == 3


def accepted_drafts(path: Path, exits: shapes.EarlyExits | None) -> tuple[float, int]:
    """The share of accepted drafts behind two of six layers, and the number of different tokens."""
    shape = shapes.Shape(256, 6, 4, 2, 64, 512, 1024, False)
    shapes.write(path, shape, "Q8_0", exits)
    with LLM(path) as llm:
        options: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "trace": True}
        found = llm.generate("a", decoder="layerskip:layers=2,size=2", **options)
    drafted = sum(len(one["drafted"]) for one in found.trace)
    return sum(len(one["accepted"]) for one in found.trace) / drafted, len(set(found.tokens))


def test_exits_predict_the_last_layer_if_the_layers_behind_them_add_little(tmp_path: Path) -> None:
    share, num_different = accepted_drafts(tmp_path / "a.gguf", shapes.EarlyExits(2, 0.02, 0.5))
    assert share > 0.6 and num_different > 16
    without, _ = accepted_drafts(tmp_path / "b.gguf", None)
    assert without < 0.2


def test_the_command_writes_a_file_with_early_exits(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--shape", "tiny", "--early-layers", "1"]
    result = report("shapes", arguments, tmp_path / "shape.json")
    assert Path(result["path"]).name == "early-tiny.Q4_0.gguf" and not result["tied"]


@needs_kernels
def test_kernels_are_timed_for_every_number_of_rows(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--rounds", "1", "--context", "4", "--cache", "int8"]
    result = report("kernels", arguments, tmp_path / "kernels.json")
    assert [row["n"] for row in result["passes"]] == [1, 2, 4, 8, 16, 32, 512]
    assert result["cache"] == "int8" and result["weight_bytes"] > 0


@needs_kernels
def test_passes_read_the_experts_that_their_tokens_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_bench("shapes", ["--folder", str(tmp_path), "--shape", "tiny-experts"])
    path = tmp_path / "random-tiny-experts.Q4_0.gguf"
    arguments = ["--model", str(path), "--rounds", "1", "--context", "4", "--threads", "1"]
    result = report("kernels", arguments, tmp_path / "kernels.json")
    counts, expert = [row["experts"] for row in result["passes"]], 3 * 256 * 256 * 18 // 32
    assert counts[0] == 2 * 2 < counts[3] < counts[-1] <= 2 * 8
    for row, count in zip(result["passes"], counts, strict=True):
        assert row["expert_bytes"] == count * expert
        assert row["all_expert_bytes"] == 2 * 8 * expert
        assert row["read_bytes"] == result["weight_bytes"] - (2 * 8 - count) * expert
    capsys.readouterr()
    run_bench("kernels", arguments)
    assert "    1        4         0.4      25.0%" in capsys.readouterr().out


@needs_kernels
@pytest.mark.slow
def test_the_cost_of_equal_bits_is_timed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other build computes the same up to rounding, and has other bits."""
    if find_compiler() is None:
        pytest.skip("no C compiler")
    built = build_model(load_checkpoint(model), executor=choose_executor("native", 1))
    executor: Any = built.executor
    other = executor.compiled_as(fast_math_library())
    rows = sequence_rows(list(range(5, 45)), 0, 2)
    own, fast = (
        one.run(rows, built.new_cache(40), first_logits(40)).logits.copy()
        for one in (executor, other)
    )
    error = np.linalg.norm(own - fast) / np.linalg.norm(own)
    assert 0 < error < 0.01
    arguments = ["--model", str(model), "--rounds", "1", "--context", "4", "--fast-math"]
    result = report("kernels", arguments, tmp_path / "kernels.json")
    for row in result["passes"]:
        expected = row["best"] / row["fast_math_best"] - 1  # of the only round
        assert row["equal_bits_cost"] == pytest.approx(expected)
    capsys.readouterr()
    run_bench("kernels", arguments)
    assert "cost of equal bits" in capsys.readouterr().out


def test_divergence_is_zero_for_the_reference_and_small_for_the_kernels(
    model: Path, tmp_path: Path
) -> None:
    arguments = ["--models", str(model), "--tokens", "24", "--window", "8", "--threads", "1"]
    result = report("divergence", arguments, tmp_path / "divergence.json")
    [file] = result["models"]
    [own] = file["engines"].values()
    assert file["tokens"] == 24 and 0 <= own["mean"] < 1e-3
    rows = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    assert divergences(rows, rows + 2).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert (divergences(rows, rows[:, ::-1]) > 0.01).all()


@needs_kernels
def test_formats_of_weights_and_caches_are_compared_with_another_file(tmp_path: Path) -> None:
    """Coarser formats diverge more; the reference may be the file from which they were made."""
    source, coarse = tmp_path / "source.gguf", tmp_path / "coarse.gguf"
    shapes.write(source, shapes.SHAPES["tiny"], "Q8_0")
    quantize_file(source, coarse, "q4_0")
    common = ["--tokens", "24", "--window", "8", "--threads", "1", "--reference", str(source)]
    arguments = ["--models", f"{source},{coarse}", *common, "--caches", "float32,int4"]
    result = report("divergence", arguments, tmp_path / "divergence.json")
    means = []
    for file, name in zip(result["models"], ("source.gguf", "coarse.gguf"), strict=True):
        assert file["reference"] == "source.gguf" and file["model"] == name
        assert [name.rpartition(", ")[2] for name in file["engines"]] == [
            "float32 cache",
            "int4 cache",
        ]
        assert file["beside_llama_cpp"] == []
        means.append([engine["mean"] for engine in file["engines"].values()])
        assert all(engine["loss"] > 0 for engine in file["engines"].values())
    (exact, with_int4), (rounded, _) = means
    assert exact < with_int4 and exact < rounded


def test_losses_are_those_of_the_next_tokens() -> None:
    """The last row of a window predicts nothing."""
    logits = np.log(np.array([[1, 2, 5], [6, 1, 1], [1, 1, 6], [2, 1, 1]], np.float32))
    expected = [-np.log(5 / 8), -np.log(1 / 8)]
    assert losses(logits, [[0, 2, 1], [1]]) == pytest.approx(expected)


def test_a_text_without_a_token_to_predict_is_refused(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a")
    with pytest.raises(InvalidRequestError, match="the text has fewer than two tokens"):
        run_bench("divergence", ["--models", str(model), "--text", str(text)])


def test_a_failing_baseline_is_named_in_one_line(model: Path, tmp_path: Path) -> None:
    arguments = ["--models", str(model), "--tokens", "8", "--baseline"]
    with pytest.raises(InvalidRequestError, match="--baseline missing cannot be run"):
        run_bench("divergence", [*arguments, "missing"])
    if sys.platform != "win32":
        with pytest.raises(InvalidRequestError, match="llama.cpp failed under false: exit code 1"):
            run_bench("divergence", [*arguments, "false"])


def test_cached_and_uncached_denoising_are_timed(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--hidden", "64", "--mlp", "64", "--heads", "2", "--vocab", "300"]
    setting = ["--canvas", "8", "--block", "4", "--prompt", "4", "--uncached", "1"]
    arguments = ["--folder", str(tmp_path), *sizes, *setting, "--dtype", "float32"]
    result = report("diffusion", arguments, tmp_path / "diffusion.json")
    assert result["parameters"] == 2 * 300 * 64 + 64 * (4 * 64 + 3 * 64)
    speeds = result["cached_tokens_per_second"], result["uncached_tokens_per_second"]
    assert result["ratio"] == pytest.approx(speeds[0] / speeds[1])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("shapes", ["--folder", "x", "--shape", "9b"], "unknown shape '9b'; choose from tiny"),
        ("shapes", ["--folder", "x", "--shape", "tiny", "--early-layers", "2"], "which has 2"),
        (
            "shapes",
            ["--folder", "x", "--shape", "1b", "--early-layers", "4", "--format", "MXFP4"],
            "--early-layers writes no MXFP4; choose from Q4_0",
        ),
        (
            "shapes",
            ["--folder", "x", "--shape", "tiny-experts", "--format", "NF4"],
            "tiny-experts has experts, which are not written in NF4",
        ),
        ("gpu", ["--dtype", "float7"], "unknown dtype 'float7'; choose from bfloat16"),
        ("diffusion", ["--folder", "x", "--hidden", "30", "--heads", "4"], "not a multiple"),
        ("diffusion", ["--folder", "x", "--canvas", "8", "--block", "9"], "longer than --canvas 8"),
        ("batched", ["--bench", "missing"], "--bench missing is not a file"),
        ("batched", ["--bench", __file__, "--sequences", "1,x"], "not a list of numbers"),
        ("divergence", ["--text", "missing.txt"], "--text missing.txt is not a file"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    name: str, arguments: list[str], message: str
) -> None:
    if name == "gpu":
        pytest.importorskip("torch")
    with pytest.raises(InvalidRequestError, match=message):
        run_bench(name, arguments)


@needs_kernels
def test_an_unknown_cache_format_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--cache 'int7' is not a format"):
        run_bench("kernels", ["--model", str(model), "--cache", "int7"])
    with pytest.raises(InvalidRequestError, match="--caches int3: choose from float32"):
        run_bench("divergence", ["--models", str(model), "--caches", "int3"])
