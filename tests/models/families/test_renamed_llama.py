"""Families that are Llama, Qwen2 or StableLM in another layout: a model of `transformers` under
their names."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, interleave, tensor_names, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import BASE, built, chain, greedy, hf_logits, hf_model, logits

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers.": "transformer.h.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "attn.attention.out_proj",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}
QWEN = {
    **EXAONE,
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
}
INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}
#: Sizes under their usual keys.
SIZES = {key: value for key, value in BASE.items() if key not in ("initializer_range",)}


def renamed(model: Any, names: dict[str, str]) -> dict[str, np.ndarray]:
    """The tensors of a model under other names."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        for usual, other in names.items():
            name = name.replace(usual, other)
        tensors[name] = tensor.numpy()
    return tensors


def fuse(tensors: dict[str, np.ndarray], names: str, fused: str, groups: int = 1) -> None:
    """Replace queries, keys and values by one tensor; `names` has a place for the part's letter.
    With several groups, each has its queries, its keys and its values one after the other."""
    for name in [name for name in tensors if names.format("q") in name]:
        parts = [tensors.pop(name.replace(names.format("q"), names.format(x))) for x in "qkv"]
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        whole = np.concatenate(by_group, 1).reshape(-1, *parts[0].shape[1:])
        tensors[name.replace(names.format("q"), fused)] = whole


def saved(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    found = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(found, folder / "x.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exaone(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as EXAONE 3.5."""
    config = {
        "model_type": "exaone",
        "architectures": ["ExaoneForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
        **{key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
        "num_layers": BASE["num_hidden_layers"],
        "num_attention_heads": BASE["num_attention_heads"],
        "num_key_value_heads": BASE["num_key_value_heads"],
        "max_position_embeddings": BASE["max_position_embeddings"],
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    }
    return saved(folder, renamed(model, EXAONE), {**config, **changes})


def internlm2(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as InternLM2: queries, keys and values fused by key head."""
    keys = ("hidden_act", "rms_norm_eps", "attention_bias", *BASE)
    config = {key: value for key, value in model.config.to_dict().items() if key in keys}
    config |= {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "bias": config.pop("attention_bias"),
        "rope_theta": 500.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    tensors = renamed(model, INTERNLM2)
    fuse(tensors, "self_attn.{}_proj", "attention.wqkv", config["num_key_value_heads"])
    return saved(folder, tensors, {**config, **changes})


def same_names(model_type: str, architecture: str, **keys: Any) -> Callable[..., Path]:
    """A writer of folders of a family that has Llama's names."""

    def write(folder: Path, model: Any, **changes: Any) -> Path:
        own = {"model_type": model_type, "architectures": [architecture], "rms_norm_eps": 1e-6}
        config = {**SIZES, **own, "rope_theta": 500.0, **keys, **changes}
        return saved(folder, renamed(model, {}), config)

    return write


def phi4_multimodal(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as published, beside an update for images."""
    config = {**SIZES, "model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"]}
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    tensors = renamed(model, {module: f"{module}.base_layer" for module in modules})
    update = np.ones((2, BASE["hidden_size"]), np.float32)
    tensors["model.layers.0.self_attn.qkv_proj.lora_A.vision.weight"] = update
    own = {"rms_norm_eps": 1e-5, "rope_theta": 500.0}
    return saved(folder, tensors, {**config, **own, **changes})


def baichuan(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as Baichuan 7B, whose keys are as many as queries. With the
    vocabulary of Baichuan 2, the rows of the head have other lengths."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {key: model.config.to_dict()[key] for key in (*keys, "num_attention_heads")}
    config |= {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "max_position_embeddings": 256,
        "model_max_length": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    tensors = renamed(model, {})
    fuse(tensors, "{}_proj", "W_pack")
    return saved(folder, tensors, {**config, **changes})


def baichuan2(folder: Path, model: Any, **changes: Any) -> Path:
    """The same as Baichuan 2: the rows of the model's head have the norm 1, those stored others."""
    import torch

    head = model.lm_head.weight
    lengths = torch.linspace(0.5, 8.0, len(head)).unsqueeze(1)
    with torch.no_grad():
        head.copy_(head / head.norm(dim=1, keepdim=True) * lengths)
        path = baichuan(folder, model, **changes)
        head.copy_(head / lengths)
    return path


def qwen(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as Qwen."""
    config = {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 160,
        "kv_channels": 12,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 1024,
        "seq_length": 256,
        "no_bias": True,
        "rotary_emb_base": 500.0,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
    }
    tensors = renamed(model, QWEN)
    fuse(tensors, "attn.attention.{}_proj", "attn.c_attn")
    return saved(folder, tensors, {**config, **changes})


CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers.": "transformer.encoder.layers.",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def chatglm(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model, GLM of `transformers`, as ChatGLM3."""
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": 131,
        "vocab_size": 131,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "num_layers": 3,
        "num_attention_heads": 4,
        "kv_channels": 12,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "seq_length": 256,
        "layernorm_epsilon": 1e-5,
        "rope_ratio": 0.05,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
    }
    tensors = renamed(model, CHATGLM)
    fuse(tensors, "self_attn.{}_proj", "self_attention.query_key_value")
    return saved(folder, tensors, {**config, **changes})


def deepseek(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model, Qwen2 with experts, as DeepSeekMoE: its shared expert has the factor
    0.5, because its gate is zero, and its attention no biases."""
    model.save_pretrained(folder / "of transformers")
    tensors = {}
    for name, tensor in load_file(folder / "of transformers" / "model.safetensors").items():
        if name.endswith(("shared_expert_gate.weight", ".bias")):
            assert not tensor.any()
            continue
        factor = 0.5 if name.endswith("shared_expert.down_proj.weight") else 1.0
        tensors[name.replace("shared_expert.", "shared_experts.")] = tensor * np.float32(factor)
    config = {
        **SIZES,
        "model_type": "deepseek",
        "architectures": ["DeepseekForCausalLM"],
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
    }
    return saved(folder, tensors, {**config, **changes})


def deepseek_ocr(folder: Path, model: Any) -> Path:
    """As the language model of DeepSeek-OCR, which has DeepSeek-V2's class and no latents."""
    return deepseek(
        folder,
        model,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        use_mla=False,
        topk_method="greedy",
        num_key_value_heads=4,
        rope_theta=1e4,
    )


KORMO = {
    "input_layernorm": "pre_attention_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}


def kormo(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as KORMo."""
    own = {"model_type": "kormo", "architectures": ["KORMoForCausalLM"], "rms_norm_eps": 1e-6}
    return saved(folder, renamed(model, KORMO), {**SIZES, **own, "rope_theta": 500.0, **changes})


TELECHAT = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "model.layers.": "transformer.h.",
    "self_attn.q_proj": "self_attention.query",
    "self_attn.o_proj": "self_attention.dense",
}


def telechat(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as TeleChat: a key head is followed by its value head, and the
    model's biases behind the sublayers are the only ones."""
    config = {
        "model_type": "telechat",
        "architectures": ["TeleChat2ForCausalLM"],
        "vocab_size": 131,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "intermediate_size": 1,
        "n_layer": 3,
        "n_head": 4,
        "num_key_value_heads": 2,
        "layer_norm_epsilon": 1e-6,
        "hidden_act": "fastgelu",
        "seq_length": 256,
        "training_seqlen": 256,
        "embed_layernorm": False,
        "tie_word_embeddings": False,
    }
    tensors = renamed(model, TELECHAT)
    for name in [name for name in tensors if name.endswith("k_proj.weight")]:
        keys = tensors.pop(name).reshape(2, 12, -1)
        values = tensors.pop(name.replace("k_proj", "v_proj")).reshape(2, 12, -1)
        whole = np.concatenate([keys, values], 1).reshape(48, -1)
        tensors[name.replace("self_attn.k_proj", "self_attention.key_value")] = whole
    without = ("query.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}
    return saved(folder, tensors, {**config, **changes})


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64}
BIASES = {"attention_bias": True, "mlp_bias": True}
MANY_KEYS = {"num_key_value_heads": 4}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [0],
}
#: The writer of a folder, the classes of `transformers`, and the settings of the model.
CASES: dict[str, tuple[Callable[..., Path], str, dict[str, Any]]] = {
    "exaone": (exaone, "Llama", {"rms_norm_eps": 1e-5}),
    "internlm2": (internlm2, "Llama", {"attention_bias": True}),
    "iquestcoder": (
        same_names("iquestcoder", "IQuestCoderForCausalLM", head_dim=16),
        "Llama",
        {"head_dim": 16},
    ),
    "llama of old": (same_names("llama", "LLaMAForCausalLM"), "Llama", {}),
    "kormo": (kormo, "Llama", {}),
    "telechat": (telechat, "Llama", {**BIASES, "rope_parameters": {**ROPE, "rope_theta": 1e4}}),
    "telechat trained twice": (
        functools.partial(telechat, base_seqlen=64),
        "Llama",
        {**BIASES, "rope_parameters": {**ROPE, "rope_theta": 1e4 * 7 ** (12 / 10)}},
    ),
    "telechat3": (
        same_names(
            "telechat3",
            "TeleChat3ForCausalLM",
            rope_scaling={**YARN, "type": "telechat3-yarn"},
        ),
        "Llama",
        {
            "rope_parameters": {
                **ROPE,
                **YARN,
                "rope_type": "yarn",
                "attention_factor": 0.07 * math.log(4.0) + 1.0,
            }
        },
    ),
    "xverse": (same_names("xverse", "XverseForCausalLM"), "Llama", {}),
    "aquila": (same_names("aquila", "AquilaForCausalLM"), "Llama", {}),
    "internlm": (
        same_names(
            "internlm", "InternLMForCausalLM", bias=True, rotary={"base": 500.0, "type": "dynamic"}
        ),
        "Llama",
        {"attention_bias": True},
    ),
    "pangu-embedded": (
        same_names("PanguEmbedded", "PanguEmbeddedForCausalLM", bias=True),
        "Llama",
        {"attention_bias": True},
    ),
    "internlm without biases": (
        same_names("internlm", "InternLMForCausalLM", bias=False, rotary={"base": 500.0}),
        "Llama",
        {},
    ),
    "orion": (
        same_names("orion", "OrionForCausalLM", rms_norm_eps=1e-5),
        "StableLm",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    ),
    "baichuan": (
        baichuan, "Llama", {**MANY_KEYS, "rope_parameters": {**ROPE, "rope_theta": 10_000.0}}
    ),
    "baichuan2": (
        baichuan2,
        "Llama",
        {**MANY_KEYS, "vocab_size": 125_696, "rope_parameters": {**ROPE, "rope_theta": 10_000.0}},
    ),
    "phi4 multimodal": (phi4_multimodal, "Phi3", {}),
    "qwen": (qwen, "Qwen2", MANY_KEYS),
    "deepseek": (deepseek, "Qwen2Moe", EXPERTS),
    "deepseek2-ocr": (
        deepseek_ocr,
        "Qwen2Moe",
        {**EXPERTS, **MANY_KEYS, "rope_parameters": {**ROPE, "rope_theta": 1e4}},
    ),
    "chatglm": (
        chatglm,
        "Glm",
        {
            "head_dim": 12,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
}  # fmt: skip


def original(name: str) -> Any:
    _, family, settings = CASES[name]
    model = hf_model(family, **{"rope_parameters": dict(ROPE), **settings})
    if name.startswith("deepseek"):
        for parameter, tensor in model.named_parameters():
            if parameter.endswith(("shared_expert_gate.weight", ".bias")):
                tensor.data.zero_()
    if name.startswith("telechat") and name != "telechat3":
        for parameter, tensor in model.named_parameters():
            if parameter.endswith(".bias") and not parameter.endswith(
                ("o_proj.bias", "down_proj.bias")
            ):
                tensor.data.zero_()
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_match(name: str, tmp_path: Path) -> None:
    theirs = original(name)
    ours = built(load_checkpoint(CASES[name][0](tmp_path, theirs)), "float32")
    tokens = greedy(ours, PROMPT, 64)
    assert len(set(tokens)) > 2
    whole = PROMPT + tokens
    expected = hf_logits(theirs, whole)
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(ours, chain(whole)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("exaone", {"layer_norm_epsilon": 1.0}),
        ("exaone", {"rope_theta": 1e4}),
        ("internlm2", {"rms_norm_eps": 1.0}),
        ("internlm2", {"rope_theta": 1e4}),
        ("internlm", {"rotary": {"base": 1e4, "type": "origin"}}),
        ("orion", {"rms_norm_eps": 0.5}),
        ("pangu-embedded", {"rope_theta": 1e4}),
        ("baichuan", {"max_position_embeddings": None}),  # linear biases
        ("kormo", {"rope_theta": 1e4}),
        ("telechat", {"layer_norm_epsilon": 1.0}),
        ("telechat", {"base_seqlen": 64}),
        ("telechat3", {"rope_scaling": {**YARN, "type": "yarn"}}),
        ("qwen", {"layer_norm_epsilon": 1.0}),
        ("qwen", {"rotary_emb_base": 1e4}),
        ("phi4 multimodal", {"partial_rotary_factor": 0.5}),
        ("chatglm", {"rope_ratio": 1}),
        ("chatglm", {"layernorm_epsilon": 1.0}),
        ("deepseek", {"norm_topk_prob": True}),
        ("deepseek", {"num_experts_per_tok": 3}),
    ],
)
def test_a_wrong_key_changes_the_logits(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    theirs = original(name)
    wrong = built(load_checkpoint(CASES[name][0](tmp_path, theirs, **change)), "float32")
    assert np.abs(logits(wrong, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() > 1e-2


def test_the_rows_of_other_heads_of_baichuan_keep_their_norms(tmp_path: Path) -> None:
    """Wrong twin of Baichuan 2: the vocabulary of the first one."""
    theirs = original("baichuan")
    wrong = built(load_checkpoint(baichuan2(tmp_path, theirs)), "float32")
    assert np.abs(logits(wrong, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("exaone", {"num_layers": None}, "lacks 'num_hidden_layers'"),
        ("exaone", {"activation_function": "mish"}, "activation 'mish'"),
        (
            "internlm2",
            {"num_key_value_heads": 3},
            "num_attention_heads is 4; allowed is a multiple",
        ),
        ("internlm2", {"num_attention_heads": 6, "num_key_value_heads": 6}, "has shape"),
        ("internlm", {"rotary": {"type": "linear"}}, "rotary.type is 'linear'; allowed is dynamic"),
        (
            "baichuan",
            {"max_position_embeddings": None, "model_max_length": None},
            "lacks 'model_max_length'",
        ),
        ("telechat", {"embed_layernorm": True}, "embed_layernorm True is not supported"),
        ("telechat", {"base_seqlen": 0}, "base_seqlen is 0"),
        ("qwen", {"intermediate_size": 1}, "intermediate_size is 1"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct 0.5 is not supported in a qwen config"),
        ("qwen", {"num_attention_heads": 5}, "num_attention_heads is 5"),
        ("chatglm", {"kv_channels": None}, r"without kv_channels \(ChatGLM-6B\) is not supported"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm False is not supported"),
        ("deepseek", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ],
)
def test_bad_configs_end_in_one_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(load_checkpoint(CASES[name][0](tmp_path, original(name), **change)))
    assert "\n" not in str(caught.value)


def test_qwen_opens_with_the_context_that_it_was_trained_for(tmp_path: Path) -> None:
    """Its own code scales longer contexts by rules of its own."""
    checkpoint = load_checkpoint(qwen(tmp_path, original("qwen")))
    assert built(checkpoint).spec.max_positions == 256
    with pytest.raises(CheckpointError, match=r"max_positions is 257; .* 256 at most \(seq_length"):
        built(checkpoint, max_positions=257)


#: The GGUF files: what replaces the usual metadata, and whether rows of queries and keys are those
#: of interleaved pairs.
FILES: dict[str, tuple[dict[str, Any], bool]] = {
    "xverse": ({"rope.dimension_count": 12}, True),
    "pangu-embedded": ({"rope.dimension_count": 12}, False),
    "orion": ({"attention.layer_norm_rms_epsilon": None}, False),
    "baichuan": ({"rope.freq_base": 1e4, "rope.dimension_count": 12}, True),
    "qwen": (
        {
            "feed_forward_length": 160,
            "attention.head_count_kv": None,
            "rope.dimension_count": 12,
        },
        False,
    ),
    "deepseek": (
        {
            "rope.dimension_count": 12,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 24,
            "expert_weights_scale": 1.0,
        },
        True,
    ),
}
FILES["deepseek2-ocr"] = (
    {**FILES["deepseek"][0], "rope.dimension_count": 0, "rope.freq_base": 1e4},
    False,
)


def as_gguf(name: str, model: Any, folder: Path, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes of the folder; its architecture is the model
    type."""
    (metadata, is_permuted), config = FILES[name], model.config.to_dict()
    count = config["num_hidden_layers"]
    usual = {**usual_metadata(config, count), "rope.freq_base": 500.0}
    path = folder / "tiny.gguf"
    writer = writer_with(path, name, {**usual, **metadata, **changes}, config["vocab_size"])
    names = tensor_names(name, count)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, tensor in load_file(CASES[name][0](folder, model) / "x.safetensors").items():
        parts = {key: tensor}
        if "W_pack" in key:
            thirds = zip("qkv", np.split(tensor, 3), strict=True)
            parts = {key.replace("W_pack", f"{part}_proj"): third for part, third in thirds}
        for part, found in parts.items():
            if ".experts." in part:
                block, _, rest = part.partition(".experts.")
                stacks.setdefault(f"{block}.experts.{rest.split('.')[1]}.weight", []).append(found)
                continue
            target = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert target is not None, part
            kind = part.split(".")[-2]
            if is_permuted and kind in heads:
                found = interleave(found, heads[kind])
            writer.add_tensor(target, np.ascontiguousarray(found))
    for key, matrices in stacks.items():
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), np.stack(matrices))
    finish(writer)
    return path


@pytest.mark.parametrize("name", FILES)
def test_logits_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    model = original(name)
    found = logits(built(load_checkpoint(as_gguf(name, model, tmp_path))), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() < 1e-4


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "baichuan":  # it has rotary embeddings in models of 32 layers only
        write, family, settings = CASES[name]
        settings = {**settings, "num_hidden_layers": 32, "initializer_range": 0.05}
        monkeypatch.setitem(CASES, name, (write, family, settings))
    path = as_gguf(name, original(name), tmp_path)
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    assert np.abs(found - llama_cpp_logits(path, PROMPT)).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("orion", {"attention.layer_norm_epsilon": 0.5}),
        ("qwen", {"rope.freq_base": 1e4}),
        ("deepseek", {"expert_used_count": 3}),
        ("deepseek", {"expert_weights_scale": 2.0}),
    ],
)
def test_a_wrong_key_of_a_file_changes_the_logits(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model = original(name)
    found = logits(built(load_checkpoint(as_gguf(name, model, tmp_path, **change))), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() > 1e-2
