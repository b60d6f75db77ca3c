"""Training of draft models: runs that go on, what begins a run, what is learned from files, and
draft models that draft better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM, catalogue
from anydecode.cli.main import run
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import load_checkpoint
from anydecode.training.block_adapter import task_pair
from anydecode.training.draft_model import DraftModelRun, DraftOptions, read_rows
from anydecode.training.recipes.draft_recipe import DraftRecipe
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes, trained
from train_commands import train_command


@pytest.fixture(scope="module")
def target() -> Checkpoint:
    return load_checkpoint("tiny-autoregressive")


def pairs(target: Checkpoint, count: int = 4) -> list[Any]:
    random = Random(1)
    return [(prompt, answer[:6]) for prompt, answer in
            (task_pair(target.tokenizer, random) for _ in range(count))]  # fmt: skip


def begun(
    target: Checkpoint,
    folder: Path,
    choice: str = "distillspec:layers=1",
    texts: Path | None = None,
    draft: Checkpoint | None = None,
    **options: Any,
) -> DraftModelRun:
    key, given = catalogue.parse(choice)
    settings = {"steps": 4, "answers": 4, "tokens": 4, "batch": 2, **options}
    recipe = DraftOptions(**settings, draft=catalogue.build(key, **given))
    return DraftModelRun(target, folder, recipe, draft, texts, pairs(target))


@pytest.mark.parametrize(
    "choice", ["distillspec:layers=1,on_policy=0.5,warmup=0.25", "fastdraft:layers=1,width=32"]
)
def test_a_run_in_two_parts_gives_the_draft_model_of_one(
    choice: str, target: Checkpoint, tmp_path: Path
) -> None:
    """Also the samples of the draft model depend on the seed and the step alone."""
    whole, resumed = assert_resumes(lambda name: begun(target, tmp_path / name, choice), steps=4)
    assert resumed.num_tokens == whole.num_tokens
    for one, other in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True):
        assert torch.equal(one, other)


def test_code_is_mixed_with_texts_in_the_second_half_of_the_pre_training(
    target: Checkpoint, tmp_path: Path
) -> None:
    texts, code = tmp_path / "texts", tmp_path / "code"
    texts.write_text("copy Ada Ben:\n" * 6)
    code.write_text("def f():\n    return 1\n" * 60)
    recipe = catalogue.build_as("fastdraft:layers=1,width=32", "a recipe", DraftRecipe)
    settings = DraftOptions(steps=8, batch=2, tokens=8, draft=recipe)
    own = DraftModelRun(target, tmp_path / "run", settings, None, texts, pairs(target), code)
    tokenizer: Any = target.tokenizer
    whole = [token for _, part in own.code for token in part]
    assert tokenizer.decode(whole) == code.read_text()
    assert len(own.code) > 1 and all(not prompt for prompt, _ in own.code)
    for step in range(8):
        own.step = step
        rows, objective = own.step_rows()
        mixed = [row for row in rows if row in own.code]
        assert len(mixed) == (2 if step in (2, 3) else 0) and len(rows) == 2 + len(mixed)
        assert objective == "cross-entropy"
    given = replace(settings, draft=replace(recipe, mixed=0.0))
    with pytest.raises(InvalidRequestError, match="leave --code out"):
        DraftModelRun(target, tmp_path / "other", given, None, texts, pairs(target), code)
    code.write_text("")
    with pytest.raises(InvalidRequestError, match="no code to learn from"):
        DraftModelRun(target, tmp_path / "empty", settings, None, texts, pairs(target), code)


def test_first_layers_keep_the_targets_embedding_and_head(
    target: Checkpoint, tmp_path: Path
) -> None:
    made = trained(begun(target, tmp_path, "distillspec:layers=2,warmup=1.0", rate=1e-2))
    own, whole = made.draft.state_dict(), made.target.state_dict()
    changed = {name for name in own if not torch.equal(own[name], whole[name])}
    assert changed and all("blocks" in name or "ln_f" in name for name in changed)
    assert made.draft.shape.layers == 2


def test_another_run_in_the_folder_is_refused(target: Checkpoint, tmp_path: Path) -> None:
    trained(begun(target, tmp_path, steps=1))
    with pytest.raises(AnydecodeError, match="holds a run of another recipe or model"):
        begun(target, tmp_path, "distillspec:layers=1,divergence=tv", steps=1)


def test_a_line_is_a_text_or_a_prompt_and_an_answer(target: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("copy Ada:\tAda\n\ncopy Ben Carl: Ben Carl\n" + "Ada " * 400 + "\n")
    tokenizer: Any = target.tokenizer
    (prompt, answer), text, *long = read_rows(file, tokenizer, 8)
    assert prompt == tokenizer.encode("copy Ada:")
    assert answer == [*tokenizer.encode("Ada", special=False), min(tokenizer.eos_ids)]
    assert text == ([], tokenizer.encode("copy Ben Carl: Ben Carl", special=False))
    assert all(not prompt and len(part) <= 256 for prompt, part in long) and len(long) > 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "no text to learn from"),
        (b"\n\n", "no text to learn from"),
        (b"copy Ada: Ada\n", "data=fixed needs --texts"),
        (b"copy Ada:\tAda\n", "data=fixed needs --texts"),
        (b"Ada " * 3000 + b"\tAda\nAda\tAda\n", "positions: give fewer"),
    ],
    ids=["missing", "bytes", "empty", "blank", "no answers", "one answer", "too long"],
)
def test_malformed_files_are_refused_in_one_line(
    content: bytes | None, message: str, target: Checkpoint, tmp_path: Path
) -> None:
    file = tmp_path / "texts.tsv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(AnydecodeError, match=message) as error:
        begun(target, tmp_path / "run", "distillspec:layers=1,data=fixed", texts=file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("choice", "options", "message"),
    [
        ("distillspec:layers=5", {}, "layers is 5; the model has 4 layers"),
        ("fastdraft:width=33", {}, "width is 33; allowed are multiples of 32"),
        ("distillspec:data=fixed", {}, "data=fixed needs --texts"),
        ("distillspec", {"steps": 0}, "must be more than 0"),
        ("distillspec", {"minutes": 1.0}, "either minutes or steps"),
        ("distillspec", {"tokens": 4096}, "positions: give fewer"),
    ],
    ids=str,
)
def test_bad_runs_are_refused(
    choice: str, options: dict[str, Any], message: str, target: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(AnydecodeError, match=message) as error:
        begun(target, tmp_path, choice, **options)
    assert "\n" not in str(error.value)


def test_a_draft_model_of_another_vocabulary_is_refused(
    target: Checkpoint, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(AnydecodeError, match="needs the vocabulary of its target"):
        begun(target, tmp_path, draft=load_checkpoint(model))


def test_fixed_answers_and_a_given_draft_model(target: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("copy Ada:\tAda\ncopy Ben:\tBen\n")
    choice = "distillspec:layers=1,data=fixed,on_policy=0,warmup=0"
    first = trained(begun(target, tmp_path / "first", choice, texts=file, steps=1))
    rows, objective = first.step_rows()
    assert objective == "forward-kl" and rows == first.pairs[1:] and len(first.pairs) == 2
    draft = load_checkpoint(first.draft_folder)
    second = begun(target, tmp_path / "second", choice, texts=file, draft=draft)
    for name, weight in second.draft.state_dict().items():
        assert torch.equal(weight, first.draft.state_dict()[name].bfloat16().float()), name
    assert all(weight.requires_grad for weight in second.draft.parameters())


@pytest.mark.parametrize(
    "given", ["--rate nan", "--rate -1", "--rate 0", "--minutes nan", "--minutes inf"]
)
def test_bad_options_of_the_command_are_refused_in_one_line(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["train", "draft-model", "--model", "tiny-autoregressive", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        run([*arguments, *given.split()])
    assert ended.value.code
    error = capsys.readouterr().err.strip()
    assert "must be a finite number above 0" in error and "\n" not in error
    assert not out.exists()


@pytest.mark.slow
def test_the_command_trains_and_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys,
        "draft-model --answers 8 --recipe distillspec:layers=2,divergence=jsd --steps 4 --tokens 8",
        out=out,
        plot=plot,
    )
    assert log["steps"] == 4 and log["tokens"] > 0
    assert plot.read_text().lstrip().startswith("<?xml")
    assert {*log["results"]} == {"before", "after"}
    assert json.loads((out / "log.json").read_text())["results"] == log["results"]
    with LLM("tiny-autoregressive", draft=log["path"]) as llm:
        assert_names_of_plain_decoding(llm, "speculative-sampling")


@pytest.mark.slow
def test_a_distilled_model_is_the_target_of_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, command = tmp_path / "target", "draft-model --answers 8 --steps 2 --tokens 8 --recipe"
    train_command(capsys, f"{command} distillspec:layers=2", out=target)
    model = target / "draft"
    train_command(capsys, f"{command} distillspec:layers=1", model, out=tmp_path / "draft")
    with LLM(model, draft=tmp_path / "draft" / "draft") as llm:
        texts = [
            llm.generate("Question", decoder=decoder, max_tokens=8, trace=True)
            for decoder in ("autoregressive", "speculative-sampling")
        ]
    assert texts[0].tokens == texts[1].tokens
    assert any(event["drafted"] for event in texts[1].trace or ())


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "jsd", "tv"])
def test_distillation_raises_the_acceptance(
    divergence: str, target: Checkpoint, tmp_path: Path
) -> None:
    recipe = catalogue.build("distillspec", layers=1, divergence=divergence)
    settings = DraftOptions(steps=120, answers=64, tokens=16, batch=8, rate=2e-3, draft=recipe)
    made = DraftModelRun(target, tmp_path, settings)
    made.train()
    first, *_, last = (entry["acceptance"] for entry in made.history if "acceptance" in entry)
    # A run without training gains nothing, and these 0.08 to 0.13.
    assert last > first + 0.03, (first, last)
