"""Diffusion models that this package did not train are opened, distilled and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.block_adapter import AdapterRecipe, train_block_adapter
from anydecode.training.denoising import denoise
from anydecode.training.distillation import Canvases, DistillationRecipe, block_halves, distil
from anydecode.training.filters import train_filter
from anydecode.training.objectives import masked_logits
from anydecode.training.teachers import open_teacher, save_student
from anydecode.training.tokenizer import OWN_TOKENS
from diffusion_checkpoints import (
    LAYERS,
    LLADA_NAMES,
    MASK,
    SIZES,
    Tiny,
    V,
    forward,
    softmax_router,
    write,
)

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
DREAM = {**LAYERS, "architectures": ["DreamModel"], "model_type": "Dream"}
CODA = {**LAYERS, "architectures": ["CoDALanguageModel"], "model_type": "CoDA"}
SDAR = {**LAYERS, "architectures": ["SDARForCausalLM"], "model_type": "sdar"}
FAST = {
    **LAYERS,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 4,
}
EFFICIENT = {
    **LAYERS,
    "architectures": ["EfficientDLM"],
    "model_type": "qwen3",
    "block_size": 4,
}
#: The length of a prompt: the first block of the text has one position more.
PROMPT = 3
FREQUENCIES = 1000000.0 ** -(torch.arange(0, SIZES["head_dim"], 2).double() / SIZES["head_dim"])
SCALED = {**DREAM, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
NEMOTRON = {
    **LAYERS,
    "architectures": ["NemotronLabsDiffusionModel"],
    "model_type": "nemotron_labs_diffusion",
    "block_size": 4,
}
EXPERTS = {
    **LAYERS,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LLADA_MOE = {
    **LAYERS,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "dense_intermediate_size": 48,
    "expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "qk_layernorm": True,
}
#: Queries that grow with the position, within the positions that are trained.
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
NEMOTRON_NAMES = {
    "embed": "encoder.embed_tokens",
    "norm": "encoder.norm",
    "head": "diffusion_head",
    "layer": "encoder.layers.{}.",
}
#: Shifted logits, biases, norms of heads, blocks, both, a prompt that is one block, scaled rotary
#: embeddings, a head that is the embedding, experts, and a causal context that predicts the first
#: position of a block.
OTHERS = {
    "dream": Tiny(DREAM, shift=1, biases=True),
    "coda": Tiny(CODA, shift=1, qk_norm=True),
    "sdar": Tiny(SDAR, block=4, qk_norm=True),
    "fast-dllm-v2": Tiny(FAST, shift=1, block=4, biases=True),
    "efficient-dlm": Tiny(EFFICIENT, block=4, has_prompt_block=True, qk_norm=True),
    "scaled": Tiny(SCALED, shift=1, biases=True, frequencies=FREQUENCIES / 2),
    "sdar-tied": Tiny({**SDAR, "tie_word_embeddings": True}, block=4, qk_norm=True),
    "sdar-moe": Tiny(
        EXPERTS, block=4, qk_norm=True, experts=4, router=softmax_router(2, normalise=True)
    ),
    "llada-moe": Tiny(
        LLADA_MOE, qk_norm=True, experts=4, router=softmax_router(2, normalise=False)
    ),
    "nemotron": Tiny(NEMOTRON, block=4, has_causal_context=True, names=NEMOTRON_NAMES),
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
        ({"tensor": "model.transformer.blocks.0.attn_out.bias"}, "which have no tensor"),
        ({"config": {"eos_token_id": None}}, "no end of text"),
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


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tiny, Path]:
    write(OTHERS[request.param], tmp_path / "other")
    return OTHERS[request.param], tmp_path / "other"


def _logits(tiny: Tiny, folder: Path, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """The logits of the masked positions of one text behind a prompt of `PROMPT` tokens, from the
    reference: each block follows the clean text of those before it."""
    weights, rows = load_file(folder / "model.safetensors"), []
    size = tiny.block or len(tokens)
    origin = PROMPT if tiny.has_prompt_block or tiny.has_causal_context else 0
    for position in masked.nonzero().flatten().tolist():
        first = position - (position - origin) % size
        canvas = tokens.clone()
        canvas[first:] = tokens[first:].masked_fill(masked[first:], MASK)
        logits = forward(tiny, weights, canvas[: first + size], PROMPT)
        is_next = tiny.has_causal_context and position == first
        rows.append(logits[position - (1 if is_next else tiny.shift)])
    return torch.stack(rows)


def test_masks_of_other_layers_are_predicted_as_published(other: tuple[Tiny, Path]) -> None:
    tiny, folder = other
    teacher = open_teacher(folder)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (2, 14), generator=generator)
    masked = torch.zeros(2, 14, dtype=torch.bool)
    masked[0, [3, 4, 5, 9, 13]] = masked[1, [4, 8, 9, 10]] = True
    predicted = masked.clone()
    predicted[0, 4] = predicted[1, 10] = False
    found = masked_logits(teacher.model, tokens, masked, teacher.special, predicted, PROMPT)
    wrong: dict[str, Any] = {"shift": 1 - tiny.shift, "block": None if tiny.block else 4}
    if tiny.has_causal_context:
        wrong = {"shift": 1, "block": 2, "has_causal_context": False}
    elif tiny.block:
        wrong["has_prompt_block"] = not tiny.has_prompt_block
    if tiny.experts:
        wrong["router"] = softmax_router(2, normalise="llada" in tiny.config["model_type"])
    if tiny.frequencies is not None:
        wrong["frequencies"] = None
    for change in ({}, *({key: value} for key, value in wrong.items())):
        reference = replace(tiny, **change)
        every = [_logits(reference, folder, tokens[row], masked[row]) for row in range(2)]
        expected = torch.cat(every)[predicted[masked]]
        difference = (found - expected).detach()[:, :MASK].abs().max()
        assert (difference < 1e-3) == (not change), change


def test_other_layers_denoise_as_in_the_engine(other: tuple[Tiny, Path]) -> None:
    tiny, folder = other
    teacher = open_teacher(folder)
    prompts = [[3, 4, 5, 6], [7, 8]]
    expected, _ = denoise(teacher.model, prompts, 9, 1.1, teacher.special)
    decoder = "sdar:remasking=static" if tiny.block else "llada:block=0"
    if tiny.has_causal_context:
        decoder = "fast-dllm-v2:sub_block=4,threshold=1"
    with LLM(folder, dtype="float32", threads=1) as llm:
        found = llm.generate(prompts, decoder=decoder, max_tokens=9, ignore_eos=True)
    assert [answer.tokens for answer in found] == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["cd4lm", "dparallel"])
def test_other_layers_are_distilled(method: str, other: tuple[Tiny, Path], tmp_path: Path) -> None:
    _, folder = other
    recipe = DistillationRecipe(method, steps=2, batch=4, rate=3e-3, canvas=8, block=4)
    losses = distil(folder, tmp_path / "new", recipe)
    assert len(losses) == 2
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    with LLM(tmp_path / "new", threads=1) as llm:
        assert len(llm.generate([3, 4], decoder=method, max_tokens=6, ignore_eos=True).tokens) == 6


def test_a_student_keeps_the_block_size_of_its_teachers_name(tmp_path: Path) -> None:
    """A student's folder has another name, and its weights are not packed."""
    name = tmp_path / "SDAR-tiny-b8"
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(Tiny({**SDAR, "quantization_config": packed}, qk_norm=True), name)
    teacher = open_teacher(name)
    save_student(teacher, teacher.model.state_dict(), tmp_path / "new")
    assert open_teacher(tmp_path / "new").model.shape.block_size == 8
    assert "quantization_config" not in json.loads((tmp_path / "new/config.json").read_text())


@pytest.mark.one_in(3)
def test_a_student_of_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    write(Tiny({**LAYERS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
          tmp_path / "base")  # fmt: skip
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    base = load_checkpoint(tmp_path / "base")
    adapter = tmp_path / "adapter"
    train_block_adapter(base, adapter, AdapterRecipe(steps=1, block=4, shift=True), mask=MASK)
    teacher = open_teacher(adapter)
    assert (teacher.model.shape.block_size, teacher.model.shape.logit_shift) == (4, 1)
    save_student(teacher, teacher.model.state_dict(), tmp_path / "new")
    prompts, answers = [[3, 4, 5, 6, 7], [8, 9]], []
    for folder in (adapter, tmp_path / "new"):
        with LLM(folder, dtype="float32", threads=1) as llm:
            options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
            found = llm.generate(prompts, decoder="sdar:remasking=static", **options)
            answers.append([answer.tokens for answer in found])
    assert answers[0] == answers[1]
    assert answers[0] == denoise(teacher.model, prompts, 9, 1.1, teacher.special)[0]


def test_halves_of_blocks_are_within_the_blocks_of_the_model() -> None:
    """The answers begin at the end of the model's second block."""
    part = Canvases(torch.zeros(40, 15, dtype=torch.long), 7, torch.full((40,), 8))
    generator = torch.Generator().manual_seed(0)
    halves = block_halves(part, 4, generator, from_start=True)
    inside = (halves[0][1] | halves[1][1]).long()
    blocks = {tuple(row.nonzero().flatten().tolist()) for row in inside}
    assert blocks == {(7,), (8, 9, 10, 11), (12, 13, 14)}
    free = block_halves(part, 4, torch.Generator().manual_seed(0))
    assert int((free[0][1] | free[1][1]).nonzero()[:, 1].min()) == 7
    assert {int(row.sum()) for row in free[0][1] | free[1][1]} == {4}


def test_models_whose_rows_are_not_trained_are_refused(tmp_path: Path) -> None:
    write(OTHERS["sdar"], tmp_path / "sdar")
    with pytest.raises(InvalidRequestError, match="block=3 does not divide"):
        distil(tmp_path / "sdar", tmp_path / "new", DistillationRecipe("dparallel", block=3))
    for config, message in (
        ({**LAYERS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "a causal one"),
        ({**NEMOTRON, "rope_parameters": GROWING}, "this NemotronLabsDiffusionModel has others"),
        ({**EXPERTS, "mlp_only_layers": [0]}, "alike in all layers"),
    ):
        write(Tiny(config), tmp_path / "no")
        with pytest.raises(CheckpointError, match=message):
            open_teacher(tmp_path / "no")


@pytest.mark.one_in(2)
def test_filters_are_trained_for_models_of_all_kinds(
    other: tuple[Tiny, Path], tmp_path: Path
) -> None:
    tiny, folder = other
    found = train_filter(folder, tmp_path / "f", prompts=12, canvas=8, epochs=3)
    assert found["rows"] > 0 and 0 <= found["agreeing"] <= 1
    with LLM(folder, threads=1) as llm:
        for cache in ("none", "block") if tiny.block else ("none", "dual"):
            decoder = f"learn2pd:filter={tmp_path / 'f'},cache={cache}"
            answer = llm.generate([3, 4], decoder=decoder, max_tokens=6, ignore_eos=True)
            assert 1 <= len(answer.tokens) <= 6
