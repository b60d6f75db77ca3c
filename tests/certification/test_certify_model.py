"""Certification on a real model: a checkpoint on disk, in its stored format and in others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import catalogue
from anydecode.catalogue import Card, Entry
from anydecode.certification import certify_model
from anydecode.certification.certify_model import (
    STORED,
    BatchOutcome,
    Trials,
    certificates,
    outcomes,
)
from anydecode.certification.checks import Certificate
from anydecode.cli import main
from anydecode.cli.certify import drafting_keys
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, MissingPackageError
from anydecode.kernels.library import load_library
from anydecode.results_log import ResultsLog
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import TokenTree
from anydecode.tasks.spec_bench import Question
from anydecode.training import checkpoint
from anydecode.training.tokenizer import build_tokenizer
from anydecode.training.transformer import Shape, Transformer

QUESTIONS = [
    Question("a", "one two one two one"),
    Question("a", "ab ab ab"),
    Question("b", "the cat and the cat"),
    Question("b", "x"),
]
TRIALS = Trials(
    QUESTIONS, tokens=12, batch=3, sample=3, sample_tokens=8, dtypes=(STORED, "float32")
)


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


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder for this test; the kernels stay in the default one."""
    load_library()
    monkeypatch.setattr("anydecode.folders.default_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "certify"


class Unverified(Decoder):
    """Emits a drafted token without verification by the target."""

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            draft = sequence.all_tokens[-1]
            scores = yield sequence.verify(TokenTree.chain([draft]))
            sequence.accept([0], [draft, scores.sample(1)], scores)


class Forgetful(Decoder):
    """Correct until it is restarted: a local variable decides the first token."""

    def decode(self, sequence: Sequence) -> Decoding:
        scores = yield sequence.score()
        num_tokens = len(sequence.tokens)
        sequence.emit([scores.sampled[-1] if num_tokens == 0 else 5])
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])


@pytest.fixture
def wrong_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, method in (("unverified", Unverified), ("forgetful", Forgetful)):
        card = Card(name, "speculative", paper="", exactness="token-exact")
        monkeypatch.setitem(catalogue.entries(), name, Entry(card, method))
    yield


def certified(model: Path, keys: list[str], trials: Trials, **options: Any) -> list[Certificate]:
    return certificates(outcomes(str(model), keys, trials, threads=1, **options))


def test_exact_methods_are_certified_in_every_format(model: Path) -> None:
    keys = ["prompt-lookup", "speculative-sampling"]
    found = certified(model, keys, TRIALS, draft="self:layers=2")
    for certificate in found:
        assert certificate.passed, [one for one in certificate.checks if not one.passed]
        names = [check.name for check in certificate.checks]
        assert len(names) == len(set(names)) == 1 + 2 * 2 * 2
        assert names[0].startswith("all prompts, as stored")
        assert sum("float32" in name for name in names) == 4
        assert "4 prompts, 48 tokens" in certificate.checks[0].detail
        assert all("3 prompts, 24 tokens" in check.detail for check in certificate.checks[1:])
    assert [certificate.key for certificate in found] == keys


def test_broken_decoders_fail(model: Path, wrong_methods: None) -> None:
    trials = Trials(QUESTIONS, tokens=40, batch=2, sample=4, sample_tokens=40, dtypes=(STORED,))
    unverified, forgetful = certified(model, ["unverified", "forgetful"], trials, draft=None)
    assert not any(check.passed for check in unverified.checks)
    assert "differ: first at token 0" in unverified.checks[0].detail
    failed = [check.name for check in forgetful.checks if not check.passed]
    assert failed and all("restarted" in name for name in failed)


def test_methods_that_are_not_token_exact_are_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="only token-exact") as refusal:
        certified(model, ["typical-acceptance"], TRIALS)
    assert "\n" not in str(refusal.value)


def test_a_method_that_cannot_run_is_not_certified(model: Path) -> None:
    (found,) = certified(model, ["speculative-sampling"], TRIALS, draft=None)
    assert not found.passed
    assert all("draft model" in check.detail for check in found.checks)


def test_prompts_are_prefilled_once_per_batch_by_each_method_in_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [Question("a", f"{word} " * 20) for word in ("one", "two", "three", "four")]
    trials = Trials(long, tokens=4, batch=2, sample=0)
    hits: dict[tuple[str, int], int] = {}
    outcome = certify_model.Bench.outcome

    def recording(self: certify_model.Bench, key: str, batch: certify_model.Batch) -> BatchOutcome:
        cache = self.llm.engine.runners[TARGET].prefixes
        before = cache.num_hits
        found = outcome(self, key, batch)
        hits[key, batch.number] = cache.num_hits - before
        return found

    monkeypatch.setattr(certify_model.Bench, "outcome", recording)
    found = certified(model, ["copyspec", "prompt-lookup"], trials, draft=None)
    assert all(one.passed for one in found)
    assert hits["copyspec", 0] < hits["prompt-lookup", 0]
    assert hits["copyspec", 1] > hits["prompt-lookup", 1]


def test_an_interrupted_run_resumes(model: Path, wrong_methods: None, tmp_path: Path) -> None:
    trials = Trials(QUESTIONS, tokens=8, batch=2, sample=2, sample_tokens=4, dtypes=("float32",))
    keys, keep = ["copyspec", "unverified"], tmp_path / "kept.jsonl"
    options: dict[str, Any] = {"draft": None, "threads": 1}
    complete = list(outcomes(str(model), keys, trials, **options))
    first = list(
        islice(outcomes(str(model), keys, trials, results_log=ResultsLog(keep, {}), **options), 3)
    )
    assert first == complete[:3]
    assert [one.key for one in first] == ["copyspec", "unverified", "copyspec"]
    results_log = ResultsLog(keep, {})
    assert len(results_log.entries) == 3
    rest = list(outcomes(str(model), keys, trials, results_log=results_log, **options))
    assert sorted(rest, key=str) == sorted(complete, key=str)
    passed = sum(not one.differ for one in complete)
    assert len(keep.read_text().splitlines()) == 1 + 3 + len(complete) - 2  # two had passed
    again = ResultsLog(keep, {})
    list(outcomes(str(model), keys, trials, results_log=again, **options))
    num_run = len(keep.read_text().splitlines()) - 1 - len(again.entries)
    assert num_run == len(complete) - passed  # failed batches are run again
    keep.write_text('{}\n{"key": 1}\n')
    with pytest.raises(InvalidRequestError, match="holds no results"):
        next(outcomes(str(model), keys, trials, results_log=ResultsLog(keep, {}), **options))


def test_an_exception_in_a_method_does_not_end_the_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Decoder):
        def decode(self, sequence: Sequence) -> Decoding:
            yield sequence.score()
            raise ZeroDivisionError

    card = Card("breaking", "speculative", paper="", exactness="token-exact")
    monkeypatch.setitem(catalogue.entries(), "breaking", Entry(card, Breaking))
    breaking, whole = certified(model, ["breaking", "copyspec"], TRIALS, draft=None)
    assert whole.passed and not any(check.passed for check in breaking.checks)


def test_a_format_that_cannot_be_opened_does_not_end_the_run(model: Path) -> None:
    trials = Trials(QUESTIONS, tokens=4, sample=1, sample_tokens=4, dtypes=("int3", "float32"))
    (found,) = certified(model, ["copyspec"], trials, draft=None)
    failed = [check for check in found.checks if not check.passed]
    assert len(failed) == 4 and all(", int3," in check.name for check in failed)
    assert all("int3" in check.detail for check in failed)
    assert len(found.checks) == 1 + 4 + 4


def test_a_method_without_its_package_is_not_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lacking(Decoder):
        def decode(self, sequence: Sequence) -> Decoding:
            yield sequence.score()
            raise MissingPackageError("this", "jedi", "jedi")

    card = Card("lacking", "speculative", paper="", exactness="token-exact")
    monkeypatch.setitem(catalogue.entries(), "lacking", Entry(card, Lacking))
    trials, keep = Trials(QUESTIONS, tokens=4, sample=0), tmp_path / "kept.jsonl"
    for _ in range(2):  # it is run again
        results_log = ResultsLog(keep, {})
        found = certified(
            model, ["lacking", "copyspec"], trials, draft=None, results_log=results_log
        )
        by_key = {one.key: one for one in found}
        assert by_key["copyspec"].passed and by_key["lacking"].status == "not run"
        assert (
            by_key["lacking"].checks[0].detail == "not run: needs package jedi (pip install jedi)"
        )
    assert len(keep.read_text().splitlines()) == 1 + 2 + 1


def test_an_interrupted_run_prints_its_results(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache_folder: Path,
) -> None:
    def stopped(*arguments: Any, **options: Any) -> Iterator[BatchOutcome]:
        yield from islice(outcomes(*arguments, **options), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(certify_model, "outcomes", stopped)
    options = ["--model", str(model), "--tokens", "4", "--batch", "2", "--limit", "1"]
    options += ["--sample", "0", "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        main.run(["certify", "copyspec", "stand", *options])
    assert ended.value.code == main.INTERRUPTED
    out, err = capsys.readouterr()
    assert "4 prompts, 16 tokens" in out and "2 prompts, 8 tokens" in out
    assert "1 of 8 trials: all prompts" in err and "interrupted: 3 of 8 trials were run" in err
    (log,) = cache_folder.iterdir()
    assert len(log.read_text().splitlines()) == 1 + 3
    monkeypatch.setattr(certify_model, "outcomes", outcomes)
    with pytest.raises(SystemExit):
        main.run(["certify", "copyspec", "stand", *options])
    assert "8 of 8" in capsys.readouterr().err
    assert len(log.read_text().splitlines()) == 1  # emptied by the complete run


def test_the_default_methods_can_draft_for_any_model() -> None:
    keys = drafting_keys()
    assert {"auto", "opt-tree", "pearl", "layerskip"} <= set(keys)
    assert not {"deer", "typical-acceptance", "hidden-transfer", "mtp-future"} & set(keys)


def test_methods_with_parameters_are_certified(model: Path) -> None:
    trials = replace(TRIALS, sample=0)
    found = list(outcomes(str(model), ["suffix:size=3", "copyspec"], trials, draft=None))
    assert {one.key for one in found} == {"suffix:size=3", "copyspec"}
    assert not any(one.differ for one in found)
    with pytest.raises(InvalidRequestError, match="no-such"):
        list(outcomes(str(model), ["suffix:no-such=3"], trials, draft=None))


def test_the_sample_alternates_between_categories() -> None:
    (first, *_), *_ = (one.questions for one in TRIALS.batches()["float32"])
    assert [one.category for one in TRIALS.interleaved()] == ["a", "b", "a", "b"]
    assert first == QUESTIONS[0]


def test_the_command_line(
    model: Path, wrong_methods: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"category": one.category, "turns": [one.text]}) for one in QUESTIONS]
    (tmp_path / "question.jsonl").write_text("\n".join(lines))
    options = ["--model", str(model), "--data", str(tmp_path), "--tokens", "16", "--batch", "2"]
    options += ["--sample", "0", "--threads", "1", "--draft", "self:layers=2"]
    with pytest.raises(SystemExit) as ended:
        main.run(["certify", "copyspec", "unverified", *options])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "passed  copyspec" in out and "FAILED  unverified" in out
    assert "not certified: unverified" in err
    options += ["--sample", "1", "--sample-tokens", "3", "--dtypes", "as stored"]
    options += ["--keep", str(tmp_path / "kept.jsonl")]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main.run(["certify", "copyspec", *options])
        assert not ended.value.code
        out = capsys.readouterr().out
        assert "4 prompts, 64 tokens" in out and "T=0, 3 tokens, alone: 1 prompts" in out
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 7  # no batch was run twice
