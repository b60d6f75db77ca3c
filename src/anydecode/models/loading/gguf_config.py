"""Converts a GGUF file's metadata to the Hugging Face `config.json` of the same model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.families.table import FAMILIES
from anydecode.models.limits import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_STREAMS,
    integer,
    number,
    refusal,
)
from anydecode.models.loading.gguf_file import GGUFFile

#: GGUF architecture -> (model_type, architecture) of Hugging Face.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "minicpm": ("minicpm", "MiniCPMForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "mistral3": ("ministral3", "Ministral3ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "bloom": ("bloom", "BloomForCausalLM"),
    "mpt": ("mpt", "MptForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "llada": ("llada", "LLaDAModelLM"),
    "llada-moe": ("llada_moe", "LLaDAMoEModelLM"),
    "dream": ("dream", "DreamModel"),
    "rnd1": ("rnd1", "RND1LM"),
    "rwkv7": ("rwkv7", "RWKV7ForCausalLM"),
}

#: Architectures whose layers differ in the number of key heads and the size of the MLP.
_VARIED = ("gemma3n", "gemma4")
#: The values of `expert_gating_func`; 0 is none.
_SOFTMAX, _SIGMOID = 1, 2
#: DeepSeek: the number of experts and whether their scores are sigmoids -> the number of groups and
#: that of those chosen, which files of 2024 and early 2025 do not store. V2 has 160, V3 256.
_DEEPSEEK_GROUPS = {(160, False): (8, 3), (256, True): (8, 4)}
#: RWKV-7: the epsilon of the norms of heads, which files do not store.
_RWKV_NORM_EPS = 64e-5
_MISSING = object()


class Keys:
    """The metadata of a file's architecture. Errors name the file and the key.

    Raises:
        CheckpointError: The architecture is not supported.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} is not supported; "
                f"supported are {', '.join(sorted(ARCHITECTURES))}"
            )

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `<architecture>.<key>`. Raises CheckpointError if it is missing without a
        default."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise CheckpointError(f"{self._name(key)} is missing")
        return value

    def count(
        self,
        key: str,
        default: Any = _MISSING,
        high: int = MAX_SIZE,
        low: int = 1,
        skip_zeros: bool = False,
    ) -> int:
        """An integer from `low` to `high`; a list with the same value for every layer (or 0, if
        `skip_zeros`) counts as that value."""
        value = self.get(key, default)
        if isinstance(value, list) and skip_zeros:
            value = [entry for entry in value if entry != 0] or value
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        return integer(self._name(key), value, low, high)

    def counts(self, key: str, default: Any = _MISSING) -> list[int]:
        """The integer of each layer, from a list or one integer for all."""
        value, count = self.get(key, default), self.count("block_count", high=MAX_LAYERS)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise refusal(self._name(key), value, f"a list of {count} integers")
        return [integer(self._name(key), entry) for entry in values[:count]]

    def number(self, key: str, default: Any = _MISSING) -> float:
        return number(self._name(key), self.get(key, default), -1e38, 1e38)

    def _name(self, key: str) -> str:
        """The name of a key in errors."""
        return f"{self.file.path}: metadata {self.architecture}.{key}"


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config of `file`.

    Raises:
        CheckpointError: A key is missing, invalid or unsupported.
    """
    keys = Keys(file)
    config = _common(keys)
    extend = {
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma3n": _gemma3n,
        "gemma4": _gemma4,
        "phi3": _phi3,
        "qwen3moe": _qwen3_moe,
        "smollm3": _smollm3,
        "llama4": _llama4,
        "qwen2": _qwen2,
        "llama": _llama,
        "olmo2": _olmo2,
        "granite": _granite,
        "minicpm": _minicpm,
        "glm4": _partial_rotary,
        "mistral3": _mistral3,
        "exaone4": _hybrid,
        "starcoder2": _starcoder2,
        "command-r": _cohere,
        "cohere2": _cohere,
        "gpt2": _gpt2,
        "gptneox": _gpt_neox,
        "falcon": _falcon,
        "bloom": _gpt2,
        "mpt": _mpt,
        "gpt-oss": _gpt_oss,
        "qwen2moe": _qwen2_moe,
        "olmoe": _olmoe,
        "glm4moe": _glm4_moe,
        "lfm2": _lfm2,
        "deepseek2": _deepseek,
        "mamba": _mamba,
        "llada": _denoising,
        "llada-moe": _llada_moe,
        "dream": _dream,
        "rnd1": _rnd1,
        "rwkv7": _rwkv7,
    }.get(keys.architecture)
    if extend is not None:
        extend(keys, config)
    return config


def _common(keys: Keys) -> dict[str, Any]:
    file = keys.file
    model_type, architecture = ARCHITECTURES[keys.architecture]
    # Mamba has no attention and no MLP, RWKV no attention.
    low = 0 if keys.architecture in ("mamba", "rwkv7") else 1
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count", low=low)
    heads = max(1, heads)
    head_dim = keys.count("attention.key_length", max(1, hidden // heads))
    is_latent = FAMILIES[model_type].has_latent_attention
    if not is_latent and keys.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different sizes are unsupported")
    is_varied = keys.architecture in _VARIED
    size = keys.counts("feed_forward_length")[0] if is_varied else None
    kv_heads = keys.counts("attention.head_count_kv", heads)[0] if is_varied else None
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": size or keys.count("feed_forward_length", 1, low=low),
        "num_hidden_layers": keys.count("block_count", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads
        or keys.count("attention.head_count_kv", heads, skip_zeros=True),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    if FAMILIES[model_type].norm == "layer":
        config["layer_norm_eps"] = keys.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    if not FAMILIES[model_type].output_bias:
        config["attention_out_bias"] = config["attention_bias"]
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if "blk.0.attn_q.bias" in file.tensors and FAMILIES[model_type].output_bias:
        if not config["attention_bias"] and not FAMILIES[model_type].qkv_bias:
            raise CheckpointError(f"{file.path}: biases on queries alone are not supported")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int):
            config[f"{key}_token_id"] = token
    return config


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    factors = _factors(keys, "rope_freqs.weight")
    if factors is not None:
        # Llama 3 files store a divisor per frequency instead of the scaling parameters. LongRoPE is
        # the Hugging Face scaling that takes divisors.
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": keys.count("context_length"),
        }
    kind = keys.get("rope.scaling.type", None)
    if kind in (None, "none", "longrope"):
        return None
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise CheckpointError(f"{keys.file.path}: rope scaling {kind!r} is not supported")
    scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.get(f"rope.scaling.{key}", None) is not None:
            scaling[name] = keys.number(f"rope.scaling.{key}")
    return scaling


def _factors(keys: Keys, name: str) -> list[float] | None:
    if name not in keys.file.tensors:
        return None
    tensor = keys.file.read(name)
    assert isinstance(tensor, np.ndarray), "one-dimensional factors are stored unpacked"
    return [float(value) for value in tensor.astype(np.float32).ravel().tolist()]


def _llama(keys: Keys, config: dict[str, Any]) -> None:
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    if keys.get("expert_count", 0):
        config["model_type"], config["architectures"] = "mixtral", ["MixtralForCausalLM"]
        config["num_local_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
        config["num_experts_per_tok"] = keys.count("expert_used_count")


def _llama4(keys: Keys, config: dict[str, Any]) -> None:
    if keys.get("attention.sliding_window", 1) == 0:
        raise CheckpointError(f"{keys.file.path}: llama4 without chunked attention is unsupported")
    count = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_local_experts"] = count
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["decoder_sparse_step"] = keys.count("interleave_moe_layer_step")
    # The file does not store these: every fourth layer has no position embedding and full
    # attention, and Maverick, the model with 128 experts, has no norms of queries and keys.
    config["no_rope_layer_interval"] = 4
    config["attention_chunk_size"] = config["floor_scale"] = 8192
    config["attn_scale"] = 0.1
    config["use_qk_norm"] = count != 128


def _smollm3(keys: Keys, config: dict[str, Any]) -> None:
    # Every fourth layer has no position embedding; the file does not store this.
    config["no_rope_layer_interval"] = 4
    config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    config["use_sliding_window"] = False


def _qwen2(keys: Keys, config: dict[str, Any]) -> None:
    config["use_sliding_window"] = False


def _experts(keys: Keys, config: dict[str, Any]) -> None:
    config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")


def _olmoe(keys: Keys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    config["norm_topk_prob"] = False


def _qwen2_moe(keys: Keys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = keys.count("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = False
    config["use_sliding_window"] = False
    config["qkv_bias"] = "blk.0.attn_q.bias" in keys.file.tensors


def _glm4_moe(keys: Keys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    if keys.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise CheckpointError(f"{keys.file.path}: experts of glm4moe without sigmoid scores")
    # The count of blocks includes those that predict further tokens.
    num_unused = keys.count("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, low=0)
    config["num_hidden_layers"] -= num_unused
    config["num_nextn_predict_layers"] = num_unused
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", high=MAX_EXPERTS, low=0)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.get("expert_weights_norm", True)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in keys.file.tensors
    _partial_rotary(keys, config)


def _deepseek(keys: Keys, config: dict[str, Any]) -> None:
    """DeepSeek-V2, and V3 if the scores of experts are sigmoids. Newer files describe the attention
    in its compressed form, and have the sizes of a head under keys of their own."""
    file = keys.file
    rotary, rank = keys.count("rope.dimension_count"), keys.count("attention.kv_lora_rank")
    suffix = "_mla" if keys.get("attention.key_length_mla", None) is not None else ""
    length = keys.count(f"attention.key_length{suffix}")
    if length <= rotary:
        raise CheckpointError(
            f"{file.path}: keys of {length} numbers, of which {rotary} are rotary; allowed is more"
        )
    config |= {
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": length - rotary,
        "v_head_dim": keys.count(f"attention.value_length{suffix}"),
        "num_key_value_heads": config["num_attention_heads"],
        "has_stacked_heads": "blk.0.attn_kv_b.weight" not in file.tensors,
    }
    if "blk.0.attn_q_a.weight" in file.tensors:
        config["q_lora_rank"] = keys.count("attention.q_lora_rank")
    scaling = config["rope_scaling"]
    if scaling and keys.get("rope.scaling.yarn_log_multiplier", None) is not None:
        # The file has 0.1 times `mscale_all_dim`, and the two factors are equal in every model.
        scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    gating = keys.get("expert_gating_func", 0)
    if gating not in (0, _SOFTMAX, _SIGMOID):
        raise refusal(f"{file.path}: metadata deepseek2.expert_gating_func", gating, "1 or 2")
    # Only V3 has selection biases; its first files lack the key.
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    _deepseek_experts(keys, config, gating == _SIGMOID or (not gating and has_bias))


def _deepseek_experts(keys: Keys, config: dict[str, Any], is_sigmoid: bool) -> None:
    num_unused = keys.count("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, low=0)
    config["num_hidden_layers"] -= num_unused
    config["num_nextn_predict_layers"] = num_unused
    count = keys.count("expert_count", 0, high=MAX_EXPERTS, low=0)
    config["n_routed_experts"] = config["num_experts"] = count
    if is_sigmoid:
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if not count:
        return
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["n_shared_experts"] = keys.count("expert_shared_count", high=MAX_EXPERTS, low=0)
    config["first_k_dense_replace"] = keys.count("leading_dense_block_count", 0, low=0)
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.get("expert_weights_norm", False)
    groups, kept = _DEEPSEEK_GROUPS.get((count, is_sigmoid), (1, 1))
    config["n_group"] = keys.count("expert_group_count", groups)
    config["topk_group"] = keys.count("expert_group_used_count", kept)
    if not is_sigmoid:
        is_limited = config["n_group"] > 1
        config["topk_method"] = "group_limited_greedy" if is_limited else "greedy"


def _qwen3_moe(keys: Keys, config: dict[str, Any]) -> None:
    _experts(keys, config)
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["norm_topk_prob"] = True
    config["decoder_sparse_step"] = 1
    config["mlp_only_layers"] = []


def _gpt_oss(keys: Keys, config: dict[str, Any]) -> None:
    config["num_local_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["intermediate_size"] = keys.count("expert_feed_forward_length")
    # Every second layer has full attention; the file does not store this.
    config["sliding_window"] = keys.count("attention.sliding_window")
    config["sliding_window_pattern"] = 2
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False  # as published; the file does not store it


def _gemma(keys: Keys, config: dict[str, Any], period: int, largest_num_layers: int) -> None:
    """The keys that Gemma 2 and 3 share. One layer in `period` has full attention. The largest
    model, identified by its number of layers, scales its queries by hidden_size / heads instead of
    the head's size."""
    layers = config["num_hidden_layers"]
    is_largest = layers == largest_num_layers
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if is_largest else config["head_dim"]
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = keys.count("attention.sliding_window", 4096)
    config["layer_types"] = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
    ]


def _gemma2(keys: Keys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=2, largest_num_layers=46)
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)


def _gemma3(keys: Keys, config: dict[str, Any]) -> None:
    # Some files list the attention type of each layer instead of the period, which is always 6.
    key = "attention.sliding_window_pattern"
    period = 6 if isinstance(keys.get(key, 6), list) else keys.count(key, 6)
    _gemma(keys, config, period=period, largest_num_layers=62)
    config["sliding_window_pattern"] = 6
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    config["attn_logit_softcapping"] = None
    # 0 means no softcap.
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None


def _gemma4(keys: Keys, config: dict[str, Any]) -> None:
    _windows(keys, config)
    _shared_layers(keys, config)
    types, theta = config["layer_types"], config.pop("rope_theta")
    scaling, full_dim = config.pop("rope_scaling") or {}, config["head_dim"]
    dim = config["head_dim"] = keys.count("attention.key_length_swa", full_dim)
    if keys.count("rope.dimension_count_swa", dim) != dim:
        raise CheckpointError(f"{keys.file.path}: heads that rotate in part are not supported")
    kv_heads = keys.counts("attention.head_count_kv", config["num_attention_heads"])
    inner = keys.counts("feed_forward_length")
    first_shared = len(types) - config["num_kv_shared_layers"]
    config |= {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", theta)},
            "full_attention": {**scaling, "rope_theta": theta},
        },
        "per_layer_config": {
            str(layer): {
                "head_dim": dim if kind == "sliding_attention" else full_dim,
                "num_key_value_heads": kv_heads[layer],
                "intermediate_size": inner[layer],
            }
            for layer, kind in enumerate(types)
        },
        "attention_k_eq_v": any(
            kind == "full_attention" and f"blk.{layer}.attn_v.weight" not in keys.file.tensors
            for layer, kind in enumerate(types[:first_shared])
        ),
        "enable_moe_block": bool(keys.get("expert_count", 0)),
    }
    config["num_experts"] = 0
    if config["enable_moe_block"]:
        config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
        config["top_k_experts"] = keys.count("expert_used_count")
        config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")


def _gemma3n(keys: Keys, config: dict[str, Any]) -> None:
    _windows(keys, config)
    _shared_layers(keys, config)
    file, layers = keys.file, config["num_hidden_layers"]
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0) or None
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    config["intermediate_size"] = keys.counts("feed_forward_length")
    config["per_layer_config"] = {
        str(layer): {"intermediate_size": size}
        for layer, size in enumerate(config["intermediate_size"])
    }
    config["intermediate_size"] = config["intermediate_size"][0]
    config["altup_num_inputs"] = keys.count("altup.num_inputs", 4, MAX_STREAMS, low=2)
    config["altup_active_idx"] = keys.count("altup.active_idx", 0, MAX_STREAMS, low=0)
    down = file.tensors.get("blk.0.laurel_l.weight")
    if down is None:
        raise CheckpointError(f"{file.path}: tensor 'blk.0.laurel_l.weight' is missing")
    config["laurel_rank"] = down.shape[0]
    scales = keys.get("activation_sparsity_scale")
    if not isinstance(scales, list) or len(scales) < layers:
        name = f"{file.path}: metadata gemma3n.activation_sparsity_scale"
        raise refusal(name, scales, f"a list of {layers} numbers")
    config["gate_cutoffs"] = [None if scale == -math.inf else scale for scale in scales[:layers]]


def _shared_layers(keys: Keys, config: dict[str, Any]) -> None:
    """Gemma 3n and 4: how many layers share keys and values, and the embeddings of each layer."""
    layers = config["num_hidden_layers"]
    config["num_kv_shared_layers"] = keys.count("attention.shared_kv_layers", 0, layers - 1, low=0)
    size = keys.count("embedding_length_per_layer_input", 0, low=0)
    config["hidden_size_per_layer_input"] = size
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    if size and table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    # 0 means no softcap.
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None


def _phi3(keys: Keys, config: dict[str, Any]) -> None:
    has_window = keys.get("attention.sliding_window", 0) != 0
    config["sliding_window"] = keys.count("attention.sliding_window") if has_window else None
    _partial_rotary(keys, config)
    _longrope(keys, config)


def _partial_rotary(keys: Keys, config: dict[str, Any]) -> None:
    rotary = keys.count("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotary / config["head_dim"]


def _longrope(keys: Keys, config: dict[str, Any]) -> None:
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    long = _factors(keys, "rope_factors_long.weight")
    short = _factors(keys, "rope_factors_short.weight")
    if long is not None and short is not None:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        if keys.get("rope.scaling.attn_factor", None) is not None:
            config["rope_scaling"]["attention_factor"] = keys.number("rope.scaling.attn_factor")


def _windows(keys: Keys, config: dict[str, Any]) -> None:
    """The window, and which layers have it: a list of flags, or the period of full attention."""
    config["sliding_window"] = keys.count("attention.sliding_window")
    pattern, count = keys.get("attention.sliding_window_pattern", 4), config["num_hidden_layers"]
    if not isinstance(pattern, list):
        period = keys.count("attention.sliding_window_pattern", 4)
        pattern = [(layer + 1) % period != 0 for layer in range(count)]
    if len(pattern) < count:
        raise CheckpointError(
            f"{keys.file.path}: attention.sliding_window_pattern has {len(pattern)} entries for"
            f" {count} layers"
        )
    config["layer_types"] = [
        "sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern[:count]
    ]


def _olmo2(keys: Keys, config: dict[str, Any]) -> None:
    """OLMo 3 has the same architecture name, and windows."""
    if keys.get("attention.sliding_window", None) is None:
        return
    config["model_type"], config["architectures"] = "olmo3", ["Olmo3ForCausalLM"]
    _windows(keys, config)
    if config["rope_scaling"] and keys.get("rope.scaling.attn_factor", None) is not None:
        config["rope_scaling"]["attention_factor"] = keys.number("rope.scaling.attn_factor")


def _hybrid(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = None
    if keys.get("attention.sliding_window", None) is not None:
        _windows(keys, config)


def _lfm2(keys: Keys, config: dict[str, Any]) -> None:
    """Layers without key heads are convolutions."""
    heads, count = keys.get("attention.head_count_kv"), config["num_hidden_layers"]
    if not isinstance(heads, list) or len(heads) < count:
        raise refusal(
            f"{keys.file.path}: metadata lfm2.attention.head_count_kv",
            heads,
            f"a list of {count} numbers",
        )
    config["layer_types"] = ["full_attention" if entry else "conv" for entry in heads[:count]]
    config["conv_L_cache"] = keys.count("shortconv.l_cache")
    config["block_auto_adjust_ff_dim"] = False


def _mamba(keys: Keys, config: dict[str, Any]) -> None:
    has_norms = keys.get("ssm.dt_b_c_rms", False)
    if not isinstance(has_norms, bool):
        name = f"{keys.file.path}: metadata mamba.ssm.dt_b_c_rms"
        raise refusal(name, has_norms, "true or false")
    if has_norms:
        config["model_type"], config["architectures"] = "falcon_mamba", ["FalconMambaForCausalLM"]
    config["intermediate_size"] = keys.count("ssm.inner_size")
    for key, name in (
        ("ssm.state_size", "state_size"),
        ("ssm.conv_kernel", "conv_kernel"),
        ("ssm.time_step_rank", "time_step_rank"),
    ):
        config[name] = keys.count(key)
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in keys.file.tensors
    config["use_bias"] = "blk.0.ssm_in.bias" in keys.file.tensors


def _denoising(keys: Keys, config: dict[str, Any]) -> None:
    """Diffusion models: which position a row predicts, and the mask token."""
    metadata, path = keys.file.metadata, keys.file.path
    if keys.get("attention.causal", False) is not False:
        raise CheckpointError(f"{path}: {keys.architecture} with causal attention is unsupported")
    shift = metadata.get("diffusion.shift_logits")
    if shift is not None:
        if not isinstance(shift, bool):
            raise refusal(f"{path}: metadata diffusion.shift_logits", shift, "true or false")
        config["right_shift_logits"] = shift
    mask = metadata.get("tokenizer.ggml.mask_token_id")
    if isinstance(mask, int):
        config["mask_token_id"] = mask


def _dream(keys: Keys, config: dict[str, Any]) -> None:
    _denoising(keys, config)
    config["use_sliding_window"] = False


def _llada_moe(keys: Keys, config: dict[str, Any]) -> None:
    _denoising(keys, config)
    _experts(keys, config)
    config["expert_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["dense_intermediate_size"] = config["intermediate_size"]
    config["qk_layernorm"] = True


def _rnd1(keys: Keys, config: dict[str, Any]) -> None:
    _denoising(keys, config)
    _qwen3_moe(keys, config)


def _rwkv7(keys: Keys, config: dict[str, Any]) -> None:
    if keys.count("token_shift_count", 2) != 2:
        raise CheckpointError(f"{keys.file.path}: RWKV-7 without channel mixing is not supported")
    config["head_dim"] = keys.count("wkv.head_size")
    config["intermediate_size"] = keys.count("feed_forward_length")
    config["hidden_act"] = "sqrelu"
    config["group_norm_eps"] = _RWKV_NORM_EPS
    for key, name in (
        ("decay_lora_rank", "decay_low_rank_dim"),
        ("iclr_lora_rank", "a_low_rank_dim"),
        ("value_residual_mix_lora_rank", "v_low_rank_dim"),
        ("gate_lora_rank", "gate_low_rank_dim"),
    ):
        config[name] = keys.count(f"attention.{key}")


def _granite(keys: Keys, config: dict[str, Any]) -> None:
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


def _minicpm(keys: Keys, config: dict[str, Any]) -> None:
    """The file stores the factors of Granite instead of MiniCPM's keys. Old files lack them; they
    are of the first models, which have these."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    config["scale_emb"] = keys.number("embedding_scale", 12.0)
    config["scale_depth"] = keys.number("residual_scale", 1.4 / layers**0.5) * layers**0.5
    logits = keys.number("logit_scale", hidden / 256)
    config["dim_model_base"] = round(hidden / logits) if logits > 0 else 0
    _longrope(keys, config)


def _mistral3(keys: Keys, config: dict[str, Any]) -> None:
    scaling = config["rope_scaling"]
    if scaling and keys.get("rope.scaling.yarn_log_multiplier", None) is not None:
        multiplier = keys.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if keys.get("attention.temperature_scale", None) is not None:
        scaling = config["rope_scaling"] = scaling or {"rope_type": "default"}
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")


def _starcoder2(keys: Keys, config: dict[str, Any]) -> None:
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["hidden_act"] = "gelu_pytorch_tanh"


def _cohere(keys: Keys, config: dict[str, Any]) -> None:
    if "blk.0.attn_q_norm.weight" in keys.file.tensors:
        raise CheckpointError(f"{keys.file.path}: norms of queries and keys are not supported here")
    config["logit_scale"] = keys.number("logit_scale")
    if config["model_type"] == "cohere2":
        _windows(keys, config)


def _gpt2(keys: Keys, config: dict[str, Any]) -> None:
    config["mlp_bias"] = True
    config["hidden_act"] = "gelu_new"


def _gpt_neox(keys: Keys, config: dict[str, Any]) -> None:
    _partial_rotary(keys, config)
    config["mlp_bias"] = True
    config["hidden_act"] = "gelu"
    is_parallel = keys.get("use_parallel_residual", True)
    if not isinstance(is_parallel, bool):
        raise refusal("use_parallel_residual", is_parallel, "true or false")
    config["use_parallel_residual"] = is_parallel


def _mpt(keys: Keys, config: dict[str, Any]) -> None:
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["hidden_act"] = "gelu"
    config["alibi_bias_max"] = keys.number("attention.max_alibi_bias")
    limit = keys.number("attention.clamp_kqv", 0.0)
    config["clip_qkv"] = limit or None  # 0 means no limit
    if any(name.endswith("norm.bias") for name in keys.file.tensors):
        raise CheckpointError(f"{keys.file.path}: norms with biases are not supported in mpt files")


def _falcon(keys: Keys, config: dict[str, Any]) -> None:
    config["hidden_act"] = "gelu"
