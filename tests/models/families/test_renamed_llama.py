"""Families that are Llama in another layout: a model of `transformers` under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
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


def renamed(model: Any, names: dict[str, str]) -> dict[str, np.ndarray]:
    """The tensors of a model under other names."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        for usual, other in names.items():
            name = name.replace(usual, other)
        tensors[name] = tensor.numpy()
    return tensors


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
    save_file(renamed(model, EXAONE), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


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
    kv_heads = config["num_key_value_heads"]
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        by_group = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
        fused = np.concatenate(by_group, 1).reshape(-1, *parts[0].shape[1:])
        tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def iquestcoder(folder: Path, model: Any, **changes: Any) -> Path:
    """A folder with the model as IQuest-Coder."""
    own = {"model_type": "iquestcoder", "architectures": ["IQuestCoderForCausalLM"]}
    save_file(renamed(model, {}), folder / "model.safetensors")
    config = {**model.config.to_dict(), **own, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SETTINGS: dict[Any, dict[str, Any]] = {
    iquestcoder: {"head_dim": 16},
    exaone: {"rms_norm_eps": 1e-5},
    internlm2: {"attention_bias": True},
}


def original(write: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return hf_model("Llama", rope_parameters=rope, **SETTINGS[write])


@pytest.mark.parametrize("write", SETTINGS)
def test_logits_and_greedy_tokens_match_llama(write: Any, tmp_path: Path) -> None:
    theirs = original(write)
    ours = built(load_checkpoint(write(tmp_path, theirs)), "float32")
    tokens = greedy(ours, PROMPT, 64)
    assert len(set(tokens)) > 2
    whole = PROMPT + tokens
    expected = hf_logits(theirs, whole)
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(ours, chain(whole)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("write", "change"),
    [(exaone, {"layer_norm_epsilon": 1.0}), (exaone, {"rope_theta": 1e4})]
    + [(internlm2, {"rms_norm_eps": 1.0}), (internlm2, {"rope_theta": 1e4})],
)
def test_a_wrong_key_changes_the_logits(write: Any, change: dict[str, Any], tmp_path: Path) -> None:
    theirs = original(write)
    wrong = built(load_checkpoint(write(tmp_path, theirs, **change)), "float32")
    assert np.abs(logits(wrong, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() > 1e-2


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (exaone, {"num_layers": None}, "lacks 'num_hidden_layers'"),
        (exaone, {"activation_function": "mish"}, "activation 'mish'"),
        (internlm2, {"num_key_value_heads": 3}, "num_attention_heads is 4; allowed is a multiple"),
        (internlm2, {"num_attention_heads": 6, "num_key_value_heads": 6}, "has shape"),
    ],
)
def test_bad_configs_end_in_one_line(
    write: Any, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(load_checkpoint(write(tmp_path, original(write), **change)))
    assert "\n" not in str(caught.value)
