"""Several draft models in one run of the speculative benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.benchmarks import speculative_bench as bench
from anydecode.benchmarks.speculative_answers import PLAIN, memory, run
from anydecode.benchmarks.speculative_company import run_groups
from anydecode.benchmarks.speculative_drafts import find_llm, parse_drafts
from anydecode.benchmarks.speculative_report import print_report
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.tasks.spec_bench import Question
from draft_folders import target_folder

DRAFTED = "speculative-sampling"


def test_drafts_are_named_or_the_default() -> None:
    assert parse_drafts([]) == {"": None}
    copy = "self:int4,layers=20"
    given = parse_drafts(["a=b/c", copy, "twin-2=self:int4,layers=3", "empty=none"])
    assert given == {"": copy, "a": "b/c", "twin-2": "self:int4,layers=3", "empty": "none"}
    assert list(given) == ["", "a", "twin-2", "empty"]
    assert parse_drafts(["./a=b"]) == {"": "./a=b"}


@pytest.mark.parametrize("values", [["a=x", "a=y"], ["x", "y"], ["a="], [""]])
def test_incomplete_or_repeated_drafts_are_refused(values: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="--draft"):
        parse_drafts(values)


def _scripted(draft_seed: int) -> LLM:
    draft = ScriptedModel(vocab_size=263, seed=draft_seed)
    target = ScriptedModel(vocab_size=263, seed=3)
    return LLM(target, tokenizer=ByteTokenizer(), cache_positions=4096, draft=draft)


def test_each_method_runs_with_the_draft_model_it_names() -> None:
    asked = [Question("a", "one two one two"), Question("b", "three")]
    methods = [DRAFTED, f"{DRAFTED}@twin", f"{DRAFTED}:size=2@twin"]
    with _scripted(3) as llm, _scripted(4) as twin:
        llms = {"": llm, "twin": twin}
        assert find_llm(llms, methods[0]) == (llm, DRAFTED)
        assert find_llm(llms, methods[2]) == (twin, f"{DRAFTED}:size=2")
        with pytest.raises(InvalidRequestError, match="give it with --draft other=PATH"):
            find_llm(llms, f"{DRAFTED}@other")
        answers = list(run(llms, asked, methods, [0.0], 24))
        groups = list(run_groups(llms, asked, methods, answers, [2], 24))
        peaks = memory(llms, asked[0], methods, 8)
    assert all(one.same_text for one in answers)
    passes = {
        (one.prompt, one.warm, one.method.removeprefix(DRAFTED)): one.passes for one in answers
    }
    for prompt in (0, 1):
        plain = passes[prompt, False, PLAIN]
        for warm in (False, True):
            # The default draft model is equal to the target, the other one is never right.
            assert passes[prompt, warm, ""] < plain == passes[prompt, warm, "@twin"]
    assert [one.same_text for one in groups] == [2] * (len(methods) + 1)
    assert set(peaks) == set(methods)


def test_the_command_compares_draft_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = target_folder(tmp_path / "model"), tmp_path / "out.json"
    template = {"chat_template": "{{ messages[0].content }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    lines = [json.dumps({"category": "qa", "turns": ["abab"]})]
    (tmp_path / "question.jsonl").write_text("\n".join(lines))
    opened: list[Any] = []

    class Recording(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "LLM", Recording)
        bench.bench_speculative(
            [tmp_path], f"{DRAFTED};{DRAFTED}@part;{DRAFTED}:size=2@part;auto:max_drafts=4@no",
            str(model), ["self", "part=self:layers=2", "no=none"], threads=1, tokens=8,
            temperatures="0", warm=False, company="", json_file=file,
        )  # fmt: skip
    assert len(opened) == 3 and all(one.model is opened[0].model for one in opened)  # loaded once
    drafts = [one.engine.runners["draft"].model for one in opened[:2]]
    assert drafts[0] is opened[0].model and drafts[1].spec.num_layers == 2
    assert "draft" not in opened[2].engine.runners
    report = json.loads(file.read_text())
    rows = {row["method"] for row in report["rows"] if row["category"] == "qa"}
    assert rows == {
        "multi-step", DRAFTED, f"{DRAFTED}@part", f"{DRAFTED}:size=2@part", "auto:max_drafts=4@no",
    }  # fmt: skip
    assert all(row["same_text"] == row["prompts"] for row in report["rows"])
    capsys.readouterr()
    print_report(report)
    printed = capsys.readouterr().out
    assert "draft model: self\n@part: self:layers=2\n@no: none\n" in printed
    with pytest.raises(InvalidRequestError, match="@other"):
        bench.bench_speculative(
            [tmp_path], f"{DRAFTED}@other", str(model), ["part=self:layers=2"], temperatures="0"
        )
