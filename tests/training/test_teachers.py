"""Diffusion models that this package did not train are opened, distilled and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.training.denoising import denoise
from anydecode.training.distillation import DistillationRecipe, distil
from anydecode.training.teachers import open_teacher, save_student
from anydecode.training.tokenizer import OWN_TOKENS
from diffusion_checkpoints import LLADA_NAMES, MASK, Tiny, V, write

#: The keys of LLaDA-8B's config that say something about the layers; two tokens have no text.
LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": V,
    "eos_token_id": 60,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "n_heads": 2,
    "n_kv_heads": 1,
    "n_layers": 2,
    "pad_token_id": 60,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": V - 2,
    "weight_tying": False,
}
TINY = Tiny(LLADA, names=LLADA_NAMES, mask_text="<|mdm_mask|>")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key, value in (("num_attention_heads", 2), ("num_key_value_heads", 1)):
        monkeypatch.setitem(write.__globals__["SIZES"], key, value)
    write(TINY, tmp_path / "llada")
    return tmp_path / "llada"


def test_a_teacher_predicts_what_the_engine_predicts(folder: Path) -> None:
    teacher = open_teacher(folder)
    assert (teacher.special.mask, teacher.special.eos) == (MASK, 60)
    assert teacher.special.barred == (MASK,), "the end of text, which also pads, is predicted"
    prompts = [[3, 4, 5, 6], [7, 8]]
    expected, _ = denoise(teacher.model, prompts, 9, 1.1, teacher.special)
    with LLM(folder, dtype="float32", threads=1) as llm:
        options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
        found = llm.generate(prompts, decoder="llada:block=0", **options)
    assert [answer.tokens for answer in found] == expected
    other, _ = denoise(teacher.model, prompts, 9, 1.1, OWN_TOKENS)  # the small models' mask
    assert other != expected


def test_a_student_has_the_teachers_layout(folder: Path, tmp_path: Path) -> None:
    teacher = open_teacher(folder)
    save_student(teacher, teacher.model.state_dict(), tmp_path / "same")
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    for name in ("config.json", "tokenizer.json"):
        assert (folder / name).read_text() == (tmp_path / "same" / name).read_text()


@pytest.mark.parametrize("method", ["cd4lm", "dparallel"])
def test_another_model_is_distilled(method: str, folder: Path, tmp_path: Path) -> None:
    recipe = DistillationRecipe(method, steps=3, batch=4, rate=3e-3, canvas=8)
    losses = distil(folder, tmp_path / "new", recipe)
    assert len(losses) == 3 and losses == distil(folder, tmp_path / "again", recipe)
    old, new = (open_teacher(one).model.state_dict() for one in (folder, tmp_path / "new"))
    assert not torch.equal(old["transformer.ff_out.weight"], new["transformer.ff_out.weight"])
    with LLM(tmp_path / "new", threads=1) as llm:
        assert len(llm.generate([3, 4], decoder=method, max_tokens=6, ignore_eos=True).tokens) == 6


def test_drafting_needs_a_model_of_this_package(folder: Path, tmp_path: Path) -> None:
    recipe = DistillationRecipe("deer", steps=1, batch=2, canvas=8)
    with pytest.raises(CheckpointError, match="train diffusion` only"):
        distil(folder, tmp_path / "new", recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"right_shift_logits": True}}, "without blocks and without shifted logits"),
        ({"tensor": "model.transformer.blocks.0.q_proj.bias"}, "which have no tensor"),
        ({"config": {"eos_token_id": None}}, "no end of text"),
        ({"config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}, "plain rotary"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    config = {**LLADA, **changes.get("config", {})}
    (folder / "config.json").write_text(json.dumps(config))
    if "tensor" in changes:
        save_file({**load_file(file), changes["tensor"]: torch.zeros(32)}, file)
    with pytest.raises(CheckpointError, match=message):
        open_teacher(folder)


def test_a_model_with_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without blocks"):
        distil(Path("tiny-blocks"), tmp_path, DistillationRecipe("cd4lm", steps=1))
