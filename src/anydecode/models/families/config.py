"""Converts a Hugging Face `config.json` to a `ModelSpec`, for every supported family."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import (
    Activation,
    Attention,
    CappedSwiglu,
    ClampedSwiglu,
    LimitedSwiglu,
    Rope,
    Routing,
    SituGlu,
)
from anydecode.models.families.advice import unsupported
from anydecode.models.families.alibi import alibi_slopes
from anydecode.models.families.dispatch import class_names, find_family
from anydecode.models.families.distance_biases import BIAS_REACH
from anydecode.models.families.family import Denoising, Family, MixtureOfExperts, Scales
from anydecode.models.families.nested import completed, with_text_config
from anydecode.models.families.ngrams import NGRAMS, ngram_layer
from anydecode.models.families.patterns import (
    CHUNKED,
    FULL,
    MEMORY_UNIT,
    MLP,
    MOE,
    SIDE,
    SLIDING,
    cache_layers,
)
from anydecode.models.families.recurrent import HYBRID, RECURRENT_TYPES
from anydecode.models.families.rope import make_rope, rope_type, yarn_scale
from anydecode.models.families.shared_key import shared_key_spec
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import (
    Config,
    bool_value,
    head_dim,
    int_value,
    layer_config,
    list_value,
    mapping_value,
    num_layers,
    optional_number,
    value_or,
)
from anydecode.models.limits import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_FACTOR,
    MAX_SIZE,
    MAX_TOKENS,
    ConfigError,
    integer,
    number,
    refusal,
)
from anydecode.models.spec import (
    BlockSpec,
    HyperSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    LowRankQuery,
    ModelSpec,
    SharedKeySpec,
    TimeSpec,
)

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sqrelu": "relu2",
    "xielu": "xielu",
}

#: How many tokens parallel draft models draft in their published evaluations, by `spd_type`: PARD
#: (An et al., arXiv:2504.18583) and PARD-2.
_PARALLEL_DRAFTS = {"pard": 12, "pard2": 15}

#: The keys for the number of experts.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

#: Multimodal architectures whose language model (`text_config`) can run alone.
_MULTIMODAL = (
    "AriaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "BeeForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
    "Cosmos3OmniForConditionalGeneration",
    "DeepseekOCRForCausalLM",
    "DeepseekOcr2ForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "DeepseekVLV2ForCausalLM",
    "DiffusionGemmaForBlockDiffusion",
    "Dots3NoteForConditionalGeneration",
    "EmbeddingGemma2Model",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "H2OVLChatModel",
    "HunYuanVLForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternS1ForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Llama_Nemotron_Nano_VL",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MantisForConditionalGeneration",
    "MiniCPMO",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxVL01ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "NVLM_D",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "OpenCUAForConditionalGeneration",
    "Ovis",
    "Ovis2ForConditionalGeneration",
    "Ovis2_5",
    "PaddleOCRVLForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "RForConditionalGeneration",
    "SkyworkR1VChatModel",
    "SmolVLMForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "TarsierForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)


def text_config(config: Config) -> dict[str, Any]:
    """The part of a config that describes the language model, with its family's defaults.

    Raises:
        CheckpointError: The family is not supported.
    """
    config = with_text_config(config)
    if "text_config" in config:
        check_multimodal(config)
    text = mapping_value(config, "text_config") if "text_config" in config else dict(config)
    given = text.get("model_type") or config.get("model_type")
    if "text_config" in config:
        text = completed(text, given)
    model_type = find_family(text, "gemma3_text" if given == "gemma3" else given)
    if model_type is None:
        name = ", ".join(class_names(config)) or "no architecture"
        raise ConfigError(unsupported(f"model type {given!r} ({name})", given, FAMILIES))
    family = FAMILIES[model_type]
    _check_architecture(text, given, family.architectures)
    keys = _NUM_EXPERTS if family.experts_key is None else (family.experts_key,)
    if family.moe is None and any(text.get(key) for key in keys):
        raise ConfigError(f"a mixture of experts of model type {given!r} is not supported")
    text["model_type"] = model_type
    for key, targets in family.keys.items():
        if key in text:
            text.update(dict.fromkeys(targets, text[key]))
    merged = {**family.defaults, **text}
    return merged if family.derived is None else {**merged, **family.derived(merged)}


def check_multimodal(config: Config) -> None:
    """Raise CheckpointError for a config with a `text_config`, unless its language model is known
    to run alone."""
    _check_architecture(config, config.get("model_type"), _MULTIMODAL)


def _check_architecture(config: Config, model_type: Any, supported: tuple[str, ...]) -> None:
    """Raise CheckpointError if the config names classes and none of them is supported."""
    names = class_names(config)
    if names and not set(names) & set(supported):
        what = f"architecture {', '.join(names)} of model type {model_type!r}"
        raise ConfigError(unsupported(what, model_type, supported))


def spec_from_config(
    config: Config, *, dtype: str | None = None, max_positions: int | None = None
) -> ModelSpec:
    """The architecture of the model that a config describes.

    Args:
        config: The keys of `config.json`.
        dtype: The requested weight format; None means the checkpoint's own. Gemma's embedding scale
            is rounded to it, as in transformers.
        max_positions: The context length; None means the one the model was trained for. The rope
            scalings `dynamic` and `longrope` depend on it.

    Raises:
        CheckpointError: A key is missing, invalid or unsupported.
    """
    config = text_config(config)
    family = FAMILIES[config["model_type"]]
    denoising = family.denoising
    shifts = denoising is not None and denoising.shift == 1
    is_two_sided = config.get("use_bidirectional_attention") not in (None, False, "vision")
    if is_two_sided and family.causal:
        raise ConfigError("bidirectional attention in a Gemma config is not supported")
    if family.causal and config.get("is_causal") is False:
        raise refusal("is_causal", False, "true: bidirectional attention is not supported")
    if config["model_type"] == "minicpm" and config.get("sparse_config") is not None:
        raise ConfigError("sparse attention (sparse_config) is not supported")
    for key in ("use_qk_norm", "qk_layernorm"):
        if config.get(key) and family.qk_norm is None:
            raise ConfigError(f"layer norms of queries and keys ({key}) are not supported")
    if config.get("clip_qkv") is not None and not family.has_qkv_limit:
        raise refusal("clip_qkv", config["clip_qkv"], "null")
    if config.get("moe_layer_freq") not in (None, 1):
        raise refusal("moe_layer_freq", config["moe_layer_freq"], "1")
    if max_positions is not None:
        high = MAX_SIZE
        if family.has_position_table:
            high = int_value(config, "max_position_embeddings")
        limiting = family.context_limit
        if limiting is not None and config.get(limiting) is not None:
            high = int_value(config, limiting)
            if max_positions > high:
                allowed = f"{high} at most ({limiting}): longer contexts are not supported"
                raise refusal("max_positions", max_positions, allowed)
        integer("max_positions", max_positions, 1, high)
    limit = max_positions or _default_max_positions(config)
    scales = family.scales(config) if family.scales is not None else Scales()
    if family.has_scaled_embedding:
        scales = Scales(_rounded_root(config, int_value(config, "hidden_size"), dtype))
    per_layer_size = int_value(config, "hidden_size_per_layer_input", 0, low=0, high=MAX_COUNT)
    layers = tuple(_layers(config, family, limit, scales.attention))
    return ModelSpec(
        architecture=_architecture(config) or config["model_type"],
        vocab_size=int_value(config, "vocab_size", high=MAX_TOKENS),
        hidden_size=int_value(config, "hidden_size"),
        max_positions=limit,
        norm_eps=_norm_eps(config, family),
        post_norm_eps=optional_number(config, "post_norm_eps"),
        final_norm_eps=optional_number(config, "final_norm_eps"),
        layers=layers,
        embedding_scale=scales.embedding,
        logit_scale=scales.logits,
        logit_softcap=optional_number(config, "final_logit_softcapping"),
        causal=family.causal,
        logit_shift=int(bool_value(config, "right_shift_logits", shifts)),
        block_size=_block_size(config, denoising),
        time=_time(config, denoising),
        mask_token=_mask_token(config, denoising),
        num_noise_tokens=_num_noise_tokens(config, denoising),
        decoder=_decoder(config, denoising),
        edit_tokens=_edit_tokens(config, denoising),
        expand_token=_expand_token(config, denoising),
        has_canvas=denoising is not None and denoising.has_canvas,
        has_causal_context=denoising is not None and denoising.context == "causal",
        context_predicts_next=denoising is not None and denoising.context_predicts_next,
        has_prompt_block=denoising is not None and denoising.context == "prompt",
        residual_scale=scales.residual,
        norm=family.norm,
        has_position_table=family.has_position_table,
        is_encoder=family.is_encoder,
        has_embedding_norm=family.has_embedding_norm,
        has_final_norm=family.has_final_norm and bool_value(config, "do_layer_norm_before", True),
        head_activation=_head_activation(config, family),
        num_segments=int_value(config, "type_vocab_size", 0, low=0, high=MAX_COUNT)
        if family.has_segments
        else 0,
        num_streams=_num_streams(config, family),
        hyper=_hyper(config) if family.has_hyper_connections else None,
        residual_block=_residual_block(config, family),
        stream_gate_rank=int_value(config, "hc_lowrank") if family.has_stream_gates else 0,
        active_stream=int_value(config, "altup_active_idx", 0, low=0) if family.has_streams else 0,
        memory_size=_memory_size(config, layers),
        per_layer_size=per_layer_size,
        per_layer_scale=_rounded_root(config, per_layer_size, dtype) if per_layer_size else 1.0,
        block=_parallel_drafts(config),
    )


def _memory_size(config: Config, layers: tuple[LayerSpec, ...]) -> int:
    if any(layer.memory in ("side", "embeddings", "shortcut", "swaps") for layer in layers):
        return int_value(config, "hidden_size")
    if any(layer.memory == "routes" for layer in layers):
        return int_value(config, "router_hidden_size")
    makers = [layer.recurrence for layer in layers if layer.memory == "makes"]
    return sum(maker.shape.width_out for maker in makers if maker is not None)


def _head_activation(config: Config, family: Family) -> str | None:
    if not family.has_head_transform:
        return None
    name = str(config.get("classifier_activation"))
    if name not in _ACTIVATIONS or name == "xielu":
        raise ConfigError(f"classifier_activation {name!r} is not supported")
    return _ACTIVATIONS[name]


def _num_streams(config: Config, family: Family) -> int:
    if family.has_hyper_connections:
        return int_value(config, "hc_mult")
    if family.has_stream_gates:
        return int_value(config, "hc_count")
    if family.has_residual_blocks:
        return 1 + -(-num_layers(config) // _residual_block(config, family))
    return int_value(config, "altup_num_inputs", 4) if family.has_streams else 1


def _residual_block(config: Config, family: Family) -> int:
    """The layers of a block whose sum later sublayers read; 0: there are no blocks."""
    return int_value(config, "attn_res_block_size") if family.has_residual_blocks else 0


def _hyper(config: Config) -> HyperSpec:
    """The hyper-connections of a model."""
    iterations = int_value(config, "hc_sinkhorn_iters", high=MAX_COUNT)
    eps = number("hc_eps", config.get("hc_eps"), 0.0, 1.0)
    magnitude = optional_number(config, "hc_magnitude")
    return HyperSpec(iterations, eps, bool_value(config, "has_mean_stream"), magnitude)


def _parallel_drafts(config: Config) -> BlockSpec | None:
    """What a language model drafts that was trained as a parallel draft model; None for others."""
    if config.get("pard_token") is None:
        return None
    mask = int_value(config, "pard_token", low=0, high=MAX_TOKENS)
    count = _PARALLEL_DRAFTS.get(str(config.get("spd_type")), _PARALLEL_DRAFTS["pard"])
    return BlockSpec(count, mask, predicts_next=True)


def _norm_eps(config: Config, family: Family) -> float:
    if family.norm == "layer":
        return number("layer_norm_eps", value_or(config, "layer_norm_eps", 1e-5), 0.0, 1.0)
    return number("rms_norm_eps", value_or(config, "rms_norm_eps", 1e-6), 0.0, 1.0)


def _block_size(config: Config, denoising: Denoising | None) -> int | None:
    """The block size of a block-diffusion model; None for no blocks."""
    if denoising is None or denoising.block_size is None:
        return None
    key = denoising.block_size
    if config.get(key) is not None:
        return int_value(config, key)
    if denoising.needs_block_size and denoising.default_block_size is None:
        raise ConfigError(
            f"the config lacks {key!r}, the block size, which is not known for"
            f" {config['model_type']} models: give block= (--block) when the model is opened"
        )
    return denoising.default_block_size


def _decoder(config: Config, denoising: Denoising | None) -> str | None:
    """The published decoder, with the parameters that the config sets."""
    if denoising is None or denoising.decoder is None or denoising.decoder_options is None:
        return None if denoising is None else denoising.decoder
    options = denoising.decoder_options(config)
    return ",".join([denoising.decoder, *(f"{name}={value}" for name, value in options.items())])


def _edit_tokens(config: Config, denoising: Denoising | None) -> tuple[int, int] | None:
    """The config's, else those of the published models if the vocabulary has them."""
    if denoising is None or denoising.edit_tokens is None:
        return None
    size = int_value(config, "vocab_size", high=MAX_TOKENS)
    delete, split = (
        int_value(config, key, token if token < size else None, low=0, high=MAX_TOKENS)
        for key, token in denoising.edit_tokens
    )
    return delete, split


def _expand_token(config: Config, denoising: Denoising | None) -> int | None:
    if denoising is None or denoising.expand_token is None:
        return None
    return int_value(config, denoising.expand_token, low=0, high=MAX_TOKENS)


def _time(config: Config, denoising: Denoising | None) -> TimeSpec | None:
    if denoising is None or denoising.time is None:
        return None
    return TimeSpec(
        int_value(config, "timestep_cond_dim"),
        reads_noise=denoising.time == "noise",
        margin=number("t_eps", value_or(config, "t_eps", denoising.time_margin), 1e-9, 0.1),
        uniform=number("p_uniform", value_or(config, "p_uniform", 0.0), 0.0, 0.9),
        modulates_inputs=denoising.time_modulates_inputs,
    )


def _mask_token(config: Config, denoising: Denoising | None) -> int | None:
    """The mask token of a diffusion model: the config's, else that of the published models."""
    if denoising is None:
        return None
    size = int_value(config, "vocab_size", high=MAX_TOKENS)
    if config.get("mask_token_id") is not None:
        return int_value(config, "mask_token_id", low=0, high=size - 1)
    token = denoising.mask_token
    return token if token is not None and token < size else None


def _num_noise_tokens(config: Config, denoising: Denoising | None) -> int | None:
    """`ModelSpec.num_noise_tokens`: that of the published models, if the table is longer."""
    count = None if denoising is None else denoising.num_noise_tokens
    return count if count is not None and count < int_value(config, "vocab_size") else None


def _architecture(config: Config) -> str | None:
    """The first of the config's architectures, if there is one."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def is_expert_layer(config: Config, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    if FAMILIES[config["model_type"]].moe is None:
        return False
    step = int_value(config, "decoder_sparse_step", 1)
    dense = list_value(config, "mlp_only_layers", int) or []
    first = int_value(config, "first_k_dense_replace", 0, low=0)
    is_sparse = layer >= first and layer not in dense and (layer + 1) % step == 0
    return is_sparse and num_experts(config) > 0


def num_experts(config: Config) -> int:
    """The number of experts of a mixture-of-experts layer."""
    key = next((key for key in _NUM_EXPERTS if key in config), "num_experts")
    return int_value(config, key, low=0, high=MAX_EXPERTS)


def identity_experts(config: Config, moe: MixtureOfExperts) -> int:
    """The number of experts that return their input."""
    if moe.identity_experts is None:
        return 0
    return int_value(config, moe.identity_experts, 0, low=0, high=MAX_EXPERTS)


def _all_experts(config: Config, family: Family) -> int:
    """The number of experts, those without matrices included."""
    return num_experts(config) + (identity_experts(config, family.moe) if family.moe else 0)


def shared_size(config: Config, moe: MixtureOfExperts) -> int:
    """The inner size of the MLP that every token runs through; 0 if there is none."""
    if moe.shared_module is None:
        return 0
    if moe.shared_size is not None:
        return int_value(config, moe.shared_size, low=0)
    count = int_value(config, "n_shared_experts", 1, low=0, high=MAX_EXPERTS)
    return count * int_value(config, moe.inner_size)


def _routing(config: Config, moe: MixtureOfExperts) -> Routing:
    possible = (moe.scoring,) if isinstance(moe.scoring, str) else moe.scoring
    scoring = value_or(config, "scoring_func", possible[0])
    method = value_or(config, "topk_method", moe.methods[0])
    if scoring not in possible:
        names = ("score_function", "expert_selection_fn")
        key = next((name for name in names if name in config), "scoring_func")
        raise refusal(key, scoring, " or ".join(map(repr, possible)))
    if method not in moe.methods:
        raise refusal("topk_method", method, f"one of {moe.methods}")
    block_experts = None
    if moe.is_per_block:
        block_experts = int_value(config, "expert_capacity", high=MAX_EXPERTS)
    has_groups = method != "greedy" and block_experts is None
    return Routing(
        int_value(config, "num_experts_per_tok"),
        normalise=bool_value(config, "norm_topk_prob", moe.is_normalised),
        scoring=scoring,
        num_groups=int_value(config, "n_group", 1) if has_groups else 1,
        groups_per_token=int_value(config, "topk_group", 1) if has_groups else 1,
        scale=number("routed_scaling_factor", value_or(config, "routed_scaling_factor", 1.0)),
        scores_per_group=1 if method == "group_limited_greedy" else 2,
        scales_inputs=moe.scales_inputs,
        by_logits=moe.by_logits,
        jitter=_jitter(config) if scoring == "sparsemixer" else 0.0,
        block_experts=block_experts,
        num_identity=identity_experts(config, moe),
        output_eps=optional_number(config, "post_norm_eps") if moe.norms_outputs else None,
    )


def _adjugate(config: Config, moe: MixtureOfExperts) -> Routing | None:
    """The routing of the further experts of groups."""
    if moe.group_size is None:
        return None
    size = int_value(config, moe.group_size, high=MAX_EXPERTS)
    routing, scale = _routing(config, moe), number("group_scale", config.get("group_scale"))
    return replace(routing, scale=routing.scale * scale, logits_per_expert=size)


def _jitter(config: Config) -> float:
    """PhiMoE, whose rule is one for two experts."""
    if int_value(config, "num_experts_per_tok") != 2:
        raise refusal("num_experts_per_tok", config["num_experts_per_tok"], "2")
    key = "router_jitter_noise"
    return number(key, value_or(config, key, 0.01), 0.0, 1.0)


def _latent(config: Config, family: Family, query_rope: Rope | None) -> LatentSpec:
    """Latent attention, whose queries grow in both parts if those with positions do."""
    size = int_value(config, "qk_nope_head_dim", high=MAX_COUNT)
    growth = None
    if query_rope is not None:
        growth = replace(query_rope, frequencies=np.zeros(size // 2, np.float32), factor=1.0)
    return LatentSpec(
        size,
        int_value(config, "v_head_dim", high=MAX_COUNT),
        _rank_eps(config, family),
        growth,
        family.has_rotary_norm,
    )


def _rank_eps(config: Config, family: Family) -> float:
    """The epsilon of the norms of latents and of low-rank queries in latent attention: mostly the
    default of their classes."""
    is_given = family.has_rotary_norm or bool_value(config, "has_rank_eps")
    return _norm_eps(config, family) if is_given else 1e-6


def _low_rank_query(config: Config, family: Family) -> LowRankQuery | None:
    if family.has_latent_attention and config.get("q_lora_rank") is not None:
        rank, eps = int_value(config, "q_lora_rank"), _rank_eps(config, family)
        return LowRankQuery(rank, eps, family.has_raw_queries)
    if family.query_rank is not None:
        return LowRankQuery(int_value(config, family.query_rank), _norm_eps(config, family))
    return None


def _indexed(
    config: Config, family: Family, layer: int, shape: Attention
) -> tuple[IndexerSpec | None, Attention]:
    """The indexer of a layer, if it has one, and its attention to the positions that this one or
    that of an earlier layer selects."""
    types = list_value(config, "indexer_types", str) or []
    kind = types[layer] if layer < len(types) else None
    has_weights = family.has_latent_attention
    allowed = ("full", "shared", "none") if has_weights else ("full", "none")
    if kind not in allowed:
        raise refusal(f"indexer_types[{layer}]", kind, " or ".join(allowed))
    if kind == "none":
        return None, shape
    size = int_value(config, "index_block_size", 1, high=MAX_TOKENS)
    shape = replace(
        shape,
        top_k=int_value(config, "index_topk"),
        index_block=size,
        local_blocks=int_value(config, "index_local_blocks", 0, low=0),
        has_block_keys=bool_value(config, "has_block_keys"),
    )
    if kind == "shared":
        return None, shape
    heads = int_value(config, "index_n_heads", high=MAX_COUNT)
    dim = int_value(config, "index_head_dim", high=MAX_COUNT)
    shape = replace(shape, index_dim=dim, num_selections=1 if has_weights else heads)
    is_interleaved = bool_value(config, "indexer_rope_interleave")
    indexer = IndexerSpec(
        heads,
        dim,
        is_interleaved,
        bool_value(config, "indexer_rope_last"),
        norm_eps=_norm_eps(config, family) if bool_value(config, "has_index_eps") else 1e-6,
        has_own_query=family.has_query_scale,
    )
    if not has_weights:
        indexer = replace(indexer, has_weights=False, norm_eps=_norm_eps(config, family))
    if bool_value(config, "has_mean_keys"):
        shape = replace(shape, num_selections=1)
    return indexer, shape


def _latent_attention(config: Config, layer_type: str) -> Attention:
    """Latent attention: its scale grows with the context that YaRN adds."""
    rotary = int_value(config, "qk_rope_head_dim", low=0, high=MAX_COUNT)
    rank = int_value(config, "kv_lora_rank", high=MAX_COUNT)
    query_dim = int_value(config, "qk_nope_head_dim", high=MAX_COUNT) + rotary
    return Attention(
        num_heads=int_value(config, "num_attention_heads", high=MAX_COUNT),
        num_kv_heads=1,
        head_dim=rank + rotary,
        scale=yarn_scale(rope_parameters(config, FULL)) ** 2 * query_dim**-0.5,
        window=int_value(config, "sliding_window") if layer_type == SLIDING else None,
        latent_dim=rank,
    )


def _activation(config: Config, family: Family) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name == "situ":
        beta = number("activation_situ_beta", value_or(config, "activation_situ_beta", 1.0))
        return SituGlu(beta, optional_number(config, "activation_situ_linear_beta"))
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported")
    if family.has_limited_swiglu:
        return LimitedSwiglu(number("swiglu_limit", config.get("swiglu_limit")))
    if not family.has_clamped_swiglu:
        return _ACTIVATIONS[name]
    default = ClampedSwiglu()
    return ClampedSwiglu(
        number("swiglu_alpha", value_or(config, "swiglu_alpha", default.alpha)),
        number("swiglu_limit", value_or(config, "swiglu_limit", default.limit)),
    )


def _capped(own: Config, key: str, activation: Activation) -> Activation:
    """The activation of a layer, whose config may have a limit of it."""
    limit = optional_number(own, key)
    return CappedSwiglu(limit) if limit else activation


def _expert_activation(own: Config, family: Family, activation: Activation) -> Activation:
    """That of the experts of a layer."""
    if not family.has_limited_experts:
        return _capped(own, "swiglu_cap", activation)
    limit = number("swiglu_limit", value_or(own, "swiglu_limit", 0.0), -MAX_FACTOR)
    return LimitedSwiglu(limit) if limit > 0 else activation


def _shared_activation(own: Config, family: Family, activation: Activation) -> Activation | None:
    """That of the MLP beside the experts of a layer, if it is not the experts'."""
    shared = _capped(own, "shared_swiglu_cap", activation)
    return None if shared == _expert_activation(own, family, activation) else shared


def _layer_types(config: Config, family: Family) -> list[str]:
    """The attention type of each layer."""
    types = list_value(config, "layer_types", str) or family.layer_types(config)
    return [FULL if kind == "attention" else kind for kind in types]


def _layers(
    config: Config, family: Family, max_positions: int, attention_scale: float | None
) -> list[LayerSpec]:
    count, layer_types = num_layers(config), _layer_types(config, family)
    has_rope = [True] * count
    if family.rope_layers is not None:
        has_rope = family.rope_layers(config, layer_types)
    if len(layer_types) < count or len(has_rope) < count:
        raise ConfigError(
            f"layer_types or no_rope_layers has fewer entries than the config's {count} layers"
        )
    activation = _activation(config, family)
    trained = int_value(config, "max_position_embeddings")
    ropes: dict[tuple[str, int, float | None], Rope] = {}

    def rope_of(own: Config, kind: str, dim: int) -> Rope:
        """The rotary embedding of a layer; layers with an equal one share the object."""
        theta = optional_number(own, "own_rope_theta")
        if (kind, dim, theta) not in ropes:
            parameters = rope_parameters(config, kind)
            parameters["rope_theta"] = theta or parameters["rope_theta"]
            rope = make_rope(parameters, dim, trained, max_positions)
            if family.has_reversed_rope:
                rope = replace(rope, frequencies=-rope.frequencies)
            if family.has_shared_key:
                rope = replace(rope, has_last_pairs=True)
            ropes[kind, dim, theta] = rope
        return ropes[kind, dim, theta]

    is_parallel = family.is_parallel and bool_value(config, "use_parallel_residual", True)
    cutoffs: list[float | None] = config["gate_cutoffs"] if family.has_streams else [None] * count
    query_ropes: dict[Rope | None, Rope | None] = {}
    key_ropes: dict[Rope, Rope] = {}
    temperature: Rope | None = None
    latent: LatentSpec | None = None
    latents: dict[tuple[int, int], LatentSpec] = {}  # layers of equal sizes share the object
    sources = cache_layers(config, layer_types[:count])
    layers = []
    recurrent = None if family.recurrent is None else family.recurrent.spec(config)
    loop_size = int_value(config, "loop_size", int_value(config, "num_stored_layers", count))
    has_loop_norms = bool_value(config, "has_loop_norms")
    norm_gate = 0 if family.norm_gate is None else int_value(config, family.norm_gate)
    indexer: IndexerSpec | None = None
    maker = _memory_layer(layer_types[:count])
    for layer in range(count):
        own, kind, is_moe = (
            layer_config(config, layer),
            layer_types[layer],
            is_expert_layer(config, layer),
        )
        is_side = kind == SIDE
        kind = FULL if is_side else kind
        if kind == NGRAMS:
            layers.append(ngram_layer(config))
            continue
        has_recurrence = recurrent is not None and kind in (*RECURRENT_TYPES, HYBRID)
        may_be_mlp = family.has_single_sublayers or family.has_missing_sublayers
        is_mlp = may_be_mlp and kind in (MLP, MOE)
        has_mlp = is_mlp or not family.has_single_sublayers
        if family.has_shared_blocks:
            has_mlp = kind == HYBRID
        mlp = family.mlp if has_mlp and bool_value(own, "has_mlp", True) else "none"
        if is_mlp or kind == MEMORY_UNIT or (has_recurrence and kind != HYBRID):
            memory = "makes" if layer == maker else None
            layers.append(
                LayerSpec(
                    attention=None,
                    rope=None,
                    norms=_norms(config, family, has_recurrence),
                    sum_factors=_sum_factors(config, family, kind),
                    activation=activation,
                    num_experts=num_experts(config) if is_moe else 0,
                    routing=_routing(config, family.moe) if is_moe and family.moe else None,
                    mlp=mlp,
                    recurrence=recurrent if has_recurrence else None,
                    memory="reads" if kind == MEMORY_UNIT else memory,
                )
            )
            continue
        shared_key: SharedKeySpec | None = None
        if family.has_latent_attention:
            dim = int_value(own, "qk_rope_head_dim", low=0, high=MAX_COUNT)
            attention = _latent_attention(own, kind)
        elif family.has_shared_key:
            dim = head_dim(own)
            attention, shared_key, indexer = shared_key_spec(config, layer, rope_of(own, kind, dim))
        else:
            dim = head_dim(own)
            attention = _attention(own, family, kind, dim, attention_scale)
        if family.has_indexer:
            indexer, attention = _indexed(config, family, layer, attention)
        if family.is_differential:
            attention = _paired(attention)
        if family.has_key_bias:
            attention = replace(attention, head_dim=dim + 1, value_size=dim)
        if has_rope[layer] and not dim:
            raise refusal("qk_rope_head_dim", dim, "more than 0 with rotary embeddings")
        rope = rope_of(own, kind, dim) if dim else None
        if indexer is not None and bool_value(config, "has_mean_keys") and rope is not None:
            if rope not in key_ropes:
                key_ropes[rope] = replace(rope, shift=1 - attention.index_block)
            indexer = replace(indexer, key_rope=key_ropes[rope])
        if rope not in query_ropes:
            query_ropes[rope] = _query_rope(config, kind, rope)
        if family.has_latent_attention:
            found = _latent(own, family, query_ropes[rope])
            latent = latents.setdefault((found.key_dim, found.value_dim), found)
        if temperature is None and not has_rope[layer]:
            temperature = _temperature(config, dim)
        has_qk_norm = bool_value(config, "use_qk_norm", True)
        if family.qk_norm == "plain" and family.norm_after_rope:
            has_qk_norm = has_qk_norm and has_rope[layer]
        layers.append(
            LayerSpec(
                attention=attention,
                rope=rope if has_rope[layer] else None,
                norms=_norms(config, family, has_recurrence),
                has_second_sum=family.has_second_sum,
                sum_factors=_sum_factors(config, family, kind),
                qk_norm=family.qk_norm if has_qk_norm else None,
                activation=_expert_activation(own, family, activation)
                if is_moe
                else _capped(own, "swiglu_cap", activation),
                shared_activation=_shared_activation(own, family, activation) if is_moe else None,
                num_experts=_all_experts(config, family) if is_moe else 0,
                routing=_routing(config, family.moe) if is_moe and family.moe else None,
                routes_inputs=is_moe and family.moe is not None and family.moe.routes_inputs,
                experts_read_inputs=is_moe and family.moe is not None and family.moe.reads_inputs,
                adjugate=_adjugate(config, family.moe) if is_moe and family.moe else None,
                has_sinks=family.has_sinks and bool_value(own, "has_sinks", True),
                query_rope=query_ropes[rope] if has_rope[layer] else temperature,
                norm_after_rope=family.norm_after_rope,
                interleaved_rope=bool_value(config, "rope_interleave", family.interleaved_rope),
                mlp=mlp,
                is_parallel=is_parallel,
                recurrence=recurrent if has_recurrence else None,
                attention_gate=family.attention_gate
                if bool_value(config, "use_attention_gate", True)
                else None,
                gates_heads=bool_value(config, "gates_heads", family.gates_heads),
                has_attention_inner_norm=family.has_inner_norms,
                has_mlp_inner_norm=family.has_inner_norms,
                has_attention_norm=family.has_first_norm or layer > 0,
                latent=latent,
                indexer=indexer,
                low_rank_query=_low_rank_query(own, family),
                shared_key=shared_key,
                cache_layer=sources[layer],
                has_value=shared_key is None
                and (kind == SLIDING or not bool_value(config, "attention_k_eq_v")),
                has_value_norm=family.has_value_norm,
                has_scale=family.has_layer_scale,
                gate_cutoff=cutoffs[layer],
                qkv_limit=optional_number(config, "clip_qkv") if family.has_qkv_limit else None,
                is_differential=family.is_differential,
                has_distant_pairs=family.has_distant_pairs,
                attention_norm_gate=norm_gate,
                mlp_norm_gate=norm_gate if is_moe else 0,
                has_output_norm=is_moe and family.moe is not None and family.moe.has_output_norm,
                bias_reach=BIAS_REACH if family.has_distance_biases else 0,
                has_relative_positions=family.has_relative_positions,
                memory="side" if is_side else _attention_memory(config, family, layer),
                has_query_scale=family.has_query_scale,
                query_routing=Routing(int_value(config, "num_experts_per_tok"), by_logits=True)
                if family.has_attention_experts
                else None,
                has_residual_gates=family.has_residual_gates
                or family.residual_factors is not None
                or family.has_sum_biases,
                has_key_bias=family.has_key_bias,
                is_convolved=family.is_convolved,
                has_head_norm=family.has_head_norm,
                ends_loop=has_loop_norms and (layer + 1) % loop_size == 0 and layer + 1 < count,
            )
        )
    return layers


def _norms(config: Config, family: Family, has_recurrence: bool) -> str:
    """Where the norms of a layer are."""
    if has_recurrence and family.recurrent_norms is not None:
        return family.recurrent_norms
    return family.norms if bool_value(config, "do_layer_norm_before", True) else "sum"


def _sum_factors(
    config: Config, family: Family, kind: str
) -> tuple[float, float, float, float] | None:
    """The factors of MiniMax-Text-01's sums, for a layer of type `kind`."""
    if family.norms != "stream":
        return None
    mixer = "linear_attn" if kind in RECURRENT_TYPES else "full_attn"
    names = [f"{part}_{name}_factor" for part in (mixer, "mlp") for name in ("alpha", "beta")]
    first, mixed, second, fed = (number(name, value_or(config, name, 1.0)) for name in names)
    return first, mixed, second, fed


def _attention_memory(config: Config, family: Family, layer: int) -> str | None:
    """See `LayerSpec.memory`, for a layer with attention that is no side layer."""
    if family.has_states:
        run, place = divmod(layer, int_value(config, "loop_size"))
        kind: str = config["state_kinds"][run]
        return None if place else kind
    if family.has_shared_blocks:
        return "embeddings"
    if family.moe is not None and family.moe.has_router_states:
        return "routes"
    return ("shortcut", "adds")[layer % 2] if family.has_shortcuts else None


def _memory_layer(layer_types: list[str]) -> int | None:
    """The layer that makes the memory which the gated memory units read, if there are some: the
    last one with a recurrence."""
    if MEMORY_UNIT not in layer_types:
        return None
    recurrent = [i for i, kind in enumerate(layer_types) if kind in RECURRENT_TYPES]
    return recurrent[-1] if recurrent else None


def _paired(shape: Attention) -> Attention:
    """Differential attention, whose keys and values are those of pairs of heads."""
    for name in ("num_heads", "num_kv_heads"):
        if getattr(shape, name) % 2:
            raise refusal(name, getattr(shape, name), "an even number")
    return replace(shape, num_kv_heads=shape.num_kv_heads // 2, head_dim=2 * shape.head_dim)


def _query_rope(config: Config, layer_type: str, rope: Rope | None) -> Rope | None:
    """The rotary embedding of Ministral 3's queries, which grow with the position."""
    if rope is None or not FAMILIES[config["model_type"]].has_query_growth:
        return None
    parameters = rope_parameters(config, layer_type)
    key = "llama_4_scaling_beta"
    growth = number(key, value_or(parameters, key, 0.0), 0.0)
    period = int_value(parameters, "original_max_position_embeddings")
    return replace(rope, growth=growth, growth_period=period) if growth else None


def _temperature(config: Config, dim: int) -> Rope | None:
    """The growth of Llama 4's queries in layers without a rotary position embedding: an embedding
    that rotates nothing."""
    if config["model_type"] != "llama4_text":
        return None
    is_tuned = value_or(config, "attn_temperature_tuning", True)  # early configs have a number
    if not isinstance(is_tuned, bool) and is_tuned != 4:
        raise refusal("attn_temperature_tuning", is_tuned, "true or false")
    growth = number("attn_scale", value_or(config, "attn_scale", 0.1), 0.0)
    period = int_value(config, "floor_scale", 8192)
    if not is_tuned or not growth:
        return None
    return Rope(np.zeros(dim // 2, np.float32), growth=growth, growth_period=period, growth_start=1)


def _attention(
    config: Config, family: Family, layer_type: str, dim: int, scale: float | None
) -> Attention:
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    if layer_type not in (SLIDING, FULL, CHUNKED) and (
        layer_type != HYBRID or family.recurrent is None
    ):
        raise ConfigError(f"attention of type {layer_type!r} is not supported")
    scale = scale or (optional_number(config, "query_pre_attn_scalar") or dim) ** -0.5
    return Attention(
        num_heads=heads,
        num_kv_heads=int_value(config, "num_key_value_heads", heads, high=MAX_COUNT),
        head_dim=dim,
        scale=scale,
        window=int_value(config, "sliding_window") if layer_type == SLIDING else None,
        chunk=int_value(config, "attention_chunk_size") if layer_type == CHUNKED else None,
        is_two_sided=family.is_encoder and (layer_type == SLIDING or family.has_alibi),
        softcap=optional_number(config, "attn_logit_softcapping")
        if family.has_attention_softcap
        else None,
        slopes=_slopes(config, family, heads, scale),
        value_size=_value_size(config, family, dim),
    )


def _value_size(config: Config, family: Family, dim: int) -> int | None:
    """The numbers of one head's value, where they are fewer than the `dim` of its key."""
    if family.value_size is None:
        return None
    size = int_value(config, family.value_size, dim, high=dim)
    return size if size < dim else None


def _slopes(config: Config, family: Family, heads: int, scale: float) -> tuple[float, ...] | None:
    """The slope of each head, if attention has linear biases. Falcon rounds the slopes to bfloat16,
    and scales the biases as the products of queries and keys."""
    if not family.has_alibi or not bool_value(config, "alibi", True):
        return None
    slopes = alibi_slopes(heads, _max_bias(config))
    if config["model_type"] != "falcon":
        return slopes
    rounded = np.array(slopes, np.float32).astype(DTYPES["BF16"]).astype(np.float32)
    return tuple((rounded * np.float32(scale)).tolist())


def _max_bias(config: Config) -> float:
    return number("alibi_bias_max", value_or(config, "alibi_bias_max", 8.0))


def rope_parameters(config: Config, layer_type: str) -> dict[str, Any]:
    """The rope parameters of one layer type, from the current keys (`rope_parameters`, flat or per
    layer type) or the older ones (`rope_theta`, `rope_scaling`, `rope_local_base_freq`)."""
    parameters = mapping_value(config, "rope_parameters")
    theta = value_or(config, "rope_theta", 10_000.0)
    if layer_type in parameters:
        rope = mapping_value(parameters, layer_type)
    elif layer_type == SLIDING and config.get("rope_local_base_freq") is not None:  # Gemma 3
        rope, theta = {}, config["rope_local_base_freq"]
    elif config["model_type"] == "olmo3" and layer_type == SLIDING:
        rope = {}  # only full attention has a scaling
    else:
        rope = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
        rope.update(mapping_value(config, "rope_scaling"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = theta
    name = rope_type(rope)
    if config["model_type"] == "phi3" and name == "yarn":
        name = "longrope"  # its name in early Phi-3 checkpoints is "yarn"
    if config["model_type"] == "hunyuan_v1_dense" and name == "dynamic" and rope.get("alpha"):
        name = "ntk_alpha"
    rope["rope_type"] = name
    if not FAMILIES[config["model_type"]].has_partial_rotary and name == "default":
        rope.pop("partial_rotary_factor", None)
    elif rope.get("partial_rotary_factor") is None:
        rope["partial_rotary_factor"] = config.get("partial_rotary_factor")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def _default_max_positions(config: Config) -> int:
    """The default context length: the largest for which no rope scaling depends on the length."""
    longest = int_value(config, "max_position_embeddings")
    parameters = rope_parameters(config, FULL)
    if rope_type(parameters) == "longrope":
        return min(longest, int_value(parameters, "original_max_position_embeddings"))
    return longest


def _rounded_root(config: Config, size: int, dtype: str | None) -> float:
    """sqrt(size), rounded to the requested float format, or else to the checkpoint's."""
    float_name = (
        dtype if dtype in _FLOATS else str(config.get("dtype") or config.get("torch_dtype"))
    )
    precision = _FLOATS.get(float_name.removeprefix("torch."), DTYPES["F32"])
    # Rounded as in training, where the factor has the dtype of the weights.
    root = np.float32(math.sqrt(size))
    return float(root.astype(precision))


_FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}
