"""The language models of multimodal checkpoints, as `transformers` saves them, against it."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode.errors import CheckpointError
from anydecode.models.families.config import spec_from_config
from anydecode.models.families.nested import DEFAULTS
from anydecode.models.loading import load_checkpoint
from gguf_models import write_folder
from tiny_models import BASE, LATENT_SIZES, built, chain, hf_logits, hf_model, logits

TOKENS = [(7 * i + 3) % 120 for i in range(64)]
#: The smallest vision towers; each class reads some of the keys.
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 48,
    "patch_size": 4,
    "in_channels": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}
DEEP = {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
#: The same of towers for speech.
AUDIO = {
    "d_model": 16,
    "hidden_size": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
MOLMO = {"head_dim": 12, "additional_vocab_size": 5, "attention_bias": True}
MOLMO_VISION = {**VISION, "image_size": [16, 16], "head_dim": 8}
#: The towers of Qwen-Omni.
OMNI = {
    "vision_config": {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "audio_config": {**AUDIO, "output_dim": 48, "downsample_hidden_size": 8},
}


def _rope(*sections: int, **keys: Any) -> dict[str, Any]:
    """Parameters of a rotary embedding, whose sections are one for equal coordinates."""
    usual = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [*sections]}
    return {"rope_parameters": {**usual, **keys}}


COHERE = {"model_type": "cohere2", "sliding_window": 9, "tie_word_embeddings": True}
#: The prefix of the classes: the keys of `text_config`, and those of the config of the tower.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (_rope(2, 2, 2), {**VISION, "embed_dim": 16, "hidden_size": 48}),
    "Qwen2_5_VL": ({**_rope(2, 2, 2), "tie_word_embeddings": True}, VISION),
    "Qwen3VL": ({"head_dim": 16, "tie_word_embeddings": True}, DEEP),
    "Qwen3VLMoe": ({"head_dim": 16, "num_experts": 6, **EXPERTS}, DEEP),
    "Glm4v": (
        {
            "model_type": "glm4v_text",
            "head_dim": 12,
            **_rope(1, 1, 1, partial_rotary_factor=0.5),
        },
        VISION,
    ),
    "Glm4vMoe": (
        {
            "model_type": "glm4v_moe_text",
            "head_dim": 12,
            "n_routed_experts": 6,
            **EXPERTS,
            **_rope(1, 1, 1, partial_rotary_factor=0.5),
        },
        VISION,
    ),
    "Idefics3": ({"model_type": "llama"}, VISION),
    "SmolVLM": ({"model_type": "llama", "tie_word_embeddings": True}, VISION),
    "Mllama": (
        {
            "model_type": "mllama_text_model",
            "num_hidden_layers": 4,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        {**VISION, "max_num_tiles": 4, "vision_output_dim": 16, "num_global_layers": 1},
    ),
    "AyaVision": (COHERE, {**VISION, "model_type": "siglip_vision_model"}),
    "Cohere2Vision": (COHERE, {**VISION, "model_type": "siglip_vision_model"}),
    "CohereCompass": (
        {
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": _rope(2, 2, 2)["rope_parameters"],
            },
        },
        DEEP,
    ),
    "Lfm2Vl": (
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
    ),
    "Step3p7": (
        {
            "num_hidden_layers": 5,
            "head_dim": 12,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "attention_other_setting": {"num_attention_heads": 6},
            "sliding_window": 9,
            "rope_theta": [5e4, 500.0, 500.0, 500.0, 5e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "moe_layers_enum": "1,2,4",
            "n_routed_experts": 6,
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [0.0, 0.0, 0.2, 0.0, 0.4],
            "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.2, 0.4],
            **EXPERTS,
        },
        VISION,
    ),
    "MuseGlimmer": (
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 9,
            "qk_scale_factor": 2.5,
            "output_multiplier": 0.7,
            "post_norm_eps": 0.02,
        },
        {
            **VISION,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "patch_temporal": 1,
            "merge_size": 1,
        },
    ),
    "MistralLarge4": (
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 9,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        {**VISION, "model_type": "pixtral", "head_dim": 8},
    ),
    "MuseSpark": (
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_hidden_size": 20,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
        {
            "vision_config": {
                **VISION,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "patch_temporal": 1,
                "merge_size": 1,
            },
            "audio_config": {
                "patch_sizes": [2],
                "hidden_sizes": [8],
                "depths": [1],
                "num_hidden_layers": 1,
                "out_hidden_size": 48,
            },
        },
    ),
    "Lfm3Vl": (
        {"model_type": "lfm3", "head_dim": 12, "sliding_window": 9, "tie_word_embeddings": True},
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
    ),
    "Glm46V": (
        {
            "model_type": "glm4v_text",
            "head_dim": 12,
            **_rope(1, 1, 1, partial_rotary_factor=0.5),
        },
        {**VISION, "model_type": "glm4v_vision"},
    ),
    **dict.fromkeys(
        ("VipLlava", "LlavaNextVideo"),
        ({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    ),
    "DeepseekVL": ({"model_type": "llama"}, {**VISION, "model_type": "siglip_vision_model"}),
    "Janus": ({"model_type": "llama"}, VISION),
    "Idefics2": ({"model_type": "mistral"}, VISION),
    "LightOnOcr": ({"model_type": "qwen3", "head_dim": 12}, {**VISION, "model_type": "pixtral"}),
    "VideoLlama3": ({"model_type": "qwen2"}, VISION),
    "Voxtral": ({"model_type": "llama"}, AUDIO),
    "Qwen2Audio": ({"model_type": "qwen2"}, AUDIO),
    "GlmOcr": (
        {"head_dim": 16, **_rope(2, 3, 3)},
        {**VISION, "out_hidden_size": 48},
    ),
    "PaddleOCRVL": (
        {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True, **_rope(2, 3, 3)},
        VISION,
    ),
    "GotOcr2": ({"model_type": "qwen2"}, {**VISION, "mlp_dim": 16, "global_attn_indexes": [0]}),
    "Granite4Vision": (
        GRANITE,
        {**VISION, "model_type": "siglip_vision_model", "hidden_size": 64},
    ),
    "GraniteDocling": ({**GRANITE, "tie_word_embeddings": True}, {**VISION, "scale_factor": 2}),
    "HunYuanVL": (
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "xdrope",
                "rope_theta": 500.0,
                "factor": 1.0,
                "alpha": 50.0,
                "xdrope_section": [2, 2, 1, 1],
            },
        },
        VISION,
    ),
    "DeepseekOcr2": (
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            **EXPERTS,
        },
        {
            "sam_config": {**VISION, "mlp_dim": 16, "downsample_channels": [16, 16]},
            "encoder_config": {**VISION, "num_key_value_heads": 2, "vocab_size": 10},
        },
    ),
    "Aria": (
        {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 1},
        {**VISION, "model_type": "idefics3_vision"},
    ),
    "Molmo2": (MOLMO, MOLMO_VISION),
    "Molmo2 of OLMo": (
        {"head_dim": 12, "norm_after": True, "qk_norm_type": "olmo", "additional_vocab_size": 4},
        MOLMO_VISION,
    ),
    "MiniCPMV4_6": (
        {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "rms_norm_eps": 1e-2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
        },
        {**VISION, "insert_layer_id": 0},
    ),
    "Kimi_K25": (
        {
            "model_type": "deepseek_v3",
            **LATENT_SIZES,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        {**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "QianfanOCR": ({"model_type": "qwen3", "head_dim": 12}, {**VISION, "image_size": [16, 16]}),
    "Ovis2": (
        {"model_type": "qwen2"},
        {**VISION, "vocab_size": 20, "num_visual_indicator_tokens": 5},
    ),
    "VideoLlava": ({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    "Qwen2_5OmniThinker": (_rope(2, 2, 2), OMNI),
    "Qwen3OmniMoeThinker": ({"num_experts": 6, **EXPERTS, **_rope(2, 2, 2)}, OMNI),
    "AudioFlamingo3": ({"model_type": "qwen2"}, AUDIO),
    "Qwen3ASR": (
        {"model_type": "qwen3", "head_dim": 12},
        {"audio_config": {**AUDIO, "output_dim": 48, "downsample_hidden_size": 8}},
    ),
    "GlmAsr": ({"model_type": "llama", "head_dim": 12}, AUDIO),
    "Exaone4_5_": (
        {
            "model_type": "exaone4",
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {**VISION, "model_type": "exaone4_5_vision", "num_key_value_heads": 2},
    ),
}

#: Further keys of the outer config.
OUTER: dict[str, dict[str, Any]] = {
    "Granite4Vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "Molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
    "Ovis2": {"hidden_size": 48, "vocab_size": 131},
}


def saved(name: str, folder: Path) -> Any:
    """A random model, saved in `folder`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    text, tower = CASES[name]
    prefix = name.split()[0]
    keys = {
        "image_token_id": 130,
        "video_token_id": 129,
        "vision_start_token_id": 127,
        "vision_end_token_id": 126,
        "vision_config": tower,
    }
    if tower is AUDIO:
        keys = {"audio_config": tower}
    elif "audio_config" in tower:
        keys = tower
    config = getattr(transformers, "Exaone4_5_Config" if "Exa" in name else f"{prefix}Config")(
        text_config={**BASE, **text},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **deepcopy({**keys, **OUTER.get(prefix, {})}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif not any(part in key for part in ("visual", "vision", "audio")):
                torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    return model


def found(folder: Path) -> np.ndarray:
    return logits(built(load_checkpoint(folder), "float32"), chain(TOKENS))


#: The others take the same way, and are slow together.
FAST = ("Qwen2_5_VL", "Qwen3VLMoe", "Idefics3", "GlmOcr", "PaddleOCRVL", "HunYuanVL")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    expected = hf_logits(saved(name, tmp_path), TOKENS)
    if name in ("AyaVision", "Cohere2Vision"):
        # Its multimodal classes leave out the factor of logits that its own Cohere2 has.
        expected = expected * json.loads((tmp_path / "config.json").read_text())["text_config"].get(
            "logit_scale", 0.0625
        )
    assert np.abs(found(tmp_path) - expected).max() < 1e-4


def test_a_flat_config_of_qwen2_5_vl(tmp_path: Path) -> None:
    """As published: the keys of the language model beside `vision_config`, and the old name of the
    rotary embedding."""
    expected = hf_logits(saved("Qwen2_5_VL", tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **{key: value for key, value in text.items() if key != "model_type"},
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert np.abs(found(tmp_path) - expected).max() < 1e-4


def test_the_classes_of_a_text_config_are_not_those_of_the_model(tmp_path: Path) -> None:
    """As in SmolVLM: `transformers` reads the model type alone."""
    expected = hf_logits(saved("SmolVLM", tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["architectures"] = ["VLlama3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.abs(found(tmp_path) - expected).max() < 1e-4
    with pytest.raises(CheckpointError, match="architecture VLlama3ForCausalLM of model type"):
        spec_from_config(config["text_config"])


def test_a_folder_whose_text_config_leaves_out_defaults(tmp_path: Path) -> None:
    """As in LLaVA-1.5."""
    expected = hf_logits(saved("Idefics3", tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(tmp_path).config["max_position_embeddings"] == 2048
    assert np.abs(found(tmp_path) - expected).max() < 1e-4


def test_kimi_k2_5_as_published(tmp_path: Path) -> None:
    """The language model is DeepSeek-V3 of the model type kimi_k2, behind a prefix."""
    model = hf_model(
        "DeepseekV3",
        **LATENT_SIZES,
        **EXPERTS,
        num_key_value_heads=4,
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    tensors = {f"language_model.{name}": x.numpy() for name, x in model.state_dict().items()}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": {
            **model.config.to_dict(),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
        },
        "vision_config": {},
    }
    write_folder(tmp_path, {**tensors, "vision_tower.x": np.zeros(3, np.float32)}, **config)
    assert np.abs(found(tmp_path) - hf_logits(model, TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "key", "prefix"),
    [
        ("InternVLChatModel", "llm_config", "language_model."),
        ("KimiVLForConditionalGeneration", "text_config", "language_model."),
        ("DeepseekVLV2ForCausalLM", "language_config", "language."),
        ("Ovis2_5", "llm_config", "llm."),
        ("MiniCPMV", None, "llm."),
        ("DeepseekOCRForCausalLM", "language_config", ""),
        ("GraniteSpeechForConditionalGeneration", "text_config", "language_model."),
        ("NVLM_D", "llm_config", "language_model."),
        ("H2OVLChatModel", "llm_config", "language_model."),
        ("RForConditionalGeneration", "text_config", "language_model."),
        ("OpenCUAForConditionalGeneration", "text_config", "language_model."),
    ],
)
def test_a_language_model_under_another_key_or_prefix(
    architecture: str, key: str | None, prefix: str, tmp_path: Path
) -> None:
    """Repositories with code of their own. Wrong twin: keys of the whole model count in place of
    those of the language model."""
    model = hf_model("Qwen2", hidden_act="gelu")
    tensors = {prefix + name: x.numpy() for name, x in model.state_dict().items()}
    text = {**model.config.to_dict(), "architectures": ["Qwen2ForCausalLM"]}
    whole = {"architectures": [architecture], "model_type": "other", "hidden_act": "silu"}
    if key is None:
        config = {**text, **whole, "model_type": "minicpmv", "version": 2.6, "hidden_act": "gelu"}
    else:
        config = {**whole, "vision_config": {}, key: text}
    write_folder(tmp_path, {**tensors, "vision_tower.x": np.zeros(3, np.float32)}, **config)
    expected = hf_logits(model, TOKENS)
    assert np.abs(found(tmp_path) - expected).max() < 1e-4
    wrong = {"hidden_act": "silu"}
    write_folder(tmp_path, tensors, **{**config, **({key: {**text, **wrong}} if key else wrong)})
    assert np.abs(found(tmp_path) - expected).max() > 1e-2


def test_a_flat_config_of_keye(tmp_path: Path) -> None:
    """As published: the keys of Qwen3 beside `vision_config`."""
    model = hf_model("Qwen3", head_dim=16, hidden_act="gelu")
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    own = {"architectures": ["KeyeForConditionalGeneration"], "model_type": "Keye"}
    rope = {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4}
    config = {**model.config.to_dict(), **own, **rope, "vision_config": {"hidden_size": 8}}
    config.pop("rope_parameters", None)
    tensors |= {"visual.x": np.zeros(3, np.float32), "mlp_AR.x": np.zeros(3, np.float32)}
    write_folder(tmp_path, tensors, **config)
    assert np.abs(found(tmp_path) - hf_logits(model, TOKENS)).max() < 1e-4


def test_an_unknown_version_of_minicpm_v_is_refused() -> None:
    config = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 9.0}
    with pytest.raises(CheckpointError, match="version is 9.0; allowed is one of 2.5, 2.6"):
        spec_from_config(config)


@pytest.mark.parametrize("name", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_the_thinker_within_qwen_omni(name: str, tmp_path: Path) -> None:
    """As published: beside a talker, whose tensors have the same names behind another prefix."""
    expected = hf_logits(saved(f"{name}Thinker", tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {f"thinker.{key.removeprefix('thinker.')}": tensor for key, tensor in stored.items()}
    tensors |= {key.replace("thinker.", "talker."): tensor + 1 for key, tensor in tensors.items()}
    whole = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": "qwen_omni",
        "thinker_config": config,
        "talker_config": {},
    }
    write_folder(tmp_path, tensors, **whole)
    assert np.abs(found(tmp_path) - expected).max() < 1e-4


def test_the_two_layouts_of_experts_of_qwen3_vl(tmp_path: Path) -> None:
    """Published files have stacks `[experts, in, out]`; those that a new model is saved in have
    `[experts, out, in]`. Other shapes are refused."""
    saved("Qwen3VLMoe", tmp_path)
    expected = found(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    moved = {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(moved, path)
    assert np.array_equal(found(tmp_path), expected)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    save_file({**moved, name: tensors[name][:, :-1]}, path)
    with pytest.raises(CheckpointError, match="experts.gate_up_proj has shape"):
        found(tmp_path)


def test_the_key_of_the_whole_model_unties_the_head(tmp_path: Path) -> None:
    """The default of `text_config` says otherwise, and would take the embedding for the head."""
    model = saved("Qwen3VLMoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    assert config["tie_word_embeddings"] is False
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.abs(found(tmp_path) - hf_logits(model, TOKENS)).max() < 1e-4
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.abs(found(tmp_path) - hf_logits(model, TOKENS)).max() > 1e-1


def plain(value: Any) -> Any:
    """A spec as tuples, which are equal if all its numbers are."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, plain(getattr(value, name))) for name in names]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


#: Keys that a model needs and whose class has no default of them.
NEEDED = {
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 16,
    }
}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_text_config_may_leave_out_what_is_the_default_of_its_class(model_type: str) -> None:
    """As in LLaVA-1.5 and Gemma 3 4B. With another default, one of the two would differ."""
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    needed = NEEDED.get(model_type, {})
    whole = mapping[model_type](**needed).to_dict()
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    left_out = {**outer, "text_config": {"model_type": model_type, **needed}}
    expected, found = (
        spec_from_config(one) for one in ({**whole, "architectures": None}, left_out)
    )
    name = {"architecture": ""}
    assert plain(dataclasses.replace(found, **name)) == plain(dataclasses.replace(expected, **name))
    other = {**left_out["text_config"], "num_attention_heads": 2 * whole["num_attention_heads"]}
    wrong = spec_from_config({**outer, "text_config": other})
    assert plain(wrong.layers) != plain(expected.layers)


def test_numbers_of_layers_may_have_leading_zeros() -> None:
    """As `transformers` writes them for models of ten layers and more."""
    sizes = {**BASE, "num_hidden_layers": 12, "head_dim": 8, "global_head_dim": 16}
    transformers = pytest.importorskip("transformers")
    stored = transformers.Gemma4TextConfig(**sizes).to_dict()
    assert "05" in stored["per_layer_config"]
    found = spec_from_config(stored)
    assert [layer.attention.head_dim for layer in found.layers] == ([8] * 5 + [16]) * 2
