"""The configs of dense transformers from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.families.values import rotary_share
from anydecode.models.limits import MAX_EXPERTS, MAX_LAYERS, refusal
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_rope import longrope, partial_rotary, windows


def llama(keys: Keys, config: dict[str, Any]) -> None:
    """Llama, and Mixtral, which has experts."""
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    if keys.get("expert_count", 0):
        config["model_type"], config["architectures"] = "mixtral", ["MixtralForCausalLM"]
        config["num_local_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
        config["num_experts_per_tok"] = keys.count("expert_used_count")


def nanbeige(keys: Keys, config: dict[str, Any]) -> None:
    """Nanbeige: how often the layers run, and whether their output is normed in between."""
    config["num_loops"] = keys.count("num_loops", 1, high=MAX_LAYERS)
    config["skip_loop_final_norm"] = keys.get("skip_loop_final_norm", False)


def smollm3(keys: Keys, config: dict[str, Any]) -> None:
    """SmolLM3."""
    # Every fourth layer has no position embedding; the file does not store this.
    config["no_rope_layer_interval"] = 4
    config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    config["use_sliding_window"] = False


def qwen(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen: the file has the size of both halves of a gated MLP together."""
    config["intermediate_size"] = keys.count("feed_forward_length", low=2) // 2


def baichuan(keys: Keys, config: dict[str, Any]) -> None:
    """Baichuan: files do not store that the models of 40 layers have linear biases. Their heads
    are read as stored: whoever converts Baichuan 2 norms the rows before."""
    config["alibi"] = config["num_hidden_layers"] == 40


def qwen2(keys: Keys, config: dict[str, Any]) -> None:
    """Qwen2: no windows."""
    config["use_sliding_window"] = False


def phi3(keys: Keys, config: dict[str, Any]) -> None:
    """Phi-3 and Phi-4."""
    has_window = keys.get("attention.sliding_window", 0) != 0
    config["sliding_window"] = keys.count("attention.sliding_window") if has_window else None
    partial_rotary(keys, config)
    longrope(keys, config)


def plamo3(keys: Keys, config: dict[str, Any]) -> None:
    """PLaMo 3: windows in all but every n-th layer, with a rotary base of their own."""
    config["tie_word_embeddings"] = "output.weight" not in keys.file.tensors
    if keys.get("attention.sliding_window", 0):
        windows(keys, config)
        theta = keys.number("rope.freq_base_swa", config["rope_theta"])
        config["rope_local_base_freq"] = theta


def olmo2(keys: Keys, config: dict[str, Any]) -> None:
    """OLMo 3 has the same architecture name, and windows."""
    if keys.get("attention.sliding_window", None) is None:
        return
    config["model_type"], config["architectures"] = "olmo3", ["Olmo3ForCausalLM"]
    windows(keys, config)
    if config["rope_scaling"] and keys.get("rope.scaling.attn_factor", None) is not None:
        config["rope_scaling"]["attention_factor"] = keys.number("rope.scaling.attn_factor")


def hybrid(keys: Keys, config: dict[str, Any]) -> None:
    """EXAONE 4: windows, if there are some."""
    config["sliding_window"] = None
    if keys.get("attention.sliding_window", None) is not None:
        windows(keys, config)


def hunyuan_vl(keys: Keys, config: dict[str, Any]) -> None:
    """HunYuan-VL: the growth of the base of rotary frequencies."""
    alpha = keys.number("rope.scaling.alpha", 0.0)
    if alpha > 0:
        config["rope_scaling"] = {"rope_type": "dynamic", "alpha": alpha}


def granite(keys: Keys, config: dict[str, Any]) -> None:
    """The factors of Granite."""
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    # A factor of 0, or none, means the usual one.
    usual = config["head_dim"] ** -0.5
    for key, name, default in (
        ("attention.scale", "attention_multiplier", usual),
        ("embedding_scale", "embedding_multiplier", 1.0),
        ("residual_scale", "residual_multiplier", 1.0),
        ("logit_scale", "logits_scaling", 1.0),
    ):
        config[name] = keys.number(key, 0.0) or default


def minicpm(keys: Keys, config: dict[str, Any]) -> None:
    """The file stores the factors of Granite instead of MiniCPM's keys. Old files lack them; they
    are of the first models, which have these."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    config["scale_emb"] = keys.number("embedding_scale", 12.0)
    config["scale_depth"] = keys.number("residual_scale", 1.4 / layers**0.5) * layers**0.5
    logits = keys.number("logit_scale", hidden / 256)
    config["dim_model_base"] = round(hidden / logits) if logits > 0 else 0
    longrope(keys, config)


def mistral3(keys: Keys, config: dict[str, Any]) -> None:
    """Ministral 3: the growth of queries."""
    scaling = config["rope_scaling"]
    if scaling and keys.get("rope.scaling.yarn_log_multiplier", None) is not None:
        multiplier = keys.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if keys.get("attention.temperature_scale", None) is not None:
        scaling = config["rope_scaling"] = scaling or {"rope_type": "default"}
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")


def muse_glimmer(keys: Keys, config: dict[str, Any]) -> None:
    """Muse Glimmer: the file has the factor of queries as the weights of a norm."""
    windows(keys, config)
    theta = keys.number("rope.freq_base_swa", config["rope_theta"])
    config["layer_rope_theta"] = [
        theta if kind == "sliding_attention" else 0 for kind in config["layer_types"]
    ]
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None
    config["output_multiplier"] = keys.number("logit_scale")
    layers = range(config["num_hidden_layers"])
    config["qk_scale_factor"] = _constant(keys, [f"blk.{i}.attn_q_norm.weight" for i in layers])
    name = "blk.0.attn_k_norm.weight"
    factor = _constant(keys, [f"blk.{i}.attn_k_norm.weight" for i in layers])
    if factor != 1.0:
        raise refusal(f"{keys.file.path}: {name}", factor, "1")


def hrm_text(keys: Keys, config: dict[str, Any]) -> None:
    """HRM-Text: the file counts the layers as often as they run."""
    size = keys.count("hrm.layers_per_stack", high=MAX_LAYERS)
    cycles = [keys.count(f"hrm.{kind}_cycles", high=MAX_LAYERS) for kind in "hl"]
    count = size * cycles[0] * (cycles[1] + 1)
    if config["num_hidden_layers"] != count:
        raise refusal(keys.name("block_count"), config["num_hidden_layers"], f"{count}")
    config |= {
        "num_hidden_layers": 2 * size,  # those that are stored
        "num_layers_per_stack": size,
        "H_cycles": cycles[0],
        "L_cycles": cycles[1],
        "embedding_scale": keys.number("embedding_scale", 0.0) or 1.0,
        "has_numbered_layers": True,
    }


def jais(keys: Keys, config: dict[str, Any]) -> None:
    """Jais: the factors of embeddings and logits are in their matrices."""
    config["alibi_bias_max"] = keys.number("attention.max_alibi_bias", 8.0)
    config["attention_bias"] = config["mlp_bias"] = config["scale_qk_dot_by_d"] = True


def spark(keys: Keys, config: dict[str, Any]) -> None:
    """Spark 2.5: layers of both kinds have a rotary embedding of their own."""
    windows(keys, config)
    config["hidden_act"] = "gelu"
    dim, theta = config["head_dim"], config["rope_theta"]
    full = keys.count("rope.dimension_count", dim)
    parts = {"full_attention": (full, theta)}
    parts["sliding_attention"] = (
        keys.count("rope.dimension_count_swa", full),
        keys.number("rope.freq_base_swa", theta),
    )
    config["rope_parameters"] = {
        kind: {"rope_theta": base, "partial_rotary_factor": rotary_share(size, dim)}
        for kind, (size, base) in parts.items()
    }


def _constant(keys: Keys, names: list[str]) -> float:
    """The number of which these vectors consist."""
    found: set[float] = set()
    for name in names:
        if name not in keys.file.tensors:
            raise CheckpointError(f"{keys.file.path}: tensor {name!r} is missing")
        tensor = keys.file.read(name)
        found |= set(np.unique(tensor).tolist() if isinstance(tensor, np.ndarray) else ())
    if len(found) != 1:
        raise CheckpointError(f"{keys.file.path}: {names[0]!r} and its like are not constant")
    return found.pop()


def starcoder2(keys: Keys, config: dict[str, Any]) -> None:
    """StarCoder2."""
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["hidden_act"] = "gelu_pytorch_tanh"


def own_activation(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma and Apertus: the activation is that of the family."""
    del config["hidden_act"]


def phi2(keys: Keys, config: dict[str, Any]) -> None:
    """Phi-1 to Phi-2."""
    partial_rotary(keys, config)
    config["mlp_bias"] = True
    config["hidden_act"] = "gelu_new"


def stablelm(keys: Keys, config: dict[str, Any]) -> None:
    """StableLM. `use_parallel_residual` is wrong in files of models whose configs lack it."""
    partial_rotary(keys, config)
    config["use_qk_norm"] = _has_head_norms(keys)
    config["qkv_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in keys.file.tensors


def olmo(keys: Keys, config: dict[str, Any]) -> None:
    """OLMo: a limit of 0 is none."""
    config["clip_qkv"] = keys.number("attention.clamp_kqv", 0.0) or None


def nemotron(keys: Keys, config: dict[str, Any]) -> None:
    """Nemotron-4 and Minitron."""
    partial_rotary(keys, config)
    arcee(keys, config)


def arcee(keys: Keys, config: dict[str, Any]) -> None:
    """Arcee."""
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["hidden_act"] = "relu2"


def bitnet(keys: Keys, config: dict[str, Any]) -> None:
    """BitNet b1.58. Files of its own program have the activation of the published model; those of
    others name it, or have that of earlier models."""
    is_own = keys.architecture == "bitnet-b1.58"
    config["hidden_act"] = "relu2" if is_own else keys.get("hidden_activation", "silu")


def _has_head_norms(keys: Keys) -> bool:
    """Whether there are norms of queries and keys, which few models of the architecture have."""
    return "blk.0.attn_q_norm.weight" in keys.file.tensors


def cohere(keys: Keys, config: dict[str, Any]) -> None:
    """Command R and Command R7B."""
    config["logit_scale"] = keys.number("logit_scale")
    if config["model_type"] == "cohere2":
        windows(keys, config)
    else:
        config["use_qk_norm"] = _has_head_norms(keys)


def gpt2(keys: Keys, config: dict[str, Any]) -> None:
    """GPT-2, GPT-BigCode, CodeShell and BLOOM."""
    config["mlp_bias"] = True
    config["hidden_act"] = "gelu_new"


def gpt_neox(keys: Keys, config: dict[str, Any]) -> None:
    """GPT-NeoX."""
    partial_rotary(keys, config)
    config["mlp_bias"] = True
    config["hidden_act"] = "gelu"
    is_parallel = keys.get("use_parallel_residual", True)
    if not isinstance(is_parallel, bool):
        raise refusal("use_parallel_residual", is_parallel, "true or false")
    config["use_parallel_residual"] = is_parallel


def mpt(keys: Keys, config: dict[str, Any]) -> None:
    """MPT."""
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["hidden_act"] = "gelu"
    config["alibi_bias_max"] = keys.number("attention.max_alibi_bias")
    limit = keys.number("attention.clamp_kqv", 0.0)
    config["clip_qkv"] = limit or None  # 0 means no limit
    if any(name.endswith("norm.bias") for name in keys.file.tensors):
        raise CheckpointError(f"{keys.file.path}: norms with biases are not supported in mpt files")


def falcon(keys: Keys, config: dict[str, Any]) -> None:
    """Falcon."""
    config["hidden_act"] = "gelu"


def openelm(keys: Keys, config: dict[str, Any]) -> None:
    """OpenELM: layers differ in the heads and the size of the MLP."""
    config["use_qk_norm"] = _has_head_norms(keys)
    sizes = {
        "num_attention_heads": keys.counts("attention.head_count"),
        "num_key_value_heads": keys.counts("attention.head_count_kv"),
        "intermediate_size": keys.counts("feed_forward_length"),
    }
    config["per_layer_config"] = {
        str(layer): {name: sizes[name][layer] for name in sizes}
        for layer in range(config["num_hidden_layers"])
    }


def deci(keys: Keys, config: dict[str, Any]) -> None:
    """Llama-Nemotron: layers differ in the heads of keys and the size of the MLP; where there are
    none, the layer has no attention or no MLP."""
    heads, kv_heads, inner = (
        keys.counts(key, low=0)
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    if any(own and not kv for own, kv in zip(heads, kv_heads, strict=True)):
        allowed = "more than 0 where there is attention: linear layers in its place are unsupported"
        raise refusal(keys.name("attention.head_count_kv"), kv_heads, allowed)
    config["layer_types"] = ["full_attention" if count else "mlp" for count in heads]
    config["per_layer_config"] = {
        str(layer): {
            "num_key_value_heads": kv_heads[layer] or config["num_key_value_heads"],
            "intermediate_size": inner[layer] or config["intermediate_size"],
            "has_mlp": inner[layer] > 0,
        }
        for layer in range(len(heads))
    }
