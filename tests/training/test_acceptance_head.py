"""A head learns which drafts are accepted, is stored beside its drafter and used by `specdec++`,
and a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.specdecpp import predict
from anydecode.certification.tiny import eagle_checkpoint, with_drafter
from anydecode.certification.tiny_heads import hydra_checkpoint, mtp_checkpoint
from anydecode.decoders.framework.speculation import Speculative
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.acceptance_head import FILE_NAME, AcceptanceWeights
from anydecode.models.loading import load_checkpoint
from anydecode.training.acceptance_head import AcceptanceHeadRun, HeadRecipe
from anydecode.training.block_adapter import open_llama
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.nested import first_layers
from train_commands import train_command

MODEL = "tiny-autoregressive"
RECIPE = HeadRecipe(steps=60, tokens=24, size=5, rate=0.005)
PROMPTS = [[index % 50 + 4, index * 7 % 60 + 4, 9] for index in range(16)]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft model of the first layer of a small model."""
    checkpoint = load_checkpoint(MODEL)
    network = first_layers(open_llama(checkpoint), 1)
    folder = tmp_path / "draft"
    save_nested_llama(folder, network.state_dict(), network.shape, writable_tokenizer(checkpoint))
    return folder


def head_of(llm: LLM, decoder: Any) -> dict[str, np.ndarray]:
    assert isinstance(decoder, Speculative)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 1}
    plain = llm.generate([[5, 6, 9]], decoder="autoregressive", **options)[0]
    assert llm.generate([[5, 6, 9]], decoder=decoder, **options)[0].tokens == plain.tokens
    head = decoder.drafter.online.head  # type: ignore[attr-defined]
    return {} if head is None else head.parameters


def test_a_stored_head_is_opened_with_its_draft_model_and_used(draft: Path, tmp_path: Path) -> None:
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        assert not head_of(llm, llm.decoder("specdec++:rate=0"))
        run = AcceptanceHeadRun(llm, tmp_path / "run", RECIPE, PROMPTS)
        before = run.head(run.states[:4]).copy()
        run.train()
    first, *_, last = (entry["held_out"] for entry in run.history if "held_out" in entry)
    assert last["loss"] < first["loss"] and not np.array_equal(before, run.head(run.states[:4]))
    found = [predict(run.head.parameters, state) for state in run.states[:4]]
    assert np.allclose(found, run.head(run.states[:4]), atol=1e-5)
    run.weights.save(draft / FILE_NAME)
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        used = head_of(llm, llm.decoder("specdec++:rate=0"))
        assert used.keys() == run.head.parameters.keys()
        assert all(np.array_equal(used[name], run.head.parameters[name]) for name in used)
        decoder = llm.decoder("specdec++")  # goes on learning
        llm.generate(PROMPTS, decoder=decoder, max_tokens=40, temperature=1.0)
        learned = head_of(llm, decoder)
        assert not np.array_equal(learned["block"], used["block"])
        decoder.drafter.clear()  # type: ignore[union-attr]
        assert np.array_equal(head_of(llm, decoder)["block"], used["block"])


@pytest.mark.parametrize(("bias", "length"), [(9.0, 6), (-9.0, 2)])
def test_a_stored_head_ends_the_chains(
    draft: Path, tmp_path: Path, bias: float, length: int
) -> None:
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        run = AcceptanceHeadRun(llm, tmp_path / "run", RECIPE, PROMPTS[:8])
    weights = run.weights
    weights.parameters["output"][...] = 0.0
    weights.parameters["output_bias"][...] = [-bias, bias]
    weights.save(draft / FILE_NAME)
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "trace": True}
        decoder = "specdec++:rate=0,size=6"
        trace = llm.generate([[5, 6, 9]], decoder=decoder, **options)[0].trace or []
    assert {len(one["drafted"]) for one in trace[:-7]} == {length}


@pytest.mark.parametrize("drafter", [eagle_checkpoint, hydra_checkpoint, mtp_checkpoint])
def test_drafters_that_read_states_have_a_head_too(drafter: Any, tmp_path: Path) -> None:
    recipe = HeadRecipe(steps=1, tokens=16, size=4)
    with with_drafter(drafter, cache_positions=1024) as llm:
        model: Any = llm.engine.runners["draft"].model
        run = AcceptanceHeadRun(llm, tmp_path, recipe, PROMPTS[:8])
        run.train()
        model.acceptance_head = AcceptanceWeights.load(run.path)
        used = head_of(llm, llm.decoder("specdec++:rate=0"))
    assert np.array_equal(used["block"], run.head.parameters["block"])


def test_the_head_of_other_models_is_refused(draft: Path, tmp_path: Path) -> None:
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        run = AcceptanceHeadRun(llm, tmp_path / "run", RECIPE, PROMPTS[:8])
    weights, (own, target) = run.weights, run.fingerprints
    for wrong in (("0", target), (own, "0")):
        AcceptanceWeights(weights.parameters, *wrong).save(draft / FILE_NAME)
        with (
            LLM(MODEL, draft=draft, drafting="fixed") as llm,
            pytest.raises(InvalidRequestError, match="another"),
        ):
            llm.generate([5, 6], decoder="specdec++", max_tokens=4)
    parameters = {**weights.parameters, "output": np.zeros((3, 4), np.float32)}
    AcceptanceWeights(parameters, own, target).save(draft / FILE_NAME)
    with pytest.raises(CheckpointError, match="the shapes are"):
        LLM(MODEL, draft=draft, drafting="fixed")


def test_an_interrupted_run_is_resumed(draft: Path, tmp_path: Path) -> None:
    with LLM(MODEL, draft=draft, drafting="fixed") as llm:
        whole = AcceptanceHeadRun(llm, tmp_path / "whole", RECIPE, PROMPTS)
        whole.train()
        part = AcceptanceHeadRun(llm, tmp_path / "part", RECIPE, PROMPTS)
        for _ in range(20):
            part._update()
        part.save()
        again = AcceptanceHeadRun(llm, tmp_path / "part", RECIPE, PROMPTS)
        assert again.step == 20
        again.train()
        for name, value in whole.head.parameters.items():
            assert np.array_equal(value, again.head.parameters[name])
        with pytest.raises(InvalidRequestError, match="holds a run of another"):
            AcceptanceHeadRun(llm, tmp_path / "part", RECIPE, PROMPTS[1:])


def test_the_command_puts_the_head_beside_the_drafter(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = "acceptance-head --steps 2 --answers 6 --tokens 24"
    log = train_command(capsys, options, MODEL, draft=draft, out=out)
    assert log["path"] == str(draft / FILE_NAME)
    stored = [AcceptanceWeights.load(folder / FILE_NAME) for folder in (draft, out)]
    assert np.array_equal(*(one.parameters["block"] for one in stored))
    assert log["steps"] == 2 and log["drafts"] > 16
