"""Nemotron-Labs-Diffusion in its published layout, against a forward pass in plain torch: a causal
context, blocks from the end of the prompt, YaRN, queries that grow; and the same weights as a
causal model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from diffusion_checkpoints import (
    MASK,
    SIZES,
    Tiny,
    assert_decodes_as_published,
    forward,
    largest_difference,
    recorded,
    write,
)

#: The positions that the model was trained with before YaRN: tests go beyond them.
ORIGINAL, FACTOR, THETA, BETA = 16, 16.0, 1000000.0, 0.1
PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["NemotronLabsDiffusionModel"],
    "attention_bias": False,
    "attn_implementation": "sdpa",
    "auto_map": {
        "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
        "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
    },
    "block_size": 8,
    "bos_token_id": 1,
    "dlm_paradigm": "bidirectional",
    "eos_token_id": 11,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": FACTOR,
        "llama_4_scaling_beta": BETA,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": THETA,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def yarn() -> torch.Tensor:
    """Fast frequencies as they are, slow ones divided by the factor, a ramp between them."""
    dim = SIZES["head_dim"]
    plain = THETA ** (-torch.arange(0, dim, 2).double() / dim)

    def index(turns: float) -> float:
        return dim * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(index(32.0)), 0), min(math.ceil(index(1.0)), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / (high - low)).clamp(0, 1)
    return plain / FACTOR * ramp + plain * (1 - ramp)


def growth(positions: torch.Tensor) -> torch.Tensor:
    return 1 + BETA * torch.log(1 + (positions // ORIGINAL).double())


NAMES = {
    "embed": "encoder.embed_tokens",
    "norm": "encoder.norm",
    "head": "diffusion_head",
    "layer": "encoder.layers.{}.",
}
TINY = Tiny(
    PUBLISHED,
    block=8,
    has_causal_context=True,
    names=NAMES,
    frequencies=yarn(),
    query_factor=growth,
    decoder="fast-dllm-v2:sub_block=32,threshold=0.9",
)


#: Tensors of a vision-language checkpoint that are not of its language model.
UNREAD = ("vision_tower.patch_conv", "multi_modal_projector.linear_1")
AR = "nemotron_labs_diffusion_ar"


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("nemotron_labs_diffusion_vlm", "NemotronLabsDiffusionVLMModel"),
        ("ministral_dlm", "MinistralDiffEncoderModel"),
    ],
)
def test_other_classes_of_the_same_layers_equal_the_reference(
    model_type: str, name: str, tmp_path: Path
) -> None:
    """Also beside a vision tower, which is not read, and saved in the mode of next tokens."""
    config = {**PUBLISHED, "model_type": model_type, "architectures": [name]}
    config |= {"vision_config": {"model_type": "pixtral"}, "dlm_paradigm": "autoregressive"}
    del config["auto_map"]
    tiny = replace(TINY, config=config)
    tensors = write(tiny, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {f"{part}.weight": torch.ones(4, 4) for part in UNREAD}
    save_file(weights, tmp_path / "model.safetensors")
    passes = recorded(tmp_path, list(range(9)))
    assert largest_difference(tiny, tensors, passes, 9) < 2e-4
    with LLM(str(tmp_path), cache_positions=256, family=AR) as llm:
        assert llm.model.spec.causal and llm.default_decoder == "auto"


def test_blocks_behind_a_longer_prompt_equal_the_reference(tmp_path: Path) -> None:
    """Three blocks, the last ones behind finished ones, at positions beyond the original ones."""
    tensors = write(TINY, tmp_path)
    prompt = [(5 * i + 2) % 60 for i in range(21)]
    passes = recorded(tmp_path, prompt, length=24)
    assert len(passes[0][0]) == 45 and len(passes) >= 6
    assert largest_difference(TINY, tensors, passes, len(prompt)) < 2e-4


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: blocks from position 0 in a context of blocks, smaller blocks, shifted
    logits, queries that do not grow, frequencies without YaRN."""
    tensors = write(TINY, tmp_path)
    prompt = [(5 * i + 2) % 60 for i in range(21)]
    passes = recorded(tmp_path, prompt, length=16)
    plain = THETA ** (-torch.arange(0, 16, 2).double() / 16)
    wrongs: list[dict[str, Any]] = [
        {"has_causal_context": False},
        {"block": 4},
        {"shift": 1},
        {"query_factor": None},
        {"frequencies": plain},
    ]
    for wrong in wrongs:
        assert largest_difference(replace(TINY, **wrong), tensors, passes[-1:], 21) > 1e-3, wrong


def generated(
    tensors: dict[str, torch.Tensor], prompt: list[int], num_blocks: int, threshold: float
) -> tuple[list[int], int]:
    """The answer of the published loop, and its passes: the last causal row before a block gives
    its first token, and each further pass the masks above the threshold, or the best one."""
    canvas, passes = list(prompt), 0

    def probabilities() -> torch.Tensor:
        logits = forward(TINY, tensors, canvas, len(prompt))
        logits[:, MASK] = -torch.inf
        return logits.softmax(-1)

    for _ in range(num_blocks):
        start = len(canvas)
        canvas += [MASK] * 8
        canvas[start] = int(probabilities()[start - 1].argmax())
        passes += 1
        while MASK in canvas:
            confidence, best = probabilities().max(-1)
            masked = [position for position, token in enumerate(canvas) if token == MASK]
            chosen = [position for position in masked if confidence[position] > threshold]
            for position in chosen or [max(masked, key=lambda one: float(confidence[one]))]:
                canvas[position] = int(best[position])
            passes += 1
    return canvas[len(prompt) :], passes


@pytest.mark.slow
@pytest.mark.parametrize("prompt_length", [8, 21])
def test_the_causal_row_before_a_block_gives_its_first_token(
    prompt_length: int, tmp_path: Path
) -> None:
    tensors = write(TINY, tmp_path)
    prompt = [(5 * i + 2) % 60 for i in range(prompt_length)]
    expected, passes = generated(tensors, prompt, 3, 0.5)
    assert 6 < passes < 24
    with LLM(str(tmp_path), cache_positions=256, threads=1) as llm:
        decoder = "fast-dllm-v2:sub_block=32,threshold=0.5"
        answer = llm.generate(prompt, decoder=decoder, max_tokens=24, ignore_eos=True)
        assert answer.tokens == expected and answer.stats.passes == passes
        masks_alone = llm.generate(
            prompt, decoder="sdar:threshold=0.5", max_tokens=24, ignore_eos=True
        )
        assert masks_alone.tokens != expected
        verified = llm.generate(prompt, decoder="s2d2", max_tokens=24, ignore_eos=True)
        assert verified.tokens[0] == expected[0] != masks_alone.tokens[0]


@pytest.mark.parametrize("says", ["family", "class"])
def test_the_same_weights_are_a_causal_model(says: str, tmp_path: Path) -> None:
    """Greedy tokens equal those of the reference with causal rows, with and without a draft of the
    same weights, which drafts a block at a time."""
    names = ["NemotronLabsDiffusionForCausalLM"]
    config = PUBLISHED if says == "family" else {**PUBLISHED, "architectures": names}
    tensors = write(replace(TINY, config=config), tmp_path / "causal")
    write(TINY, tmp_path / "draft")
    causal, text = replace(TINY, block=1, has_causal_context=False), [3, 1, 4, 15, 9]
    for _ in range(12):
        text.append(int(forward(causal, tensors, text)[-1].argmax()))
    options = {"family": "nemotron_labs_diffusion_ar"} if says == "family" else {}
    with LLM(
        str(tmp_path / "causal"),
        draft=str(tmp_path / "draft"),
        cache_positions=512,
        threads=1,
        **options,  # type: ignore[arg-type]
    ) as llm:
        assert llm.model.spec.causal and llm.default_decoder == "auto"
        for decoder in ("autoregressive", "diffuspec"):
            found = llm.generate(text[:5], max_tokens=12, decoder=decoder, ignore_eos=True)
            assert found.tokens == text[5:], decoder


@pytest.mark.slow
def test_the_published_adapter_is_for_drafts_alone(tmp_path: Path) -> None:
    """`linear_spec_lora`, as the repository has it: its folder is the draft model, and the text is
    that of the causal model."""
    write(TINY, tmp_path / "model")
    adapter = tmp_path / "model" / "linear_spec_lora"
    adapter.mkdir()
    names = [f"encoder.layers.{i}.self_attn.o_proj" for i in range(SIZES["num_hidden_layers"])]
    width = SIZES["num_attention_heads"] * SIZES["head_dim"]
    factors = {"A": (4, width), "B": (SIZES["hidden_size"], 4)}
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            f"base_model.model.{name}.lora_{part}.weight": torch.randn(shape, generator=generator)
            for name in names
            for part, shape in factors.items()
        },
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["o_proj"]}
    config["base_model_name_or_path"] = str(tmp_path / "model")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    plain, adapted = (load_checkpoint(one) for one in (tmp_path / "model", adapter))
    key = f"{names[0]}.weight"
    change = np.asarray(adapted.tensors[key], np.float32) - np.asarray(plain.tensors[key])
    assert np.abs(change).max() > 0.5
    prompt = [3, 1, 4, 15, 9]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    texts = []
    for draft in (tmp_path / "model", adapter):
        with LLM(
            str(tmp_path / "model"),
            draft=str(draft),
            family="nemotron_labs_diffusion_ar",
            cache_positions=512,
            threads=1,
        ) as llm:
            texts.append(llm.generate(prompt, decoder="autoregressive", **options).tokens)
            texts.append(llm.generate(prompt, decoder="diffuspec", **options).tokens)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, "lacks 'block_size'"),
        ({"dlm_paradigm": "block_diff"}, "dlm_paradigm is 'block_diff'"),
    ],
)
def test_what_is_not_supported_raises_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**PUBLISHED, **change})
