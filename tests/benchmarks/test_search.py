"""`bench search` counts rows, and the fewest that the same texts need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from anydecode.benchmarks.search import measure, observed
from anydecode.certification.tiny import tiny_model
from anydecode.cli.bench import run_bench
from anydecode.models.scripted import ByteTokenizer

PROMPT, LENGTH = list(b"the cat sat on the mat"), 6


@pytest.fixture
def llm() -> Any:
    model = tiny_model(residual=0.3)
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False, cache_positions=4096) as opened:
        yield opened


def test_every_beginning_is_counted_once(llm: LLM) -> None:
    options: dict[str, Any] = {"decoder": "autoregressive", "max_tokens": 4, "ignore_eos": True}
    with observed(llm.model, PROMPT) as prefixes:
        llm.generate(PROMPT, **options)
        rows = len(PROMPT) + 3
        assert (prefixes.num_rows, prefixes.num_distinct) == (rows, rows)
        assert prefixes.num_prompt_rows == len(PROMPT)
        llm.generate(PROMPT, **options)  # all rows again
        assert (prefixes.num_rows, prefixes.num_distinct) == (2 * rows, rows)
        llm.generate([*PROMPT[:-1], PROMPT[-1] + 1], max_tokens=1)  # the last row differs
        assert prefixes.num_distinct == rows + 1
        assert prefixes.num_prompt_rows == 3 * len(PROMPT) - 1
    assert "run" not in vars(llm.model)


@pytest.mark.parametrize("method", ["beam:width=4", "diverse-beam:width=4,groups=2"])
def test_beams_share_their_prompt_and_every_prefix(llm: LLM, method: str) -> None:
    plain, found = measure(llm, [method], PROMPT, LENGTH, 1)
    assert (plain.rows, plain.cache_rows) == (len(PROMPT) + LENGTH - 1,) * 2
    assert plain.passes == found.passes == LENGTH
    assert found.prompt_rows == len(PROMPT) < found.cache_rows < 2 * len(PROMPT) + 4 * LENGTH
    assert found.rows == len(PROMPT) + 4 * (LENGTH - 1)
    if method.startswith("beam"):
        assert found.distinct_rows == found.rows


@pytest.mark.parametrize(
    "method",
    [
        "best-of-n:n=4", "particle-filtering", "majority-vote:n=3", "deal:k=3,length=2", "phi",
        "adadec:threshold=0", "transfer-q:k=3,length=2", "a-star",
        "awrs",
    ],
)  # fmt: skip
def test_searches_compute_their_prompt_once(llm: LLM, method: str) -> None:
    _, found = measure(llm, [method], PROMPT, LENGTH, 1)
    assert found.prompt_rows == len(PROMPT)
    assert found.rows >= found.distinct_rows >= len(PROMPT)


@pytest.mark.parametrize("method", ["best-of-n:n=8", "majority-vote:n=8", "particle-filtering"])
def test_equal_beginnings_are_computed_once(llm: LLM, method: str) -> None:
    _, found = measure(llm, [method], PROMPT, LENGTH, 1)
    assert found.rows == found.distinct_rows > len(PROMPT) + LENGTH


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    run_bench(
        "search",
        ["--model", "tiny-autoregressive", "--methods", "beam:width=2", "--prompt-tokens", "20",
         "--tokens", "4", "--repeats", "1", "--json", str(file)],
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert [row["method"] for row in report["methods"]] == ["autoregressive", "beam:width=2"]
    assert report["methods"][1]["prompt_rows"] == 20
    printed = capsys.readouterr().out
    assert "a prompt of 20 tokens" in printed and "1.00x" in printed
