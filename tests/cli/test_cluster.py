"""`anydecode cluster`: bad input is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anydecode.cli import main
from anydecode.cluster.launcher import Place, places
from anydecode.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path))
    monkeypatch.delenv("ANYDECODE_CLUSTER_SECRET", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests: the mean context of a generated token is 110 positions."""
    file = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:4{n}.0000000,100,20" for n in (1, 2)]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_plan_of_attention_and_ffns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiny-autoregressive", "--trace", str(trace), "--slo", "ttft=1,tpot=0.01"]
    arguments += ["--split", "step-3", "--instance", "flops=1e10,bandwidth=1e9,network=1e9"]
    with pytest.raises(SystemExit) as end:
        main.run(["cluster", "plan", *arguments, "--json"])
    assert end.value.code in (None, 0)
    printed = json.loads(capsys.readouterr().out)
    costs, size = printed["costs"], printed["size"]
    assert size["stage_seconds"] == pytest.approx(0.01 / 3 / costs["num_layers"])
    assert size["tokens_per_expert"] == pytest.approx(5 * costs["ffn_bytes"] / costs["ffn_entries"])
    assert size["attention"] >= 1 and size["ffn"] >= 1 and costs["sparsity"] == 1
    with pytest.raises(SystemExit):
        main.run(["cluster", "plan", *arguments])
    printed = capsys.readouterr().out
    assert f"instances: {size['attention']} attention and {size['ffn']} FFN" in printed


def test_the_workers_of_a_fleet() -> None:
    assert places(None, 0, 0) == [Place("mixed-1", "mixed"), Place("mixed-2", "mixed")]
    assert [one.name for one in places(3, 1, 1)] == ["prefill-1", "decode-1", "mixed-1"]
    assert [one.role for one in places(None, 2, 1)] == ["prefill", "prefill", "decode"]
    assert [one.role for one in places(None, 1, 1, 1)] == ["encode", "prefill", "decode"]
    assert [one.role for one in places(None, 0, 0, 1)] == ["encode", "mixed", "mixed"]
    with pytest.raises(InvalidRequestError, match="more roles than --workers 2"):
        places(2, 2, 1)
    with pytest.raises(InvalidRequestError, match="none generates"):
        places(None, 2, 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "tiny-autoregressive", "-w", "1", "--prefill", "2"], "more roles than --workers 1"),
        (["up", "tiny-autoregressive", "--host", "0.0.0.0"], "lets other machines connect"),
        (["up", "no-such-model"], "no-such-model"),
        (["up", "tiny-autoregressive", "--handover-memory", "much"], "'much' is not a number of"),
        (["up", "tiny-autoregressive", "--handover-memory", "0"], "is 0 bytes; allowed is 1 or"),
        (["up", "tiny-autoregressive", "--spill-limit", "0"], "is 0 bytes; allowed is 1 or more"),
        (
            ["up", "tiny-autoregressive", "--prefix-spill", "TRACE"],
            "trace.csv cannot be used: File exists",
        ),
        (
            ["up", "tiny-autoregressive", "--ray", "local", "--prefix-spill", "x"],
            "--prefix-spill is 'x'; with --ray it must be an absolute path",
        ),
        (["up", "tiny-autoregressive", "--decoder", "nosuch"], "no decoding method is called"),
        (
            ["up", "tiny-autoregressive", "--ratio", "pd-serve"],
            "give --prefill and --decode 1 or more, too",
        ),
        (
            ["up", "tiny-autoregressive", "--prefill", "1", "--decode", "2"]
            + ["--ratio", "pd-serve:lengths=100"],
            "give --prefill and --decode 2 or more, too",
        ),
        (
            ["up", "tiny-autoregressive", "--prefill", "1", "--decode", "1", "--ratio", "nexus"],
            "not a control of roles",
        ),
        (["worker", "--role", "boss"], "allowed are mixed, encode, prefill, decode"),
        (["worker", "--address", "8001"], "must have the form HOST:PORT"),
        (["worker", "--address", "a:99999"], "must have the form HOST:PORT"),
        (["status"], "there is no secret"),
        (["plan", "--trace", "x.csv", "--slo", "ttft=1"], "must have the form ttft=SECONDS"),
        (["plan", "--trace", "x.csv", "--slo", "ttft=0,tpot=1"], "both above 0"),
        (["plan", "--trace", "x.csv", "--slo", "ttft=a,tpot=1"], "must have the form ttft=SECONDS"),
        (["plan", "--trace", "x.csv", "--slo", "ttft=1,tpot=1"], "x.csv cannot be read"),
        (["plan", "--trace", "x", "--slo", "ttft=1,tpot=1", "--images", "4"], "the form NxE"),
        (["plan", "--trace", "x", "--slo", "ttft=1,tpot=1", "--images", "0x4"], "the form NxE"),
        (
            ["plan", "--trace", "x.csv", "--slo", "ttft=1,tpot=1", "--search", "nexus"],
            "not a search of placements",
        ),
        (
            ["plan", "--trace", "TRACE", "--slo", "ttft=1,tpot=1", "--split", "nexus"],
            "not a split of attention",
        ),
        (
            ["plan", "--trace", "TRACE", "--slo", "ttft=1,tpot=1", "--split", "step-3"],
            "--instance is None; with --split it must have the form",
        ),
        (
            ["plan", "--trace", "TRACE", "--slo", "ttft=1,tpot=1", "--split", "step-3"]
            + ["--instance", "flops=0,bandwidth=1,network=1"],
            "needs flops, bandwidth and network above 0",
        ),
        (
            ["plan", "--trace", "TRACE", "--slo", "ttft=1,tpot=1", "--split", "step-3"]
            + ["--instance", "flops=1,bandwidth=1,network=1", "--hidden-bytes", "0"],
            "--hidden-bytes is 0",
        ),
        (["ffn", "no-such-model"], "no-such-model"),
        (["drain", "mixed-1", "--address", "[::1]:x"], "must have the form HOST:PORT"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(trace) if one == "TRACE" else one for one in arguments]
    with pytest.raises(SystemExit) as end:
        main.run(["cluster", *given])
    printed = capsys.readouterr().err
    assert end.value.code == 2
    assert message in printed and printed.count("anydecode:") == 1


def test_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYDECODE_CLUSTER_SECRET", "a secret of the tests")
    with pytest.raises(SystemExit):
        main.run(["cluster", "status", "--address", "127.0.0.1:1"])
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "worker", "status", "drain", "ffn", "plan"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.run(["cluster", command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Example: anydecode cluster {command}" in printed


def test_ray_that_is_missing_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit):
        main.run(["cluster", "up", "tiny-autoregressive", "--ray", "auto", "--fleet-port", "0"])
    assert "pip install 'anydecode[cluster]'" in capsys.readouterr().err
