"""Certification on a real model: a checkpoint on disk, in its own format and in others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anydecode import catalogue
from anydecode.catalogue import Card, Entry
from anydecode.cli import main
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.certify_model import STORED, Trials, certify_on
from anydecode.evaluation.speculative_bench import Question
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree
from anydecode.training import checkpoint
from anydecode.training.tokenizer import build_tokenizer
from anydecode.training.transformer import Shape, Transformer

ASKED = [
    Question("a", "one two one two one"),
    Question("a", "ab ab ab"),
    Question("b", "the cat and the cat"),
    Question("b", "x"),
]
TRIALS = Trials(ASKED, tokens=12, batch=3, sample=3, sample_tokens=8, dtypes=(STORED, "float32"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with a tokenizer and a chat template."""
    tokenizer = build_tokenizer()
    shape = Shape(tokenizer.get_vocab_size(), width=32, layers=3, heads=4, hidden=48, kv_heads=2)
    torch.manual_seed(0)
    network = Transformer(shape)
    for weight in network.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    checkpoint.save_llama(folder, network.state_dict(), shape, tokenizer)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


class Unverified(Decoder):
    """Says a drafted token without asking whether the target would."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            draft = sequence.all_tokens[-1]
            scores = yield sequence.verify(TokenTree.chain([draft]))
            sequence.accept([0], [draft, scores.pick(1)], scores)


class Forgetful(Decoder):
    """Right until it is started again: a local decides what it says."""

    def decode(self, sequence: Sequence) -> Decoding:
        scores = yield sequence.score()
        begun = len(sequence.tokens)
        sequence.emit([scores.picks[-1] if begun == 0 else 5])
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.picks[-1]])


@pytest.fixture
def mistakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, method in (("unverified", Unverified), ("forgetful", Forgetful)):
        card = Card(name, "speculative", paper="", exactness="token-exact")
        monkeypatch.setitem(catalogue.entries(), name, Entry(card, method))
    yield


def test_exact_methods_are_certified_in_every_format(model: Path) -> None:
    done: list[str] = []
    keys = ["prompt-lookup", "speculative-sampling"]
    found = certify_on(
        str(model),
        keys,
        TRIALS,
        draft="self:layers=2",
        threads=1,
        on_done=lambda key, check: done.append(key),
    )
    for certificate in found:
        assert certificate.passed, [one for one in certificate.checks if not one.passed]
        names = [check.name for check in certificate.checks]
        assert len(names) == len(set(names)) == 1 + 2 * 2 * 2
        assert names[0].startswith("all prompts, as stored")
        assert sum("float32" in name for name in names) == 4
        assert "4 prompts, 48 tokens" in certificate.checks[0].detail
    assert [certificate.key for certificate in found] == keys
    assert len(done) == sum(len(certificate.checks) for certificate in found)


def test_broken_decoders_fail(model: Path, mistakes: None) -> None:
    trials = Trials(ASKED, tokens=40, batch=2, sample=4, sample_tokens=40, dtypes=(STORED,))
    unverified, forgetful = certify_on(
        str(model), ["unverified", "forgetful"], trials, draft=None, threads=1
    )
    assert not any(check.passed for check in unverified.checks)
    assert "differ; first at token 0" in unverified.checks[0].detail
    failed = [check.name for check in forgetful.checks if not check.passed]
    assert failed and all("restarted" in name for name in failed)


def test_what_is_not_token_exact_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="only token-exact") as refusal:
        certify_on(str(model), ["typical-acceptance"], TRIALS)
    assert "\n" not in str(refusal.value)


def test_a_method_that_cannot_run_is_not_certified(model: Path) -> None:
    (found,) = certify_on(str(model), ["speculative-sampling"], TRIALS, draft=None, threads=1)
    assert not found.passed
    assert all("draft model" in check.detail for check in found.checks)


def test_the_sample_takes_categories_in_turn() -> None:
    assert [one.category for one in TRIALS.spread()] == ["a", "b", "a"]


def test_by_the_command_line(
    model: Path, mistakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"category": one.category, "turns": [one.text]}) for one in ASKED]
    (tmp_path / "question.jsonl").write_text("\n".join(lines))
    options = ["--model", str(model), "--data", str(tmp_path), "--tokens", "16", "--batch", "2"]
    options += ["--sample", "0", "--threads", "1", "--draft", "self:layers=2"]
    with pytest.raises(SystemExit) as ended:
        main.run(["certify", "copyspec", "unverified", *options])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "passed  copyspec" in out and "FAILED  unverified" in out
    assert "not certified: unverified" in err
