"""`anydecode bench perplexity`: windows, counts and errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from anydecode import LLM
from anydecode.benchmarks.perplexity import measure
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError

MODEL = "tiny-autoregressive"
TEXT = "reverse Ada Ben Carl: Carl Ben Ada. sort Leo Ada Ben: Ada Ben Leo. " * 3


def test_windows_are_scored_apart() -> None:
    """And the first token of each is not predicted."""
    with LLM(MODEL) as llm:
        tokens = llm.tokenizer.encode(TEXT)
        parts = [tokens[0:10], tokens[10:20], tokens[20:30]]
        scores = [llm.score(part[:1], part[1:]).total for part in parts]
    result = measure(MODEL, TEXT, window=10, limit=3)
    assert result.tokens == 27
    assert result.nats == pytest.approx(-sum(scores) / 27)
    assert result.perplexity == pytest.approx(math.exp(result.nats))
    # Negative control: one window of the same tokens predicts two more, with more context.
    assert measure(MODEL, TEXT, window=30, limit=1).tokens == 29


def test_a_short_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="fewer than two tokens"):
        measure(MODEL, "", window=10, limit=3)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text(TEXT)
    arguments = ["--models", f"{MODEL},{MODEL}", "--text", str(text), "--json", str(report)]
    run_bench("perplexity", arguments)
    rows = json.loads(report.read_text())["models"]
    assert [row["model"] for row in rows] == [MODEL, MODEL]
    assert rows[0]["nats"] == rows[1]["nats"] and rows[0]["num_bytes"] > 1000
    assert "perplexity" in capsys.readouterr().out
