"""Converts a GGUF file's metadata to the Hugging Face `config.json` of the same model."""

from __future__ import annotations

from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.families.table import FAMILIES
from anydecode.models.limits import MAX_LAYERS
from anydecode.models.loading.gguf_dense import (
    arcee,
    baichuan,
    bitnet,
    cohere,
    deci,
    falcon,
    gpt2,
    gpt_neox,
    granite,
    hrm_text,
    hunyuan_vl,
    hybrid,
    jais,
    llama,
    minicpm,
    mistral3,
    mpt,
    muse_glimmer,
    nanbeige,
    nemotron,
    olmo,
    olmo2,
    openelm,
    own_activation,
    phi2,
    phi3,
    plamo3,
    qwen,
    qwen2,
    smollm3,
    spark,
    stablelm,
    starcoder2,
)
from anydecode.models.loading.gguf_diffusion import (
    denoising,
    diffusion_gemma,
    dream,
    llada_moe,
    rnd1,
)
from anydecode.models.loading.gguf_encoder import (
    bert,
    jina_bert,
    modern_bert,
    nomic_bert,
    nomic_bert_moe,
)
from anydecode.models.loading.gguf_experts import (
    afmoe,
    arctic,
    bailing_hybrid,
    bailing_moe,
    cohere2_moe,
    dbrx,
    deepseek,
    deepseek_moe,
    deepseek_v4,
    dots1,
    ernie_moe,
    exaone_moe,
    experts_beside_shared,
    glm4_moe,
    glm5_next,
    gpt_oss,
    grok,
    grove_moe,
    hunyuan_moe,
    hy_v3,
    hy_v4,
    kimi_k3,
    kimi_linear,
    laguna,
    llama4,
    maple,
    mellum,
    mimo2,
    minicpm3,
    minimax_01,
    minimax_m2,
    minimax_m3,
    mistral4,
    olmoe,
    phimoe,
    plm,
    qwen2_moe,
    qwen3_moe,
    smallthinker,
    sparse_deepseek,
    step35,
)
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_gemma import (
    embedding_gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
)
from anydecode.models.loading.gguf_keys import ARCHITECTURES, TIME_MIXING, Keys
from anydecode.models.loading.gguf_recurrent import (
    arwkv7,
    falcon_h1,
    gated_delta,
    granite_hybrid,
    granite_moe,
    granite_swa,
    jamba,
    lfm2,
    lfm2_moe,
    mamba,
    mamba_2,
    nemotron_h,
    plamo2,
    qwen4_exp,
    rwkv6,
    rwkv6_qwen2,
    rwkv7,
)
from anydecode.models.loading.gguf_rope import partial_rotary, rope_scaling

#: Architectures whose layers differ in the number of key heads and the size of the MLP.
_VARIED = ("gemma3n", "gemma4", "diffusion-gemma", "mimo2", "deci", "step35", "openelm")
#: Architectures whose layers differ in the number of heads.
_VARIED_HEADS = ("laguna", "step35", "openelm")


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config of `file`.

    Raises:
        CheckpointError: A key is missing, invalid or unsupported.
    """
    keys = Keys(file)
    config = _common(keys)
    extend = {
        "gemma": own_activation,
        "apertus": own_activation,
        "phi2": phi2,
        "stablelm": stablelm,
        "olmo": olmo,
        "chatglm": partial_rotary,
        "nemotron": nemotron,
        "arcee": arcee,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "gemma3n": gemma3n,
        "gemma4": gemma4,
        "phi3": phi3,
        "qwen3moe": qwen3_moe,
        "qwen3vlmoe": qwen3_moe,
        "smollm3": smollm3,
        "llama4": llama4,
        "qwen2": qwen2,
        "qwen2vl": qwen2,
        "llama": llama,
        "olmo2": olmo2,
        "granite": granite,
        "granite_swa": granite_swa,
        "baichuan": baichuan,
        "qwen": qwen,
        **dict.fromkeys(("deepseek", "deepseek2-ocr"), deepseek_moe),
        "hunyuan_vl": hunyuan_vl,
        "dbrx": dbrx,
        "minicpm": minicpm,
        "glm4": partial_rotary,
        "mistral3": mistral3,
        "exaone4": hybrid,
        "starcoder2": starcoder2,
        "command-r": cohere,
        "cohere2": cohere,
        "gpt2": gpt2,
        "gptneox": gpt_neox,
        "falcon": falcon,
        "bloom": gpt2,
        "starcoder": gpt2,
        "codeshell": gpt2,
        "mpt": mpt,
        "muse-glimmer": muse_glimmer,
        "nanbeige": nanbeige,
        "hrm_text": hrm_text,
        "grok": grok,
        "plm": plm,
        "smallthinker": smallthinker,
        "jais": jais,
        "spark2_5": spark,
        "maple": maple,
        "gpt-oss": gpt_oss,
        "arctic": arctic,
        "grovemoe": grove_moe,
        "qwen2moe": qwen2_moe,
        "olmoe": olmoe,
        "bailingmoe": experts_beside_shared,
        "bailingmoe2": bailing_moe,
        "exaone-moe": exaone_moe,
        "phimoe": phimoe,
        "jais2": arcee,
        "minicpm3": minicpm3,
        "mistral4": mistral4,
        "glm4moe": glm4_moe,
        "dots1": dots1,
        "afmoe": afmoe,
        "minimax-01": minimax_01,
        "minimax-m2": minimax_m2,
        "hunyuan-moe": hunyuan_moe,
        "deci": deci,
        "openelm": openelm,
        "hy_v3": hy_v3,
        "hy_v4": hy_v4,
        "mellum": mellum,
        "mimo2": mimo2,
        "kimi-linear": kimi_linear,
        "kimi-k3": kimi_k3,
        "glm5-next": glm5_next,
        "bailingmoe3": bailing_hybrid,
        "laguna": laguna,
        "step35": step35,
        "cohere2moe": cohere2_moe,
        "minimax-m3": minimax_m3,
        "bitnet": bitnet,
        "bitnet-b1.58": bitnet,
        "ernie4_5-moe": ernie_moe,
        "lfm2": lfm2,
        "deepseek2": deepseek,
        "deepseek4": deepseek_v4,
        "deepseek32": sparse_deepseek,
        "glm-dsa": sparse_deepseek,
        "lfm2moe": lfm2_moe,
        "bert": bert,
        "nomic-bert": nomic_bert,
        "nomic-bert-moe": nomic_bert_moe,
        "jina-bert-v2": jina_bert,
        "jina-bert-v3": bert,
        "modern-bert": modern_bert,
        "gemma-embedding": embedding_gemma,
        "mamba": mamba,
        "llada": denoising,
        "llada-moe": llada_moe,
        "dream": dream,
        "rnd1": rnd1,
        "diffusion-gemma": diffusion_gemma,
        "rwkv6": rwkv6,
        "rwkv6qwen2": rwkv6_qwen2,
        "rwkv7": rwkv7,
        "arwkv7": arwkv7,
        "jamba": jamba,
        "plamo2": plamo2,
        "plamo3": plamo3,
        "mamba2": mamba_2,
        "granitemoe": granite_moe,
        "granitehybrid": granite_hybrid,
        "falcon-h1": falcon_h1,
        "nemotron_h": nemotron_h,
        "nemotron_h_moe": nemotron_h,
        "qwen3next": gated_delta,
        "qwen35": gated_delta,
        "qwen35moe": gated_delta,
        "qwen4exp": qwen4_exp,
    }.get(keys.architecture)
    if extend is not None:
        extend(keys, config)
    return config


def _has_rms_norms(keys: Keys) -> bool:
    """Whether norms are RMS norms in a file of Cohere 2 with experts."""
    key = "attention.layer_norm_rms_epsilon"
    return keys.architecture == "cohere2moe" and keys.get(key, None) is not None


def _common(keys: Keys) -> dict[str, Any]:
    file = keys.file
    model_type, architecture = ARCHITECTURES[keys.architecture]
    # Mamba has no attention and no MLP, RWKV no attention.
    low = 0 if keys.architecture in ("mamba", "mamba2", *TIME_MIXING) else 1
    is_deci, hidden = keys.architecture == "deci", keys.count("embedding_length")
    has_headless = is_deci or keys.architecture == "plamo2"
    if keys.architecture in _VARIED_HEADS:
        heads = keys.counts("attention.head_count")[0]
    else:
        heads = max(1, keys.count("attention.head_count", low=low, skip_zeros=has_headless))
    head_dim = keys.count("attention.key_length", max(1, hidden // heads))
    is_latent, value_size = (
        FAMILIES[model_type].has_latent_attention,
        FAMILIES[model_type].value_size,
    )
    value_dim = head_dim if is_latent else keys.count("attention.value_length", head_dim)
    if value_size is None and value_dim != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different sizes are unsupported")
    size = kv_heads = None
    if keys.architecture in _VARIED:
        lowest = 0 if is_deci else 1
        size = next(filter(None, keys.counts("feed_forward_length", low=lowest)), None)
        of_keys = keys.counts("attention.head_count_kv", heads, low=lowest)
        kv_heads = next(filter(None, of_keys), None)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": size or keys.count("feed_forward_length", 1, low=low, skip_zeros=True),
        "num_hidden_layers": keys.count("block_count", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads
        or keys.count("attention.head_count_kv", heads, skip_zeros=True),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    if value_size is not None:
        config[value_size] = value_dim
    if keys.architecture in ("phimoe", "refact"):  # whose layer norms have the key of the others
        config["layer_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    elif FAMILIES[model_type].norm == "layer" and not _has_rms_norms(keys):
        config["layer_norm_eps"] = keys.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    if not FAMILIES[model_type].output_bias:
        config["attention_out_bias"] = config["attention_bias"]
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if "blk.0.attn_q.bias" in file.tensors and FAMILIES[model_type].output_bias:
        family = FAMILIES[model_type]
        is_possible = family.qkv_bias or ("qkv_bias",) in family.keys.values()
        if not config["attention_bias"] and not is_possible:
            raise CheckpointError(f"{file.path}: biases on queries alone are not supported")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int):
            config[f"{key}_token_id"] = token
    return config
