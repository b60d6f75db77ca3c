"""GPTQ rounding, and the loss of quantised diffusion models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.denoising import bidirectional, dense, softmax
from anydecode.certification.format_loss import entropy
from anydecode.cli.bench import run_bench
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.kernels.formats import dequantize, quantize
from anydecode.models.gptq import quantize_matrix
from anydecode.models.scripted import MASK
from anydecode.tasks.tasks import examples


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def output_error(matrix: np.ndarray, rounded_matrix: np.ndarray, hessian: np.ndarray) -> float:
    """The squared error of the matrix's outputs over all inputs; `hessian` is inputs.T @ inputs."""
    difference = (matrix - rounded_matrix).astype(np.float64)
    return float((difference @ hessian * difference).sum())


def test_uncorrelated_inputs_give_rounding_to_nearest() -> None:
    # GPTQ divides by the stored scale, a float16. No value of this matrix is so close to the middle
    # of two codes that the scale's rounding matters.
    matrix = randn(24, 96, seed=3)
    result = quantize_matrix(matrix, np.diag(np.arange(1.0, 97)))
    assert np.array_equal(result.data, quantize(matrix, "Q4_0").data)


def test_rounding_for_the_inputs_has_a_smaller_error_on_them() -> None:
    matrix = randn(24, 96)
    inputs = randn(400, 12, seed=1) @ randn(12, 96, seed=2) + 0.1 * randn(400, 96, seed=3)
    other = randn(400, 12, seed=4) @ randn(12, 96, seed=5)
    inputs, other = inputs.astype(np.float64), other.astype(np.float64)
    hessian = inputs.T @ inputs
    plain = output_error(matrix, dequantize(quantize(matrix, "Q4_0")), hessian)
    assert output_error(matrix, dequantize(quantize_matrix(matrix, hessian)), hessian) < 0.5 * plain
    assert (
        output_error(matrix, dequantize(quantize_matrix(matrix, other.T @ other)), hessian) > plain
    )


def test_weights_of_an_input_that_is_always_zero_become_zero() -> None:
    hessian = np.eye(64)
    hessian[5, 5] = 0
    assert np.all(dequantize(quantize_matrix(randn(8, 64), hessian))[:, 5] == 0)


def test_entropy_is_the_mean_over_masked_tokens() -> None:
    script = dense(spread=2.0)
    truths = {
        (5, 6, MASK, 8, MASK): [5, 6, 7, 8, 9],
        (5, MASK, MASK): [5, 60, 70],
    }

    def expected(shift: int) -> float:
        costs = [
            -np.log(softmax(script((*canvas, position)))[truth[position] + shift])
            for canvas, truth in truths.items()
            for position, token in enumerate(canvas)
            if token == MASK
        ]
        return float(np.mean(costs))

    with bidirectional(script) as llm:
        result = entropy(llm, truths)
    assert result == pytest.approx(expected(0), rel=1e-6)
    assert result != pytest.approx(expected(1), rel=1e-2)


def test_formats_are_compared_at_the_same_number_of_passes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    options = "--formats float32,int8,int4,int4-gptq --tasks copy,shuffle --count 2 --threads 1"
    run_bench("quantization", [*options.split(), "--json", str(out)])
    rows = {row["format"]: row for row in json.loads(out.read_text())["formats"]}
    sizes = [row["bytes"] for row in rows.values()]
    assert sizes[0] > 3 * sizes[1] > 4 * sizes[2] and sizes[2] == sizes[3]
    assert {row["passes"] for row in rows.values()} == {8.0}
    assert rows["float32"]["differing"] == 0
    moved = [abs(row["bound"] - rows["float32"]["bound"]) for row in rows.values()]
    assert moved[0] == 0 and all(0 < one < 0.1 for one in moved[1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--formats", "int3"], "unknown format 'int3'"),
        (["--formats", ","], "at least one format"),
        (["--tasks", "fly"], "unknown task 'fly'"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        run_bench("quantization", options)


def test_a_weight_format_by_name_equals_the_dtype() -> None:
    prompt = "shuffle Ada Ben Carl Dora:"
    generated = []
    for dtype in ("int4", "dlm-ptq", "dlm-ptq:format=int4"):
        with LLM("tiny-diffusion", dtype=dtype, threads=1) as llm:
            generated.append(llm.generate(prompt, max_tokens=16).tokens)
    assert generated[0] == generated[1] == generated[2]


def test_gptq_by_name_calibrates_on_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines = [f"{one.prompt}\t{one.answer}" for one in examples("copy", 6, held_out=False)]
    texts = tmp_path / "texts.tsv"
    texts.write_text("\n".join([*lines, "a line without a tab"]), encoding="utf-8")
    by_name = f"dlm-ptq:format=int4-gptq,texts={texts}"
    weights = {}
    for dtype in (by_name, "int4"):
        with LLM("tiny-diffusion", dtype=dtype, backend="torch") as llm:
            assert llm.generate("copy Ada Ben Carl:", max_tokens=16).text == " Ada Ben Carl"
            weights[dtype] = [one.data for one in llm.model.network.matrices()]
    assert len(weights[by_name]) == len(weights["int4"])
    same = [np.array_equal(a, b) for a, b in zip(*weights.values(), strict=True)]
    assert same[:2] == [True, True] and not any(same[2:])  # the embedding and the head


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        ("tiny-diffusion", "dlm-ptq:format=int3", "no format 'int3'"),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq", "needs texts="),
        ("tiny-diffusion", "dlm-ptq:texts=a.tsv", "needs texts="),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq,texts=/nowhere", "cannot be read"),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq,texts=/dev/null", "no line with a prompt"),
        ("tiny-autoregressive", "dlm-ptq", "for diffusion models"),
        (object(), "dlm-ptq", "name or the file"),
        ("tiny-diffusion", "sdar", "not a weight format"),
        ("tiny-diffusion", "int3", "dtype 'int3' is unknown"),
    ],
)
def test_invalid_weight_formats_by_name_are_rejected(model: object, dtype: str, words: str) -> None:
    with pytest.raises(AnydecodeError, match=words):
        LLM(model, dtype=dtype)
