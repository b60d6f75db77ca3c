"""Certificates: what they require, what an exception becomes, and how a run resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.catalogue import Card
from anydecode.certification import certify as certify_module
from anydecode.certification.certify import certify, claim, load_oracle_tests
from anydecode.certification.checks import Certificate, Check
from anydecode.cli import main
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, MissingPackageError
from anydecode.kernels.library import load_library
from anydecode.results_log import ResultsLog
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

SEAM_METHODS = (
    "autoregressive",
    "prompt-lookup",
    "beam",
    "llada",
    "layerskip",
    "pearl",
    "classifier-free-guidance",
    "multi-step",
)
KEYS = [card.key for card in catalogue.cards()]
CLAIMS: dict[str, list[Check]] = {}


@pytest.mark.slow
def test_certificates_run_without_torch() -> None:
    """Only the parts that train with torch are reported as not run."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    code = """
import sys
sys.modules["torch"] = None
from anydecode.certification.certify import certify_one
for key in ("fastkv", "gear", "easyspec", "contrastive-search"):
    assert certify_one(key).passed, key
missing = [check for check in certify_one("autodeco").checks if not check.passed]
assert [check.passed for check in missing] == [None, None], missing
assert all("needs package torch" in check.detail for check in missing), missing
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_that_cover_the_decoder_interface_are_in_the_catalogue() -> None:
    assert set(SEAM_METHODS) <= set(KEYS)
    assert set(KEYS) <= set(load_oracle_tests())


class Careless(Decoder):
    """Accepts the first draft without verification."""

    card = Card("careless", "speculative", paper="", exactness="token-exact")

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            tree = TokenTree.chain([65])
            scores = yield sequence.verify(tree)
            sequence.accept([0], [65, scores.sample(1)], scores)


class Forgetful(Decoder):
    """Keeps a counter in a local variable, not in `sequence.state`: restarts change its text."""

    card = Card("forgetful", "speculative", paper="", exactness="lossy")

    def decode(self, sequence: Sequence) -> Decoding:
        count = 0
        while not sequence.finished:
            scores = yield sequence.score()
            count += 1
            sequence.emit([scores.sampled[-1] if count % 3 else 66])


def test_a_method_that_skips_verification_fails() -> None:
    checks = {check.name: check.passed for check in claim(Careless.card, Careless)}
    assert not checks["equals plain decoding, scripted, T=0.0"]
    assert checks["batched equals alone, scripted, T=0.0"]


def test_a_method_that_loses_state_on_restart_fails() -> None:
    checks = {check.name: check.passed for check in claim(Forgetful.card, Forgetful)}
    assert checks["batched equals alone, scripted, T=0.0"]
    assert not checks["restarted at random yields, scripted, T=0.0"]


@pytest.mark.usefixtures("claims_once")
def test_a_method_without_an_oracle_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(load_oracle_tests(), "multi-step")
    assert not certify(["multi-step"])[0].passed


def test_a_method_of_another_package_is_found_through_its_entry_point(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    info = tmp_path / "echo_example-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-example\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[anydecode.decoders]\necho = echo_decoder:Echo\n")
    paths = [str(tmp_path), str(examples), os.environ["PYTHONPATH"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "anydecode", "methods", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "echo" in {card["key"] for card in json.loads(done.stdout)}
    done = subprocess.run(
        [sys.executable, "-m", "anydecode", "certify", "echo_decoder:Echo", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(certificate["passed"] for certificate in json.loads(done.stdout))


def test_cards_cite_their_papers() -> None:
    card = Card("x", "search", "One Title (arXiv:1211.3711); Other (arXiv:2404.16710)", "lossy")
    assert card.citation.count("@misc") == 2
    assert "title = {One Title}, year = {2012}, eprint = {1211.3711}" in card.citation
    assert all(one.citation for one in catalogue.cards() if "arXiv:" in one.paper)


@pytest.fixture
def claims_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim of each method is checked once in this file."""

    def claim_once(card: Card, make: Any) -> list[Check]:
        if card.key not in CLAIMS:
            CLAIMS[card.key] = list(claim(card, make))
        return CLAIMS[card.key]

    monkeypatch.setattr(certify_module, "claim", claim_once)


def broken(error: Exception) -> Any:
    """An oracle test that passes one check and then raises `error`."""

    def checks() -> Iterator[Check]:
        yield Check("first", True)
        raise error

    return checks


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder for this test; the kernels stay in the default one."""
    load_library()
    monkeypatch.setattr("anydecode.folders.default_cache", lambda: tmp_path)
    return tmp_path / "certify"


def certify_by_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["certify", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("claims_once")
@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (
            MissingPackageError("this", "jedi", "'anydecode[monitors]'"),
            "not run",
            "not run: needs package jedi (pip install 'anydecode[monitors]')",
        ),
        (
            ModuleNotFoundError("No module named 'foo.bar'", name="foo.bar"),
            "not run",
            "not run: needs package foo (pip install foo)",
        ),
        (ModuleNotFoundError("x", name="anydecode.gone"), "failed", "ModuleNotFoundError: x"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
        (InvalidRequestError("no\nline"), "failed", "no line"),
    ],
)
def test_an_exception_in_one_part_is_a_check_of_that_part(
    error: Exception, status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(load_oracle_tests(), "multi-step", broken(error))
    certificate, other = certify(["multi-step", "autoregressive"])
    assert certificate.status == status and not certificate.passed and other.passed
    *before, first, last = certificate.checks
    assert before and all(check.passed for check in before)
    assert first == Check("first", True) and last == Check("oracle test", last.passed, detail)
    assert certificate.to_dict()["checks"][-1]["status"] == status


def test_a_failed_check_outweighs_one_that_was_not_run() -> None:
    checks = [Check("a", True), Check("b", None), Check("c", False)]
    assert [Certificate("x", "lossy", checks[:n]).status for n in range(4)] == [
        "failed",
        "passed",
        "not run",
        "failed",
    ]


@pytest.mark.usefixtures("claims_once")
def test_certification_continues_after_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_folder: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jedi", None)
    assert certify_by_command("monitors", "multi-step") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "not run  monitors",
        "        names that the object does not have: not run: needs package jedi"
        " (pip install 'anydecode[monitors]')",
        "passed  multi-step",
    ]
    *_, last = err.splitlines()
    reason = "needs package jedi (pip install 'anydecode[monitors]')"
    assert last == f"not run in full: monitors: {reason}"
    monkeypatch.setitem(load_oracle_tests(), "multi-step", broken(ZeroDivisionError()))
    assert certify_by_command("monitors", "multi-step", "--json") == 1
    monitors, following = json.loads(capsys.readouterr().out)
    assert (monitors["status"], following["status"]) == ("not run", "failed")
    assert [one["status"] for one in monitors["checks"]][-2:] == ["passed", "not run"]


def test_an_unknown_key_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "certify_one", lambda *_: pytest.fail("it began"))
    with pytest.raises(InvalidRequestError, match="nonsense"):
        certify(["multi-step", "nonsense"])


KILLED = """
import os, sys
from anydecode.cli import main
from anydecode.certification import certify

whole = certify.certify_one

def one(key, model=None):
    print("tried", key, file=sys.stderr, flush=True)
    if key == sys.argv[2]:
        os.kill(os.getpid(), 9)
    return whole(key, model)

certify.certify_one = one
main.run(["certify", "autoregressive", "multi-step", "beam", "--keep", sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills itself by signal")
def test_a_killed_certification_resumes(tmp_path: Path) -> None:
    keep = tmp_path / "kept.jsonl"
    program = [sys.executable, "-c", KILLED, str(keep)]
    first = subprocess.run([*program, "multi-step"], capture_output=True, text=True)
    assert first.returncode == -9 and first.stdout == "passed  autoregressive\n"
    assert len(keep.read_text().splitlines()) == 2
    second = subprocess.run([*program, "none"], capture_output=True, text=True, check=True)
    shown = [line.partition(",")[0] for line in second.stderr.splitlines()]
    assert shown == [
        "1 of 3 methods: multi-step",
        "tried multi-step",
        "2 of 3 methods: beam",
        "tried beam",
        "3 of 3 methods: beam",
    ]
    assert [line.split()[-1] for line in second.stdout.splitlines()] == [
        "autoregressive",
        "multi-step",
        "beam",
    ]


def test_an_interrupted_certification_resumes_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_folder: Path
) -> None:
    tried: list[str] = []

    def one(key: str, model: Any = None) -> Certificate:
        tried.append(key)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return Certificate(key, "token-exact", [Check("c", key != "beam")])

    monkeypatch.setattr(certify_module, "certify_one", one)
    keys = ["autoregressive", "beam", "multi-step"]
    assert certify_by_command(*keys) == 1  # one failed
    assert "interrupted: 2 of 3" in capsys.readouterr().err
    assert certify_by_command(*keys) == 1
    assert tried[3:] == ["beam", "multi-step"]  # failed methods are tested again
    assert capsys.readouterr().out.splitlines()[0] == "passed  autoregressive"
    certify_by_command(*keys)
    assert tried[5:] == keys  # a complete run leaves no results to resume
    (log,) = cache_folder.iterdir()
    assert len(log.read_text().splitlines()) == 1


def test_methods_of_other_packages_are_always_tested_again(tmp_path: Path) -> None:
    key = f"{__name__}:Careless"
    for count in (1, 2):
        certify([key], results_log=ResultsLog(tmp_path / "kept", {}))
        assert len(ResultsLog(tmp_path / "kept", {}).entries) == count
