"""Fleets of this machine are measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from anydecode.benchmarks import fleet
from anydecode.benchmarks.fleet import bench_fleet
from anydecode.errors import InvalidRequestError


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="as the processes of test_processes.py")
def test_a_fleet_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "HANDED_OVER", (64, 300))  # the model's context has 512 tokens
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 200, "output_length": 4}
    trace.write_text("".join(json.dumps({"timestamp": 100 * n, **line}) + "\n" for n in range(6)))
    file = tmp_path / "fleet.json"
    bench_fleet("tiny-autoregressive", 1, trace, [20.0], 6, 1.0, "ttft=60,tpot=60", file)
    report = json.loads(file.read_text())
    for one, tokens in zip(report["handover"], (64, 300), strict=True):
        assert one["tokens"] == tokens and min(one["computed"], one["handed_over"]) > 0
    assert set(report["overhead"]) == {"request", "request_cpu", "event_cpu"}
    [one] = report["systems"]
    single, mixed, split = one["figures"].values()
    for figures in (single, mixed, split):
        assert figures["within the limits, percent"] == 100
        assert figures["tokens per second"] > 0
    assert single["sent between workers, MB"] == mixed["sent between workers, MB"] == 0
    assert split["sent between workers, MB"] > 0
    printed = capsys.readouterr().out
    assert "300 tokens of a prompt" in printed and "at 20 requests/s" in printed


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--rate is"):
        bench_fleet("x", 1, None, [0.0], 2, 1.0, "ttft=1,tpot=1", None)
