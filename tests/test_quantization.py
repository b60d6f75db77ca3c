"""Rounding for what inputs have in common, and what diffusion models lose in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.denoising import bidirectional, dense, softmax
from anydecode.evaluation.quantization import entropy
from anydecode.kernels.formats import dequantize, quantize
from anydecode.models.gptq import rounded
from anydecode.models.scripted import MASK


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(matrix: torch.Tensor, found: torch.Tensor, seen: torch.Tensor) -> float:
    """The squared error of what the matrix gives, over all inputs."""
    difference = (matrix - found).double()
    return float((difference @ seen * difference).sum())


def test_where_inputs_have_nothing_in_common_every_number_is_rounded_alone() -> None:
    matrix = drawn(24, 96)
    found = rounded(matrix, torch.diag(torch.arange(1.0, 97).double()))
    assert torch.equal(found.data, quantize(matrix, "Q4_0").data)


def test_rounding_for_the_inputs_errs_less_on_them() -> None:
    matrix = drawn(24, 96)
    inputs = (
        drawn(400, 12, seed=1) @ drawn(12, 96, seed=2) + 0.1 * drawn(400, 96, seed=3)
    ).double()
    other = (drawn(400, 12, seed=4) @ drawn(12, 96, seed=5)).double()
    seen = inputs.T @ inputs
    plain = error(matrix, dequantize(quantize(matrix, "Q4_0")), seen)
    assert error(matrix, dequantize(rounded(matrix, seen)), seen) < 0.5 * plain
    assert error(matrix, dequantize(rounded(matrix, other.T @ other)), seen) > plain


def test_an_input_that_is_never_there_costs_nothing() -> None:
    seen = torch.eye(64, dtype=torch.float64)
    seen[5, 5] = 0
    assert torch.all(dequantize(rounded(drawn(8, 64), seen))[:, 5] == 0)


def test_entropy_is_that_of_the_masked_tokens() -> None:
    script = dense(spread=2.0)
    truths = {
        (5, 6, MASK, 8, MASK): [5, 6, 7, 8, 9],
        (5, MASK, MASK): [5, 60, 70],
    }

    def expected(shift: int) -> float:
        costs = [
            -np.log(softmax(script((*canvas, place)))[truth[place] + shift])
            for canvas, truth in truths.items()
            for place, token in enumerate(canvas)
            if token == MASK
        ]
        return float(np.mean(costs))

    with bidirectional(script) as llm:
        found = entropy(llm, truths)
    assert found == pytest.approx(expected(0), rel=1e-6)
    assert found != pytest.approx(expected(1), rel=1e-2)


def test_formats_are_compared_at_the_same_passes(tmp_path: Path) -> None:
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
        (["--formats", "int3"], "no format 'int3'"),
        (["--formats", ","], "at least one format"),
        (["--tasks", "fly"], "no task 'fly'"),
    ],
)
def test_bad_requests_get_one_clear_line(options: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        run_bench("quantization", options)
