"""Every method of the catalogue carries a passing certificate; mistakes do not get one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anydecode import catalogue
from anydecode.catalogue import Card
from anydecode.decoders.decoder import Decoder
from anydecode.evaluation.certify import certify, certify_one, claim, load_mechanisms
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

PROOFS = (
    "autoregressive",
    "prompt-lookup",
    "beam",
    "llada",
    "layer-draft",
    "parallel-draft",
    "classifier-free-guidance",
    "following",
)
KEYS = [card.key for card in catalogue.cards()]


@pytest.mark.parametrize("key", KEYS)
def test_certificate(key: str) -> None:
    certificate = certify_one(key)
    failed = [check for check in certificate.checks if not check.passed]
    assert certificate.passed, failed
    assert len(certificate.checks) >= 2


def test_the_proofs_of_the_seam_are_in_the_catalogue() -> None:
    assert set(PROOFS) <= set(KEYS)
    assert set(KEYS) <= set(load_mechanisms())


class Careless(Decoder):
    """Accepts the first draft without looking."""

    card = Card("careless", "speculative", paper="", exactness="token-exact")

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            tree = TokenTree.chain([65])
            scores = yield sequence.verify(tree)
            sequence.accept([0], [65, scores.pick(1)], scores)


class Forgetful(Decoder):
    """Keeps in a local what belongs into `sequence.state`, so that restarts change its text."""

    card = Card("forgetful", "speculative", paper="", exactness="lossy")

    def decode(self, sequence: Sequence) -> Decoding:
        said = 0
        while not sequence.finished:
            scores = yield sequence.score()
            said += 1
            sequence.emit([scores.picks[-1] if said % 3 else 66])


def test_a_careless_method_is_found_out() -> None:
    checks = {check.name: check.passed for check in claim(Careless.card, Careless)}
    assert not checks["equals plain decoding, scripted, T=0.0"]
    assert checks["batched equals alone, scripted, T=0.0"]


def test_a_forgetful_method_is_found_out() -> None:
    checks = {check.name: check.passed for check in claim(Forgetful.card, Forgetful)}
    assert checks["batched equals alone, scripted, T=0.0"]
    assert not checks["restarted at random yields, scripted, T=0.0"]


def test_a_method_without_a_mechanism_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(load_mechanisms(), "following")
    assert not certify(["following"])[0].passed


def test_a_strangers_method_is_found_through_its_entry_point(tmp_path: Path) -> None:
    examples = Path(__file__).parents[1] / "examples"
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
