"""Rounding for what inputs have in common, and what diffusion models lose in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from anydecode import LLM
from anydecode.cli.bench import run_bench
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.evaluation.certify import certify_one
from anydecode.evaluation.denoising import bidirectional, dense, softmax
from anydecode.evaluation.mechanisms import diffusion_ptq
from anydecode.evaluation.parallelbench.bench import diffusion_methods
from anydecode.evaluation.parallelbench.tasks import examples
from anydecode.evaluation.quantization import entropy
from anydecode.kernels.formats import dequantize, quantize
from anydecode.kernels.interface import Weight
from anydecode.models import gptq
from anydecode.models.gptq import quantize_matrix
from anydecode.models.scripted import MASK


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(matrix: torch.Tensor, found: torch.Tensor, seen: torch.Tensor) -> float:
    """The squared error of what the matrix gives, over all inputs."""
    difference = (matrix - found).double()
    return float((difference @ seen * difference).sum())


def test_where_inputs_have_nothing_in_common_every_number_is_rounded_alone() -> None:
    matrix = drawn(24, 96)
    found = quantize_matrix(matrix, torch.diag(torch.arange(1.0, 97).double()))
    assert torch.equal(found.data, quantize(matrix, "Q4_0").data)


def test_rounding_for_the_inputs_errs_less_on_them() -> None:
    matrix = drawn(24, 96)
    inputs = (
        drawn(400, 12, seed=1) @ drawn(12, 96, seed=2) + 0.1 * drawn(400, 96, seed=3)
    ).double()
    other = (drawn(400, 12, seed=4) @ drawn(12, 96, seed=5)).double()
    seen = inputs.T @ inputs
    plain = error(matrix, dequantize(quantize(matrix, "Q4_0")), seen)
    assert error(matrix, dequantize(quantize_matrix(matrix, seen)), seen) < 0.5 * plain
    assert error(matrix, dequantize(quantize_matrix(matrix, other.T @ other)), seen) > plain


def test_an_input_that_is_never_there_costs_nothing() -> None:
    seen = torch.eye(64, dtype=torch.float64)
    seen[5, 5] = 0
    assert torch.all(dequantize(quantize_matrix(drawn(8, 64), seen))[:, 5] == 0)


def test_entropy_is_that_of_the_masked_tokens() -> None:
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


def test_a_format_by_name_is_the_engines_own() -> None:
    prompt = "shuffle Ada Ben Carl Dora:"
    told = []
    for dtype in ("int4", "dlm-ptq", "dlm-ptq:format=int4"):
        with LLM("tiny-diffusion", dtype=dtype, threads=1) as llm:
            told.append(llm.generate(prompt, max_tokens=16).tokens)
    assert told[0] == told[1] == told[2]


def test_gptq_by_name_learns_from_a_file(tmp_path: Path) -> None:
    lines = [f"{one.prompt}\t{one.answer}" for one in examples("copy", 6, held_out=False)]
    texts = tmp_path / "texts.tsv"
    texts.write_text("\n".join([*lines, "a line without a tab"]), encoding="utf-8")
    named = f"dlm-ptq:format=int4-gptq,texts={texts}"
    held = {}
    for dtype in (named, "int4"):
        with LLM("tiny-diffusion", dtype=dtype, backend="torch") as llm:
            assert llm.generate("copy Ada Ben Carl:", max_tokens=16).text == " Ada Ben Carl"
            held[dtype] = [one.data for one in llm.model.network.matrices()]
    assert len(held[named]) == len(held["int4"])
    same = [torch.equal(a, b) for a, b in zip(*held.values(), strict=True)]
    assert same[:2] == [True, True] and not any(same[2:])  # the embedding and the head


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        ("tiny-diffusion", "dlm-ptq:format=int3", "no format 'int3'"),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq", "wants texts="),
        ("tiny-diffusion", "dlm-ptq:texts=a.tsv", "wants texts="),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq,texts=/nowhere", "cannot be read"),
        ("tiny-diffusion", "dlm-ptq:format=int4-gptq,texts=/dev/null", "no line of prompt"),
        ("tiny-autoregressive", "dlm-ptq", "for diffusion models"),
        (object(), "dlm-ptq", "name or the file"),
        ("tiny-diffusion", "sdar", "not of kind WeightFormat"),
        ("tiny-diffusion", "int3", "dtype 'int3' is unknown"),
    ],
)
def test_a_format_by_name_refuses_in_one_clear_line(model: object, dtype: str, words: str) -> None:
    with pytest.raises(AnydecodeError, match=words):
        LLM(model, dtype=dtype)


def test_dlm_ptq_is_no_decoder() -> None:
    assert "dlm-ptq" not in diffusion_methods()
    with bidirectional(dense()) as llm, pytest.raises(InvalidRequestError, match="not a decoder"):
        llm.generate([5], decoder="dlm-ptq", max_tokens=2)


def test_the_certificate_tells_careless_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certify_one("dlm-ptq").passed
    monkeypatch.setattr(gptq, "DAMPING", 0.5)
    assert failed() == ["GPTQ's codes equal the textbook's"]
    monkeypatch.undo()
    monkeypatch.setattr(
        gptq, "quantize_matrix", lambda matrix, hessian, name="": shifted(matrix, name)
    )
    diffusion_ptq.losses.cache_clear()
    wrong = failed()
    diffusion_ptq.losses.cache_clear()
    assert {"accuracy lost, int4-gptq", "nats lost per masked token, int4-gptq"} <= {*wrong}
    assert not any(name.endswith((" int4", " int8")) for name in wrong)


def failed() -> list[str]:
    return [check.name for check in certify_one("dlm-ptq").checks if not check.passed]


def shifted(matrix: torch.Tensor, name: str) -> Weight:
    """Every second code one too low."""
    found = quantize(matrix, "Q4_0", name)
    codes = found.data.view(len(matrix), -1, 18)[..., 2:]
    codes -= torch.where(codes & 15 > 0, 1, 0).to(torch.uint8)
    return found
