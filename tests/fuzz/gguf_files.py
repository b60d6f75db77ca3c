"""GGUF files of recurrent and diffusion models, with all tokenizers, and in 1.61 bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ml_dtypes import bfloat16

from anydecode.kernels import ptq161
from anydecode.kernels.interface import Weight
from anydecode.quantization.gguf import quantize_file
from gguf_models import finish, make_tensors, usual_metadata, write_gguf

Shape = tuple[int, ...]
HIDDEN, INNER, KV, VOCAB = 64, 96, 32, 40
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
_OUTER: dict[str, Shape] = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "output.weight": (VOCAB, HIDDEN),
}
_ATTENTION: dict[str, Shape] = {
    "attn_q.weight": (HIDDEN, HIDDEN),
    "attn_k.weight": (KV, HIDDEN),
    "attn_v.weight": (KV, HIDDEN),
    "attn_output.weight": (HIDDEN, HIDDEN),
}
_BIASES = {f"attn_{part}.bias": (HIDDEN if part == "q" else KV,) for part in "qkv"}
_NORM: dict[str, Shape] = {"attn_norm.weight": (HIDDEN,)}
_NORMS: dict[str, Shape] = {**_NORM, "ffn_norm.weight": (HIDDEN,)}
_QK: dict[str, Shape] = {f"attn_{part}_norm.weight": (16,) for part in "qk"}
_MLP: dict[str, Shape] = {
    "ffn_gate.weight": (INNER, HIDDEN),
    "ffn_up.weight": (INNER, HIDDEN),
    "ffn_down.weight": (HIDDEN, INNER),
}
_EXPERTS: dict[str, Shape] = {
    "ffn_gate_inp.weight": (4, HIDDEN),
    "ffn_gate_exps.weight": (4, 32, HIDDEN),
    "ffn_up_exps.weight": (4, 32, HIDDEN),
    "ffn_down_exps.weight": (4, HIDDEN, 32),
}
_SHARED: dict[str, Shape] = {
    "ffn_gate_inp_shexp.weight": (HIDDEN,),
    "ffn_gate_shexp.weight": (32, HIDDEN),
    "ffn_up_shexp.weight": (32, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, 32),
}
#: Mamba-2: an inner size of 64 in four heads, two groups and states of 16.
_MAMBA_2: dict[str, Shape] = {
    "ssm_in.weight": (64 + 128 + 4, HIDDEN),
    "ssm_conv1d.weight": (128, 4),
    "ssm_conv1d.bias": (128,),
    "ssm_a": (4, 1),
    "ssm_d": (4, 1),
    "ssm_dt.bias": (4,),
    "ssm_norm.weight": (2, 32),
    "ssm_out.weight": (HIDDEN, 64),
}
_MAMBA: dict[str, Shape] = {
    "ssm_in.weight": (2 * INNER, HIDDEN),
    "ssm_conv1d.weight": (INNER, 4),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x.weight": (5 + 2 * 12, INNER),
    "ssm_dt.weight": (INNER, 5),
    "ssm_dt.bias": (INNER,),
    "ssm_a": (INNER, 12),
    "ssm_d": (INNER,),
    "ssm_out.weight": (HIDDEN, INNER),
}
_DELTA: dict[str, Shape] = {
    "attn_qkv.weight": (128, HIDDEN),
    "attn_gate.weight": (64, HIDDEN),
    "ssm_ba.weight": (8, HIDDEN),
    "ssm_conv1d.weight": (128, 4),
    "ssm_a": (4,),
    "ssm_dt.bias": (4,),
    "ssm_norm.weight": (16,),
    "ssm_out.weight": (HIDDEN, 64),
}
_SHORT_CONV: dict[str, Shape] = {
    "shortconv.conv.weight": (HIDDEN, 3),
    "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN),
    "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
}
_LEAVES = ("weight", "bias")
_TIME_MIX: dict[str, Shape] = {
    **{
        f"{name}.{leaf}": (HIDDEN,)
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln")
        for leaf in _LEAVES
    },
    **{
        f"time_mix_{part}.weight": (HIDDEN, HIDDEN)
        for part in ("receptance", "key", "value", "output")
    },
    **{f"time_mix_{part}0.weight": (HIDDEN,) for part in "wav"},
    **{f"time_mix_{part}1.weight": (6, HIDDEN) for part in "wavg"},
    **{f"time_mix_{part}2.weight": (HIDDEN, 6) for part in "wavg"},
    "time_mix_lerp_fused.weight": (6, HIDDEN),
    **{f"time_mix_{part}.weight": (HIDDEN,) for part in ("k_k", "k_a", "r_k")},
    "channel_mix_lerp_k.weight": (HIDDEN,),
    "channel_mix_key.weight": (INNER, HIDDEN),
    "channel_mix_value.weight": (HIDDEN, INNER),
}
_TIME_MIX_OUTER: dict[str, Shape] = {
    **_OUTER,
    "output_norm.bias": (HIDDEN,),
    "token_embd_norm.weight": (HIDDEN,),
    "token_embd_norm.bias": (HIDDEN,),
}
_SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_EXPERT_KEYS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
_NO_ATTENTION: dict[str, Any] = {
    "attention.head_count": 0,
    **dict.fromkeys(
        (
            "attention.head_count_kv", "attention.key_length", "attention.value_length",
            "rope.freq_base",
        )
    ),
    "feed_forward_length": 0,
}  # fmt: skip
#: Keys of diffusion models that are not those of their architecture.
_MASK: dict[str, Any] = {
    "attention.causal": False,
    "tokenizer.ggml.mask_token_id": VOCAB - 1,
    "diffusion.shift_logits": False,
}
Layers = tuple[dict[str, Shape], ...]
#: By architecture: the metadata beside the usual, the tensors of the layers, and the tokenizer.
_FILES: dict[str, tuple[dict[str, Any], Layers, str]] = {
    "mamba": (
        {
            **_NO_ATTENTION, "ssm.conv_kernel": 4, "ssm.inner_size": INNER, "ssm.state_size": 12,
            "ssm.time_step_rank": 5, "ssm.dt_b_c_rms": True,
        },
        ({**_NORM, **_MAMBA},) * 2,
        "gpt2",
    ),
    "mamba2": ({**_NO_ATTENTION, **_SSM}, ({**_NORM, **_MAMBA_2},) * 2, "gpt2"),
    "granitehybrid": (
        {
            **_SSM, "attention.head_count_kv": [0, 2], "attention.scale": 0.25,
            "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0,
            "rope.scaling.finetuned": False,
        },
        ({**_NORMS, **_MAMBA_2, **_MLP}, {**_NORMS, **_ATTENTION, **_MLP}),
        "llama",
    ),
    "falcon-h1": (
        _SSM,
        ({**_NORMS, **_MAMBA_2, **_ATTENTION, **_MLP},) * 2,
        "llama",
    ),
    "nemotron_h": (
        {
            **_SSM, "feed_forward_length": [0, INNER, 0], "attention.head_count_kv": [0, 0, 2],
            "rope.freq_base": None, "attention.layer_norm_epsilon": 1e-5,
        },
        (
            {**_NORM, **_MAMBA_2},
            {**_NORM, "ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)},
            {**_NORM, **_ATTENTION},
        ),
        "llama",
    ),
    "qwen3next": (
        {
            **_SSM, **_EXPERT_KEYS, "full_attention_interval": 2, "rope.dimension_count": 4,
            "expert_shared_feed_forward_length": 32,
        },
        tuple(
            {**_NORM, "post_attention_norm.weight": (HIDDEN,), **_EXPERTS, **_SHARED, **own}
            for own in (_DELTA, {**_ATTENTION, **_QK, "attn_q.weight": (2 * HIDDEN, HIDDEN)})
        ),
        "gpt2",
    ),
    "lfm2": (
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
        ({**_NORMS, **_SHORT_CONV, **_MLP}, {**_NORMS, **_ATTENTION, **_QK, **_MLP}),
        "gpt2",
    ),
    "rwkv7": (
        {
            **_NO_ATTENTION, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 16,
            **{
                f"attention.{name}_lora_rank": 6
                for name in ("decay", "iclr", "value_residual_mix", "gate")
            },
            "feed_forward_length": INNER,
        },
        (_TIME_MIX, _TIME_MIX),
        "rwkv",
    ),
    "dream": (_MASK, ({**_NORMS, **_ATTENTION, **_BIASES, **_MLP},) * 2, "gpt2"),
    "llada-moe": (
        {**_MASK, **_EXPERT_KEYS},
        ({**_NORMS, **_ATTENTION, **_QK, **_EXPERTS},) * 2,
        "gpt2",
    ),
    "llama": ({"rope.dimension_count": 16}, ({**_NORMS, **_ATTENTION, **_MLP},) * 2, "gemma4"),
}  # fmt: skip


def _add_tokenizer(writer: gguf.GGUFWriter, kind: str) -> None:
    letters = [chr(97 + index) for index in range(VOCAB - 4)]
    writer.add_tokenizer_model(kind)
    if kind == "rwkv":
        pieces = [*letters[:-1], "\\xff"]
    else:
        pieces = [*letters[:-1], "ab"]
    writer.add_token_list(["<unk>", "<s>", "</s>", *pieces, "<mask>"])
    writer.add_token_types([2, 3, 3] + [1] * (VOCAB - 4) + [3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if kind == "llama":
        writer.add_token_scores([0.0] * VOCAB)
    elif kind != "rwkv":
        writer.add_token_merges(["a b"])
    if kind == "gpt2":
        writer.add_tokenizer_pre("qwen2")
    writer.add_chat_template("rwkv-world" if kind == "rwkv" else "{{ messages[0].content }}")


def _write(path: Path, architecture: str) -> None:
    metadata, layers, tokenizer = _FILES[architecture]
    usual = {**usual_metadata(_SIZES, len(layers)), **metadata}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in usual.items():
        name = key if key.startswith(("tokenizer", "diffusion")) else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_float32(name, value)
    _add_tokenizer(writer, tokenizer)
    generator = np.random.default_rng(0)
    shapes = dict(_TIME_MIX_OUTER if architecture == "rwkv7" else _OUTER)
    for number, layer in enumerate(layers):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        tensor = 0.3 * generator.standard_normal(shape, np.float32)
        writer.add_tensor(name, -np.abs(tensor) if name.endswith("ssm_a") else tensor)
    finish(writer)


def _write_ptq161(path: Path) -> None:
    """A Llama whose queries are in 1.61 bits."""
    source = path.with_name("source.gguf")
    write_gguf(source, "llama", make_tensors("llama"), "F16")
    draw, salient = np.random.default_rng(0), ptq161.num_salient(HIDDEN)
    columns = draw.uniform(0.5, 2, HIDDEN).astype(bfloat16)
    columns[draw.permutation(HIDDEN)[:salient]] = 0
    weight: Weight = ptq161.pack(
        (0.1 * draw.normal(size=(HIDDEN, 4))).astype(np.float16),
        draw.random((HIDDEN, HIDDEN - salient)) < 0.5,
        draw.integers(0, 16, (HIDDEN, salient)).astype(np.uint8),
        columns,
    )
    given = {f"blk.{layer}.attn_q.weight": weight for layer in range(3)}
    quantize_file(source, path, "Q6_K", given=given)


def gguf_files() -> dict[str, bytes]:
    """The contents of a file of every kind, by a name."""
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for architecture in _FILES:
            _write(path, architecture)
            files[architecture] = path.read_bytes()
            path.unlink()
        _write_ptq161(path)
        files["ptq161"] = path.read_bytes()
    return files
