"""`anydecode cluster`: bad input is one line."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "tiny-autoregressive", "-w", "1", "--prefill", "2"], "more roles than --workers 1"),
        (["up", "tiny-autoregressive", "--host", "0.0.0.0"], "lets other machines connect"),
        (["up", "no-such-model"], "no-such-model"),
        (["up", "tiny-autoregressive", "--handover-memory", "much"], "'much' is not a number of"),
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
        (["drain", "mixed-1", "--address", "[::1]:x"], "must have the form HOST:PORT"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.run(["cluster", *arguments])
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


@pytest.mark.parametrize("command", ["up", "worker", "status", "drain", "plan"])
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
