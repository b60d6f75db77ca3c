"""Every diffusion model that the engine opens is distilled: the network that is trained predicts
what the engine predicts, training reduces its loss, and the engine opens the student."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.distillation import (
    Canvases,
    DistillationRecipe,
    certainty,
    closer,
    distil,
    dscd,
)
from anydecode.training.filters import train_filter
from anydecode.training.network_model import NetworkModel, reads_noise
from anydecode.training.objectives import masked_logits
from anydecode.training.teachers import open_any_teacher, save_student
from every_diffusion_model import BUILDERS

PROMPT = [(5 * i + 2) % 57 for i in range(13)]
#: A decoder whose passes compute all rows of the open block, for models of which the default one
#: does not.
EXACT = {
    "diffusion_gemma_text": "diffusion-gemma:cache=block,steps=5",
    "wedlm": "wedlm:entropy=0",
    "wedlm_qwen3": "wedlm:entropy=0",
    "llada2_2_moe": "sdar:remasking=static",
    "fast_dllm_qwen": "sdar:remasking=static",
    "nemotron_labs_diffusion": "fast-dllm-v2:sub_block=4,threshold=1",
    "nemotron_labs_diffusion that grows": "fast-dllm-v2:sub_block=4,threshold=1",
}
#: The models of which an adapter is trained; all weights of the others are: `test_teachers.py`.
ADAPTED = (
    "bd3lm",
    "mdlm",
    "diffusion_gemma_text",
    "dit",
    "duo",
    "lfm2_diffusion",
    "llada2_moe",
    "llada2_2_moe",
    "llada_moe with a dense layer",
    "nemotron_labs_diffusion that grows",
    "remedi",
    "wedlm",
    "wedlm_qwen3",
)
#: Those whose noise is random tokens, at least in part.
NOISED = ("diffusion_gemma_text", "dit", "duo", "lfm2_diffusion")
#: The state of a canvas with what the last pass over its block predicted.
EXPECTED = "expected embeddings"


@dataclass
class Pass:
    """What a pass read, and the logits that it predicted, by position."""

    tokens: list[int]
    logits: dict[int, np.ndarray]
    time: float
    expected: torch.Tensor | None


@contextmanager
def recorded() -> Iterator[list[Pass]]:
    """The passes of all diffusion decoders."""
    passes: list[Pass] = []
    original = Denoiser.predictions

    def record(
        self: Denoiser, sequence: Any, canvas: Canvas, scores: Any, rows: range | None = None
    ) -> Predictions:
        found = original(self, sequence, canvas, scores, rows)
        logits = {int(p): found.logits(p).copy() for p in found.positions}
        expected = None
        if canvas.block is not None and EXPECTED in canvas.policy_state:
            expected = torch.from_numpy(canvas.policy_state[EXPECTED][1].copy())
        passes.append(Pass(canvas.tokens.tolist(), logits, self.time(canvas), expected))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Denoiser, "predictions", record)
        yield passes


def _passes(name: str, folder: Path, adapter: Path | None = None) -> list[Pass]:
    with recorded() as passes, LLM(folder, threads=1, cache_positions=256) as llm:
        options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 1}
        if adapter is not None:
            llm.add_adapter("student", adapter)
            options["adapter"] = "student"
        llm.generate(PROMPT, decoder=EXACT.get(name), **options)
    return passes


@pytest.fixture(params=BUILDERS)
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    BUILDERS[request.param](tmp_path / "model")
    return request.param, tmp_path / "model"


def _found(
    model: NetworkModel | Any, special: Any, one: Pass, prompt: int = len(PROMPT)
) -> dict[int, torch.Tensor]:
    """The logits of a pass by position, from the network that is trained."""
    tokens, mask = torch.tensor([one.tokens]), special.mask
    if isinstance(model, NetworkModel) and reads_noise(model.spec):
        size, first = model.shape.block_size, min(one.logits)
        first, stop = (first, first + size) if size else (prompt, len(one.tokens))
        value = None if model.spec.time is None else model.spec.time.value(one.time)
        expected = None if one.expected is None else one.expected[None]
        logits = model.denoised(tokens[:, :stop], tokens[:, first:stop], value, expected)[0]
        return {position: logits[position - first] for position in one.logits}
    masked = tokens == mask
    positions = [position for position in sorted(one.logits) if masked[0, position]]
    predicted = torch.zeros_like(masked)
    predicted[0, positions] = True
    rows = masked_logits(model, tokens, masked, special, predicted, prompt)
    return dict(zip(positions, rows, strict=True))


def _difference(model: Any, special: Any, passes: list[Pass], **options: Any) -> float:
    """The largest difference of logits from those of the engine."""
    largest, count = 0.0, 0
    with torch.no_grad():
        for one in passes:
            for position, row in _found(model, special, one, **options).items():
                expected = torch.from_numpy(one.logits[position])
                both = expected.isfinite() & row.isfinite()
                assert both.sum() > 50
                largest = max(largest, float((row - expected)[both].abs().max()))
                count += 1
    assert count > 8
    return largest


def test_the_network_that_is_trained_predicts_what_the_engine_predicts(
    named: tuple[str, Path],
) -> None:
    name, folder = named
    passes = _passes(name, folder)
    teacher = open_any_teacher(folder, 4)
    model, shape, special = teacher.model, teacher.model.shape, teacher.special
    assert isinstance(model, NetworkModel) == (name in ADAPTED)
    assert _difference(model, special, passes) < 1e-3
    if isinstance(model, NetworkModel) and reads_noise(model.spec):
        for wrong in _wrong_noise(model, passes):
            assert _difference(model, special, wrong) > 0.01
    else:
        for change in _wrong_shapes(shape):
            model.shape = replace(shape, **change)
            assert _difference(model, special, passes) > 0.01, change
        model.shape = shape
    if isinstance(model, NetworkModel):
        _randomise(model)
        assert _difference(model, special, passes) > 0.01


def _wrong_shapes(shape: Any) -> list[dict[str, Any]]:
    """Changes of what rows see and predict, which no model has."""
    wrong: list[dict[str, Any]] = [{"logit_shift": 1 - shape.logit_shift}]
    wrong.append({"block_size": None if shape.block_size else 4})
    if shape.is_ordered:
        wrong.append({"is_ordered": False})
    elif shape.block_size and not shape.has_causal_context:
        wrong.append({"has_prompt_block": not shape.has_prompt_block})
    return wrong


def _wrong_noise(model: NetworkModel, passes: list[Pass]) -> list[list[Pass]]:
    """Passes at another time, and without what the pass before predicted."""
    wrong = []
    if model.spec.time is not None:
        wrong.append([replace(one, time=one.time / 2 + 0.01) for one in passes])
    if model.spec.has_canvas:
        wrong.append([replace(one, expected=None) for one in passes])
    return wrong


def _randomise(model: NetworkModel) -> None:
    """Let the adapter of a model change its logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for up in model.up:
            up.copy_(torch.randn(up.shape, generator=generator) * 0.3)


@pytest.fixture(params=ADAPTED)
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    BUILDERS[request.param](tmp_path / "model")
    return request.param, tmp_path / "model"


@pytest.mark.one_in(2)
def test_a_saved_adapter_is_what_was_trained(adapted: tuple[str, Path], tmp_path: Path) -> None:
    """Beside its model, and as a model of its own, where bfloat16 rounds what is merged."""
    name, folder = adapted
    teacher, student = open_any_teacher(folder, 4), tmp_path / "student"
    assert isinstance(teacher.model, NetworkModel)
    _randomise(teacher.model)
    save_student(teacher, teacher.model.state_dict(), student)
    given = teacher.model, teacher.special
    apart = _difference(*given, _passes(name, folder))
    assert apart > 0.2
    is_beside = bool(load_checkpoint(student).adapters)
    assert _difference(*given, _passes(name, student)) < (1e-3 if is_beside else 0.5 * apart)
    if not reads_noise(teacher.model.spec):  # adapters are not chosen by request there
        assert _difference(*given, _passes(name, folder, student)) < 1e-3


def _loss(method: str, student: Any, teacher: Any, part: Canvases, special: Any) -> torch.Tensor:
    recipe, generator = DistillationRecipe(method, block=4), torch.Generator().manual_seed(0)
    if method == "cd4lm":
        return dscd(student, teacher, [part], 0.5, recipe, generator, special)
    if method == "duo":  # of a text that is all noise and its clean text
        return closer(student, teacher, [part], 9, generator, special)
    return certainty(student, [part], recipe, generator, special)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name in ADAPTED
        for method in (("duo",) if name in NOISED else ("cd4lm", "dparallel"))
    ],
)
def test_training_reduces_the_loss(name: str, method: str, tmp_path: Path) -> None:
    """And what is saved decodes in another way."""
    folder = tmp_path / "model"
    BUILDERS[name](folder)
    teacher = open_any_teacher(folder, 4)
    assert isinstance(teacher.model, NetworkModel)
    assert reads_noise(teacher.model.spec) == (name in NOISED)
    special, start, size = teacher.special, len(PROMPT), 16
    tokens = torch.randint(1, 50, (2, start + size), generator=torch.Generator().manual_seed(1))
    if method != "duo":  # answers that the model may give
        masked = torch.arange(start + size).expand(2, -1) >= start
        logits = masked_logits(teacher.model, tokens, masked, special, prompt=start)
        tokens[masked] = logits.argmax(-1)
    part = Canvases(tokens, start, torch.tensor([size, size - 4]))
    student = copy.deepcopy(teacher.model)
    optimizer, losses = torch.optim.Adam(student.parameters(), 1e-2), []
    for _ in range(15):
        loss = _loss(method, student, teacher.model, part, special)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    save_student(teacher, student.state_dict(), tmp_path / "student")
    before, after = _passes(name, folder), _passes(name, tmp_path / "student")
    assert [one.tokens for one in before] != [one.tokens for one in after]


@pytest.mark.one_in(3)
def test_a_student_is_distilled_alike_again(adapted: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = adapted
    model = open_any_teacher(folder, 4).model
    assert isinstance(model, NetworkModel)
    for method in ("duo",) if reads_noise(model.spec) else ("cd4lm", "dparallel"):
        recipe = DistillationRecipe(method, steps=2, batch=2, rate=3e-2, canvas=8, block=4, rank=2)
        losses = distil(folder, tmp_path / method, recipe)
        assert len(losses) == 2 and distil(folder, tmp_path / "again", recipe) == losses
        with LLM(tmp_path / method, threads=1) as llm:
            answer = llm.generate([3, 4], decoder=EXACT.get(name), max_tokens=6, ignore_eos=True)
        assert len(answer.tokens) == 6


#: Models without a mask token, and those whose rows see one side of it.
UNFILTERED = ("diffusion_gemma_text", "duo", "lfm2_diffusion", "wedlm", "wedlm_qwen3")


@pytest.mark.one_in(6)
def test_a_filter_is_trained_for_every_model_that_fills_masks(
    named: tuple[str, Path], tmp_path: Path
) -> None:
    name, folder = named
    file, options = tmp_path / f"{name}.safetensors", {"prompts": 10, "canvas": 8, "epochs": 2}
    if name in UNFILTERED:
        with pytest.raises(InvalidRequestError, match="have a mask token, whose rows see both"):
            train_filter(folder, file, **options)  # type: ignore[arg-type]
        return
    assert train_filter(folder, file, **options)["rows"] > 8  # type: ignore[arg-type]
    with LLM(folder, threads=1, cache_positions=256) as llm:
        cache = "block" if llm.model.spec.block_size else "none"
        decoder = f"learn2pd:filter={file},cache={cache}"
        answer = llm.generate(PROMPT, decoder=decoder, max_tokens=8, ignore_eos=True)
    assert len(answer.tokens) == 8


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("duo", "cd4lm", "reads noise that is, at least in part, random tokens: use method duo"),
        ("dit", "dparallel", "use method duo"),
        ("llada2_moe", "duo", "this one fills blocks of masks"),
        ("wedlm", "duo", "this one fills blocks of masks"),
        ("remedi", "deer", "trains models of `anydecode train diffusion` only"),
        ("wedlm", "dparallel", "block=3 does not divide the model's blocks of 16"),
    ],
)
def test_methods_for_other_models_are_refused(
    name: str, method: str, message: str, tmp_path: Path
) -> None:
    BUILDERS[name](tmp_path / "model")
    recipe = DistillationRecipe(method, steps=1, batch=1, canvas=8, block=3)
    with pytest.raises((CheckpointError, InvalidRequestError), match=message) as caught:
        distil(tmp_path / "model", tmp_path / "new", recipe)
    assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()


def test_what_the_files_do_not_say_may_be_given(tmp_path: Path) -> None:
    """A config of Qwen2, whose user says that it is a diffusion model, and which is the mask."""
    BUILDERS["a2d-qwen2"](tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "mask_token_id": None}
    file.write_text(json.dumps({**config, **own}))
    with pytest.raises(CheckpointError, match="a diffusion model, not a causal one"):
        open_any_teacher(tmp_path / "model", 4)
    with pytest.raises(InvalidRequestError, match="family='open' is none"):
        open_any_teacher(tmp_path / "model", 4, family="open")
    with pytest.raises(InvalidRequestError, match="mask=64 is no token of the model"):
        open_any_teacher(tmp_path / "model", 4, family="open_dllm", mask=64)
    teacher = open_any_teacher(tmp_path / "model", 4, family="open_dllm", mask=55)
    assert (teacher.model.shape.logit_shift, teacher.special.mask) == (1, 55)
    recipe = DistillationRecipe("cd4lm", steps=1, batch=2, canvas=8)
    losses = distil(tmp_path / "model", tmp_path / "new", recipe, family="open_dllm", mask=55)
    assert losses != distil(tmp_path / "model", tmp_path / "b", recipe, family="a2d-qwen2", mask=55)
    found = train_filter(
        tmp_path / "model",
        tmp_path / "filter",
        prompts=10,
        canvas=8,
        epochs=1,
        family="open_dllm",
        mask=55,
    )
    assert found["rows"] > 9
    with pytest.raises(InvalidRequestError, match="see both sides"):
        train_filter(tmp_path / "model", tmp_path / "filter", mask=55)


def test_an_adapter_of_no_module_of_the_model_is_refused(tmp_path: Path) -> None:
    BUILDERS["llada2_moe"](tmp_path / "model")
    teacher = open_any_teacher(tmp_path / "model", 4)
    assert isinstance(teacher.model, NetworkModel)
    for name, message in (
        ("model.layers.9.self_attn.q_proj", "no module model.layers.9.self_attn.q_proj"),
        ("model.layers.1.mlp.experts.0.up_proj", "cannot have an adapter that is always on"),
    ):
        teacher.model.names[0] = name
        if "experts" in name:
            teacher.model.down[0] = torch.nn.Parameter(torch.zeros(4, 32))
            teacher.model.up[0] = torch.nn.Parameter(torch.zeros(24, 4))
        save_student(teacher, teacher.model.state_dict(), tmp_path / "new")
        with pytest.raises(CheckpointError, match=message) as caught:
            LLM(tmp_path / "new")
        assert "\n" not in str(caught.value)
