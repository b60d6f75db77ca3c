"""Training of drafters: training raises acceptance, runs resume, data is shared."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from anydecode import LLM  # noqa: E402
from anydecode.certification.tiny import tiny_network  # noqa: E402
from anydecode.cli.main import run  # noqa: E402
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError  # noqa: E402
from anydecode.training.drafter import DrafterOptions, DrafterRun  # noqa: E402
from anydecode.training.drafter_data import DrafterData, EngineWriter  # noqa: E402
from anydecode.training.drafters import RECIPES, find_recipe  # noqa: E402
from anydecode.training.drafters.eagle3 import Eagle3  # noqa: E402
from anydecode.training.drafters.layers import layer_shape  # noqa: E402
from anydecode.training.drafters.learner import spread_taps  # noqa: E402
from anydecode.training.generated import read_states, without_loop  # noqa: E402
from anydecode.training.own_answers import task_prompts  # noqa: E402
from train_commands import train_command  # noqa: E402

OPTIONS = DrafterOptions(steps=30, texts=90, tokens=16, vocabulary=30, batch=8, rate=1e-2)


@pytest.mark.slow
def test_a_run_trains_a_drafter_and_the_command_continues_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[str] = []
    half = DrafterRun(model, tmp_path, replace(OPTIONS, steps=15))
    half.run(lambda stage, done, detail: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["texts", "states", "training", "evaluation"]
    plot = tmp_path / "curve.svg"
    settings = "--steps 30 --texts 90 --tokens 16 --vocabulary 30 --batch 8 --rate 0.01"
    found = train_command(capsys, f"drafter {settings}", model, out=tmp_path, plot=plot)
    assert found["path"] == str(tmp_path / "drafter")
    assert found == {"path": found["path"], **json.loads((tmp_path / "log.json").read_text())}
    assert [entry["step"] for entry in found["history"] if "held_out" in entry] == [0, 15, 30]
    first, *_, last = [one["held_out"] for one in found["history"] if "held_out" in one]
    assert last[0] > first[0] + 0.05
    assert found["results"]["temperature 0.0"]["tokens_per_pass"] > 1.0
    assert "probability of acceptance" in plot.read_text()


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and states that all recipes can read."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Eagle3, "taps", staticmethod(lambda depth: (1, *spread_taps(depth), depth - 1, depth))
        )
        DrafterRun(model, folder, replace(OPTIONS, steps=1), data=folder / "data").collect()
    return folder / "data"


def depth_of(recipe: str) -> int:
    """Two drafts, or as many as the recipe can learn."""
    return min(2, find_recipe(recipe).default_depth)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_raises_acceptance_over_the_untrained_twin(
    recipe: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """In the engine's loop, on held-out prompts."""
    options = replace(OPTIONS, recipe=recipe, steps=60, depth=depth_of(recipe))
    trained = DrafterRun(model, tmp_path, options, data=data)
    trained.prepare()
    trained.save()
    trained.evaluate()
    first = trained.results["temperature 0.0"]
    trained.run()
    last = trained.results["temperature 0.0"]
    assert last["tokens_per_pass"] > first["tokens_per_pass"] + 0.05
    assert last["accepted_by_depth"][0] > first["accepted_by_depth"][0] + 0.05


@pytest.mark.one_in(16)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_interrupted_run_is_resumed_bit_by_bit(
    recipe: str, model: Path, data: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, recipe=recipe, steps=6, depth=depth_of(recipe))
    weights = []
    for stop in (None, 2):
        folder = tmp_path / f"{stop}"
        done = DrafterRun(model, folder, options, data=data)

        def report(
            stage: str, fraction: float, detail: str, run: Any = done, stop: Any = stop
        ) -> None:
            if run.step == stop:
                raise KeyboardInterrupt

        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                done.train(report)
            done = DrafterRun(model, folder, options, data=data)
        done.train()
        assert done.step == 6
        weights.append((folder / "drafter" / "model.safetensors").read_bytes())
        state = torch.load(folder / "state.pt")
        weights[-1] += b"".join(x.numpy().tobytes() for x in state["weights"].values())
    assert weights[0] == weights[1]


def test_an_interrupted_command_says_how_to_resume_and_leaves_a_drafter(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = DrafterRun._update

    def update(self: DrafterRun) -> list[float]:
        if self.step == 2:
            raise KeyboardInterrupt
        return own(self)

    monkeypatch.setattr(DrafterRun, "_update", update)
    settings = "--recipe medusa --steps 4 --texts 90 --tokens 16 --vocabulary 30 --batch 8"
    command = ["train", "drafter", "--model", str(model), *settings.split()]
    command += ["--out", str(tmp_path), "--data", str(data)]
    with pytest.raises(SystemExit) as ended:
        run(command)
    assert ended.value.code == 130
    assert f"the same command resumes the run in {tmp_path}" in capsys.readouterr().err
    assert json.loads((tmp_path / "log.json").read_text())["steps"] == 2
    with LLM(model, draft=tmp_path / "drafter") as llm:
        assert len(llm.generate([5, 6, 7], decoder="medusa", max_tokens=4).tokens) > 0
    monkeypatch.undo()
    with pytest.raises(SystemExit) as ended:
        run([*command, "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["steps"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle-3", "dflash", "medusa"])
def test_a_device_writes_the_texts_and_computes_the_states(
    recipe: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "--steps 60 --texts 90 --tokens 16 --vocabulary 30 --batch 8 --rate 0.01"
    command = f"drafter --recipe {recipe} {settings} --device cpu"
    history = train_command(capsys, command, model, out=tmp_path)["history"]
    first, *_, last = [one["held_out"] for one in history if "held_out" in one]
    assert last[0] > first[0] + 0.05
    names = {path.name for path in (tmp_path / "data").iterdir()}
    assert "texts.jsonl" in names and not any(name.startswith("states") for name in names)


def test_a_run_of_another_recipe_is_not_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, recipe="medusa", steps=1)
    DrafterRun(model, tmp_path, options, data=data).train()
    for other in ({"recipe": "hydra"}, {"depth": 3}, {"texts": 91}, {"vocabulary": 31}):
        with pytest.raises(InvalidRequestError, match="was trained with"):
            DrafterRun(model, tmp_path, replace(options, **other), data=data).run()


def test_a_model_that_a_recipe_does_not_take_is_refused_before_texts_are_written(
    model: Path, tmp_path: Path
) -> None:
    for recipe in ("eagle-3", "longspec", "medusa"):
        made = DrafterRun(model, tmp_path / recipe, replace(OPTIONS, recipe=recipe))
        made.network.spec = replace(made.network.spec, norm="layer", logit_scale=2.0)
        with pytest.raises(UnsupportedCombinationError):
            made.run()
        assert not (tmp_path / recipe / "data" / "texts.jsonl").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_drafter_drafts_with_the_method_that_the_command_names(
    recipe: str, model: Path, data: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, recipe=recipe, steps=1, depth=depth_of(recipe))
    made = DrafterRun(model, tmp_path, options, data=data)
    made.prepare()
    made.save()
    key = json.loads((tmp_path / "log.json").read_text())["decoder"]
    with LLM(model, draft=made.drafter) as llm:
        answer = llm.generate([5, 6, 7], decoder=key, max_tokens=12, ignore_eos=True, trace=True)
    assert any(event["drafted"] for event in answer.trace or ())


def test_states_that_a_recipe_needs_are_added_to_data_that_lack_them(tmp_path: Path) -> None:
    data = DrafterData(tmp_path, {}, (2, 3), 64)
    (tmp_path / "states.f16").write_bytes(b"old")
    assert DrafterData(tmp_path, {}, (3,), 64).taps == data.taps
    assert (tmp_path / "states.f16").is_file()
    assert DrafterData(tmp_path, {}, (1, 3), 64).taps == (2, 3, 1)
    assert not (tmp_path / "states.f16").is_file()  # those of all three are collected
    assert DrafterData(tmp_path, {}, (3, 2), 64).taps == (2, 3, 1)


@pytest.mark.slow
def test_recipes_that_read_other_states_share_texts(model: Path, tmp_path: Path) -> None:
    runs = []
    for recipe in ("medusa", "dflash"):
        options = replace(OPTIONS, recipe=recipe, steps=1)
        run = DrafterRun(model, tmp_path / recipe, options, data=tmp_path / "data")
        run.collect()
        runs.append(run)
    first, last = runs
    assert last.data.texts == first.data.texts and len(last.data.taps) > len(first.data.taps)
    batch = last.data.load([0])
    depth = last.network.spec.num_layers
    read = find_recipe("dflash").taps(depth)
    with LLM(model) as llm:
        *taps, state = read_states(llm, first.data.texts[0].tokens, (*read, depth))
        final = llm.model.normed(state)  # type: ignore[attr-defined]
    np.testing.assert_allclose(batch.taps[0], np.concatenate(taps, -1), atol=1e-2, rtol=1e-2)
    np.testing.assert_allclose(batch.final[0], final, atol=1e-2, rtol=1e-2)


def test_data_of_another_model_is_refused(tmp_path: Path) -> None:
    DrafterData(tmp_path, {"model": "a"}, (2, 3, 3), 64)
    with pytest.raises(InvalidRequestError, match=r"of a \(dtype as stored\), not of b \(dtype"):
        DrafterData(tmp_path, {"model": "b"}, (2, 3, 3), 64)


class Writer:
    """Writes the same texts for the same seed."""

    chunk = 2

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        return [[seed % 1000 + one] for one in range(count)]

    def answers(
        self, prompts: Any, temperatures: Any, tokens: int, random: Random
    ) -> list[list[int]]:
        return [[random.randrange(100) for _ in range(tokens)] for _ in prompts]


def test_texts_whose_writing_was_cut_off_are_written_anew(tmp_path: Path) -> None:
    def texts(name: str) -> str:
        DrafterData(tmp_path / name, {}, (3,), 64).generate(Writer(), 6, 9, seed=1)
        return (tmp_path / name / "texts.jsonl").read_text()

    whole = texts("whole")
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 6
    for number, line in enumerate(lines):
        name = f"cut {number}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.jsonl").write_text("".join(lines[:number]) + line[:9])
        assert texts(name) == whole
    (tmp_path / name / "texts.jsonl").write_text("".join(lines[:3]) + lines[3][:-1])
    data = DrafterData(tmp_path / name, {}, (3,), 64)
    assert len(data.texts) == 2 and data.starts == [0, 10, 20]


def test_a_resumed_run_leaves_out_texts_that_others_have_added(
    model: Path, data: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, recipe="medusa", steps=2)
    first = DrafterRun(model, tmp_path / "run", options, data=data)
    first.train()
    copy = shutil.copytree(data, tmp_path / "data")
    added = json.dumps({"chunk": 99, "prompt": [1], "answer": [29] * 500})
    with (copy / "texts.jsonl").open("a") as file:
        file.write(f"{added}\n")
    resumed = DrafterRun(model, tmp_path / "run", replace(options, steps=4), data=copy)
    assert len(resumed.data.texts) == len(first.data.texts) + 1
    resumed.train()
    assert resumed.step == 4 and resumed.vocabulary == first.vocabulary
    assert resumed.data.texts == first.data.texts


def test_a_step_is_finished_before_ctrl_c_takes_effect(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """An optimiser that has updated a part of the weights would be saved."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    options = replace(OPTIONS, recipe="medusa", steps=3)
    own = torch.optim.AdamW.step
    weights = []
    for is_interrupted in (False, True):
        folder = tmp_path / f"{is_interrupted}"
        with monkeypatch.context() as patch:
            if is_interrupted:

                def step(optimizer: Any) -> None:
                    signal.raise_signal(signal.SIGINT)
                    own(optimizer)

                patch.setattr(torch.optim.AdamW, "step", step)
                for taken in (1, 2):
                    stopped = DrafterRun(model, folder, options, data=data)
                    with pytest.raises(KeyboardInterrupt):
                        stopped.train()
                    assert torch.load(folder / "state.pt")["step"] == taken
        resumed = DrafterRun(model, folder, options, data=data)
        resumed.train()
        held_out = [one["step"] for one in resumed.history if "held_out" in one]
        assert held_out == [0, 3]
        weights.append((folder / "drafter" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_model_without_a_chat_template_answers_the_tasks_of_this_package() -> None:
    with LLM("tiny-autoregressive") as llm:
        writer = EngineWriter(llm)
        prompts = writer.prompts(3, seed=1)
        assert prompts == task_prompts(llm.tokenizer, 3, seed=1)
        assert all(writer.answers(prompts, [0.0] * 3, 12, Random(1)))


def test_folders_and_devices_that_cannot_be_used_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    cases = {
        f"--out {file}": f"--out is {file}, but {file} is a file",
        f"--out {file}/run": f"--out is {file}/run, but {file} is a file",
        f"--data {file}": f"--data is {file}, but {file} is a file",
        f"--plot {tmp_path}/none/curve.svg": f"the folder {tmp_path}/none does not exist",
        f"--out {tmp_path}/run --device nothing": "device 'nothing': ",
    }
    for settings, message in cases.items():
        with pytest.raises(SystemExit) as ended:
            run(["train", "drafter", "--steps", "1", *settings.split()])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_vocabulary_is_the_most_frequent_tokens(tmp_path: Path) -> None:
    held_out = json.dumps({"chunk": 0, "prompt": [1], "answer": [9] * 9})
    line = json.dumps({"chunk": 0, "prompt": [1], "answer": [7, 7, 3, 3, 5]})
    (tmp_path / "texts.jsonl").write_text(f"{held_out}\n" * 64 + f"{line}\n")
    data = DrafterData(tmp_path, {}, (2, 3, 3), 64)
    assert data.vocabulary(2, 12) == [3, 7]
    assert data.vocabulary(5, 12) == [0, 1, 3, 5, 7]
    assert data.coverage([3, 9]) == 1.0
    assert data.unused_token(12) == 0
    assert data.unused_token(1) == 0
    assert DrafterData(tmp_path, {}, (3,), 64).taps == (2, 3, 3)  # those of the folder


@pytest.mark.parametrize(
    ("tokens", "kept"), [([1, 2, 3], 3), ([1, 2, 3, 4] * 2 + [9], 9), ([1, 2, 3, 4] * 4, 4)]
)
def test_answers_end_where_they_repeat(tokens: list[int], kept: int) -> None:
    assert without_loop(tokens) == tokens[:kept]


def test_invalid_options_and_targets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invalid: tuple[dict[str, Any], ...] = (
        {"steps": None}, {"minutes": 1.0}, {"batch": 0}, {"texts": 64}, {"depth": 0},
        {"recipe": "eagle3"},
    )  # fmt: skip
    for values in invalid:
        with pytest.raises(InvalidRequestError):
            replace(OPTIONS, **values)
    with pytest.raises(SystemExit):
        run(["train", "drafter", "--recipe", "eagle-4", "--out", str(tmp_path)])
    assert capsys.readouterr().err.strip() == (
        f"anydecode: recipe 'eagle-4' is unknown; choose from {', '.join(RECIPES)}"
    )
    with pytest.raises(UnsupportedCombinationError, match="not for diffusion models"):
        DrafterRun("tiny-diffusion", tmp_path, replace(OPTIONS, recipe="medusa")).run()
    with pytest.raises(UnsupportedCombinationError, match="at least 6"):
        spread_taps(4)
    network = tiny_network(layers=6)
    network.spec = replace(network.spec, logit_scale=2.0)
    with pytest.raises(UnsupportedCombinationError, match="without factors"):
        find_recipe("medusa")(network, [1, 2], 2, 0)
    network.spec = replace(network.spec, norm="layer")
    with pytest.raises(UnsupportedCombinationError, match="that of Llama"):
        layer_shape(network)
