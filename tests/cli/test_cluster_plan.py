"""`anydecode cluster plan`: what it prints."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anydecode.benchmarks import fleet_runs
from anydecode.cli import main
from anydecode.cluster import plan


def test_a_plan_names_the_best_placement_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def once(module: Any, name: str) -> None:
        """The three commands share one measurement."""
        measure = getattr(module, name)

        def measured(*given: Any, **options: Any) -> Any:
            if name not in found:
                found[name] = measure(*given, **options)
            return found[name]

        monkeypatch.setattr(module, name, measured)

    monkeypatch.setattr(plan, "sleep", lambda seconds: None)
    monkeypatch.setattr(fleet_runs, "request_seconds", partial(fleet_runs.request_seconds, 10))
    once(plan, "measured")
    once(fleet_runs, "request_seconds")
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 30, "output_length": 3}
    trace.write_text("".join(json.dumps({"timestamp": 1000 * n, **line}) + "\n" for n in range(5)))
    arguments = ["cluster", "plan", "tiny-autoregressive", "--trace", str(trace)]
    arguments += ["--slo", "ttft=60,tpot=60", "--search", "distserve:max_probes=1"]
    plot = tmp_path / "plan.svg"
    for more in ([], ["--rate", "5"], ["--json", "--plot", str(plot)]):
        with pytest.raises(SystemExit) as end:
            main.run([*arguments, "--threads", "1", "--cache-positions", "2048", *more])
        assert end.value.code == 0
    *lines, data = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2 mixed ") and lines[2].startswith("1 prefill, 1 decode ")
    assert lines[3].startswith("measured in ") and ", simulated in " in lines[3]
    assert lines[1].endswith("or more") and "raise --requests" in lines[4]
    assert "within the limits at 2 mixed" in lines[5] and "100.0%" in lines[6]
    assert [line[:15].strip() for line in lines[8:10]] == ["1 mixed", "2 mixed"]
    assert "5 requests/s need 5 x 1 mixed: 5 workers" in lines
    first = json.loads(data)["placements"][0]
    assert first["placement"] == {"mixed": 2, "prefill": 0, "decode": 0, "encode": 0}
    assert first["goodput"] == 1.0
    if find_spec("matplotlib") is not None:
        assert "1 prefill, 1 decode" in plot.read_text()


@pytest.mark.slow
def test_a_plan_with_images_has_placements_with_encode_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 30, "output_length": 3}
    trace.write_text("".join(json.dumps({"timestamp": 1000 * n, **line}) + "\n" for n in range(5)))
    arguments = ["cluster", "plan", "tiny-autoregressive", "--trace", str(trace), "--json"]
    arguments += ["--slo", "ttft=60,tpot=60", "--search", "distserve:max_probes=1"]
    with pytest.raises(SystemExit):
        main.run([*arguments, "--images", "2x16", "--threads", "1", "--cache-positions", "2048"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    placements = [one["placement"] for one in found["placements"]]
    assert {"mixed": 1, "prefill": 0, "decode": 0, "encode": 1} in placements
    assert found["link"]["embedding_bytes"] > 0


def test_a_rate_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 3, "output_length": 3})
    trace.write_text(f"{line}\n{line}\n")
    with pytest.raises(SystemExit):
        main.run(
            ["cluster", "plan", "tiny-autoregressive", "--trace", str(trace), "--slo"]
            + ["ttft=60,tpot=60", "--rate", "0"]
        )
    assert "--rate is 0; allowed is a number above 0" in capsys.readouterr().err
