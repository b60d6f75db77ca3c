"""Routers learn which states the later layers change little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.certification.tiny import tiny_llm, tiny_model
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.exit_routers import ExitRouters, RouterStates
from anydecode.models.scripted import ByteTokenizer
from anydecode.training import curve
from anydecode.training.exit_routers import Body, RouterRecipe, RouterRun, are_similar
from anydecode.training.exit_run import ExitRows


class _Separable(RouterRun):
    """Two exits whose labels are the sign of the first feature."""

    def _collect(self, llm: LLM, prompts: Any, report: Any) -> ExitRows:
        states = torch.from_numpy(np.random.default_rng(0).standard_normal((400, 8), np.float32))
        positive = states[:, 0] > 0
        return ExitRows({2: states, 3: -states}, {2: positive, 3: positive}, 100)


def _run(folder: Path, steps: int, body: Body = "mlp") -> _Separable:
    recipe = RouterRecipe(steps=steps, width=16, rate=1e-2, threshold=0.5, body=body)
    with tiny_llm() as llm:
        return _Separable(llm, folder, recipe, ["a", "b"])


@pytest.mark.parametrize(("body", "steps"), [("mlp", 300), ("block", 40)])
def test_routers_separate_states_by_their_label(tmp_path: Path, body: Body, steps: int) -> None:
    run = _run(tmp_path, steps, body)
    run.train()
    for one in run.qualities():
        assert one.precision > 0.8 and 0.3 < one.chosen < 0.7 and one.loss < 0.4
    states, routers = run.rows.inputs[3][:100].numpy(), ExitRouters.load(run.path)
    assert routers.exits == [2, 3]
    assert np.mean((routers(3, states) > 0.5) == run.rows.labels[3][:100].numpy()) > 0.8
    with torch.no_grad():
        expected = torch.sigmoid(run.networks["3"](torch.from_numpy(states)))[:, 0]
    np.testing.assert_allclose(routers(3, states), expected.numpy(), atol=1e-4)
    with pytest.raises(InvalidRequestError, match="or another body"):
        _run(tmp_path, steps, "mlp" if body == "block" else "block")


class _Remembering(RouterRun):
    """An exit whose label is the sign of the first feature of the token two before, in texts of
    different lengths."""

    def _collect(self, llm: LLM, prompts: Any, report: Any) -> ExitRows:
        random, lengths = np.random.default_rng(0), [5, 9, 12, 7] * 100
        states, labels = [], []
        for length in lengths:
            states.append(random.standard_normal((length, 8), np.float32))
            labels.append(np.r_[False, False, states[-1][:-2, 0] > 0])
        rows, positive = (torch.from_numpy(np.concatenate(one)) for one in (states, labels))
        return ExitRows({2: rows}, {2: positive}, sum(lengths[:40]), lengths)


def test_a_block_of_mamba_learns_what_earlier_tokens_say(tmp_path: Path) -> None:
    recipe = RouterRecipe(steps=80, width=16, rate=2e-2, threshold=0.5, body="mamba")
    with tiny_llm() as llm:
        run = _Remembering(llm, tmp_path, recipe, ["a", "b"])
    run.train()
    (quality,) = run.qualities()
    assert quality.precision > 0.8 and quality.loss < 0.4
    routers, states = ExitRouters.load(run.path), run.rows.inputs[2].numpy()
    first = 0
    for length in (5, 9, 12):
        text, before = states[first : first + length], RouterStates()
        with torch.no_grad():
            logits = run.networks["2"](torch.from_numpy(text[None]))[0, :, 0]
        found = [routers.read(2, one, before) for one in text]
        np.testing.assert_allclose(found, torch.sigmoid(logits).numpy(), atol=1e-4)
        first += length


@pytest.mark.slow
def test_blocks_of_mamba_of_a_model_run_in_it(tmp_path: Path) -> None:
    recipe = RouterRecipe(steps=2, interval=1, width=4, tokens=8, label="token", body="mamba")
    with LLM("tiny-autoregressive") as llm:
        run = RouterRun(llm, tmp_path, recipe, ["copy Ada", "a b c", "one two"])
        run.train()
        lengths = run.rows.lengths
        assert lengths is not None and len(lengths) == 3 and max(lengths) <= 8
        assert len(run.rows.inputs[1]) == sum(lengths)
        decoder = f"tide:min_layers=0,threshold=0.2,routers={run.path}"
        assert len(llm.generate("a", decoder=decoder, max_tokens=8, ignore_eos=True).tokens) == 8


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", 20)
    whole.train()
    part = _run(tmp_path / "part", 20)
    with pytest.raises(KeyboardInterrupt):
        part.train(lambda done, loss: _interrupt(done >= 0.5))
    resumed = _run(tmp_path / "part", 20)
    assert resumed.step == 10
    resumed.train()
    for one, other in zip(whole.networks.parameters(), resumed.networks.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [e["loss"] for e in whole.history if "loss" in e] == [
        e["loss"] for e in resumed.history if "loss" in e
    ]
    pytest.importorskip("matplotlib")
    curve.draw_exits(resumed.log(), tmp_path / "curve.svg")
    assert "held-out" in (tmp_path / "curve.svg").read_text()


def _interrupt(is_due: bool) -> None:
    if is_due:
        raise KeyboardInterrupt


def test_a_run_of_another_model_or_width_is_not_resumed(tmp_path: Path) -> None:
    _run(tmp_path, 2).train()
    with LLM(tiny_model(layers=3), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match="another model"):
            _Separable(llm, tmp_path, RouterRecipe(steps=2, width=16), ["a", "b"])
    with tiny_llm() as llm:
        with pytest.raises(InvalidRequestError, match="another model, width or label"):
            _Separable(llm, tmp_path, RouterRecipe(steps=2, width=8), ["a", "b"])
        with pytest.raises(InvalidRequestError, match="another model, width or label"):
            recipe = RouterRecipe(steps=2, width=16, similarity=0.9)
            _Separable(llm, tmp_path, recipe, ["a", "b"])
        with pytest.raises(InvalidRequestError, match="two prompts"):
            _Separable(llm, tmp_path / "new", RouterRecipe(steps=2), ["a"])


def test_a_model_without_a_chat_template_learns_from_answers_to_tasks(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    with LLM(tiny_model(), tokenizer=tokenizer) as llm:
        run = RouterRun(
            llm, tmp_path, RouterRecipe(steps=1, interval=1, width=4, tokens=2, answers=3)
        )
    run.train()
    assert run.qualities()


def test_states_are_similar_by_their_direction() -> None:
    states = np.array([[3.0, 0.1], [1.0, 0.5], [0.1, 2.0]], np.float32)
    last = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], np.float32)
    assert are_similar(states, last, 0.98).tolist() == [True, False, False]


@pytest.mark.slow
def test_routers_of_a_model_run_in_it(tmp_path: Path) -> None:
    recipe = RouterRecipe(steps=2, interval=1, width=4, tokens=8, label="token", top_k=1)
    with LLM("tiny-autoregressive") as llm:
        run = RouterRun(llm, tmp_path, recipe, ["copy Ada", "a b c", "one two"])
        run.train()
        routers = run.routers()
        depth, network = llm.model.spec.num_layers, _network(llm)
        assert routers.exits == [one.exit for one in run.qualities()] == list(range(1, depth))
        assert routers.fingerprint == model_fingerprint(network)
        assert ExitRouters.load(run.path).target == routers.target == "token 1"
        decoder = f"tide:min_layers=0,threshold=0.2,routers={run.path}"
        assert len(llm.generate("a", decoder=decoder, max_tokens=8, ignore_eos=True).tokens) == 8


def _network(llm: LLM) -> Any:
    return llm.model.network  # type: ignore[attr-defined]


def test_bad_recipes_are_refused_in_one_line() -> None:
    with pytest.raises(InvalidRequestError, match="choose from cosine, token"):
        RouterRecipe(steps=1, label="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="choose from mlp, block, mamba"):
        RouterRecipe(steps=1, body="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be more than 0"):
        RouterRecipe(steps=1, width=0)
    with pytest.raises(InvalidRequestError, match="must be 1 or more"):
        RouterRecipe(steps=1, top_k=0)
    with pytest.raises(InvalidRequestError, match="either minutes or steps"):
        RouterRecipe()
