"""The tensors that a GGUF file must have, and their shapes, from the config of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anydecode.errors import CheckpointError
from anydecode.models.families.config import is_expert_layer, num_experts, shared_size
from anydecode.models.families.ngrams import NGRAMS
from anydecode.models.families.patterns import MLP, MOE, cache_layers
from anydecode.models.families.recurrent import HYBRID
from anydecode.models.families.shared_key import SELECTED, SLIDING
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config, layer_config
from anydecode.models.loading.gguf_names import EXPERTS, OF_GROUPS, OVERRIDES, STACKS
from anydecode.models.loading.gguf_recurrent_shapes import has_recurrence, recurrent_shapes

Shape = tuple[int, ...]
_KEYS_VALUES = ("k_proj", "v_proj")


def check_shapes(path: Path, architecture: str, config: Config, shapes: dict[str, Shape]) -> None:
    """Check that every tensor the config requires is present and has the right shape."""
    stored_name = FAMILIES[config["model_type"]].stored_name
    for name, shape, required in _expected_shapes(architecture, config):
        if stored_name is not None and name.startswith("model."):
            name = f"model.{stored_name(config, name.removeprefix('model.'))}"
        found = shapes.get(name)
        if found is None and required:
            raise CheckpointError(f"{path}: the tensor for {name!r} is missing")
        if found is not None and found != shape:
            raise CheckpointError(
                f"{path}: {name!r} has shape {list(found)}; its metadata imply {list(shape)}"
            )


def _expected_shapes(architecture: str, config: Config) -> Iterator[tuple[str, Shape, bool]]:
    """Yield names, shapes, and whether the tensor is required (most biases are not)."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    family = FAMILIES[config["model_type"]]
    yield f"model.{family.names.get('embed_tokens', 'embed_tokens')}.weight", (vocab, hidden), True
    norm = f"model.{family.names.get('norm', 'norm')}"
    if family.has_norm_weights and family.has_final_norm:
        yield f"{norm}.weight", (hidden,), True
    yield "lm_head.weight", (vocab, hidden), False
    yield "lm_head.bias", (vocab,), False
    if family.has_norm_bias and family.has_final_norm:
        yield f"{norm}.bias", (hidden,), True
    if family.has_embedding_norm and family.has_embedding_norm_weights:
        name = family.names.get("embed_norm", "embed_norm")
        for leaf in ("weight", "bias") if family.has_norm_bias else ("weight",):
            yield f"model.{name}.{leaf}", (hidden,), True
    if family.has_stream_gates:
        for name, shape in _gate_shapes(config, has_factors=False).items():
            yield f"model.hyper_connection_mixer.{name}", shape, True
    if family.has_residual_blocks:
        yield "model.output_attn_res_score.weight", (hidden,), True
    if family.has_states:
        yield "model.z_L_init", (hidden,), True
    if family.has_segments:
        yield "model.embed_segments.weight", (config["type_vocab_size"], hidden), False
    if family.has_hyper_connections and not config.get("has_mean_stream"):
        for kind, shape in _hyper_shapes(config, (config["hc_mult"],)).items():
            yield f"model.hc_head.hc_{kind}", shape, True
    if family.has_position_table:
        positions = config["max_position_embeddings"]
        yield "model.embed_positions.weight", (positions, hidden), True
    per_layer = config.get("hidden_size_per_layer_input", 0)
    if per_layer:
        width = config["num_hidden_layers"] * per_layer
        rows = config.get("vocab_size_per_layer_input", vocab)
        yield "model.embed_tokens_per_layer.weight", (rows, width), True
        yield "model.per_layer_model_projection.weight", (width, hidden), True
        yield "model.per_layer_projection_norm.weight", (per_layer,), True
    streams = config["altup_num_inputs"] if family.has_streams else 0
    for name in STACKS.values() if streams else ():
        for index in range(streams - 1):
            yield f"{name.format(index)}.weight", (hidden, hidden), True
    layer_types = config.get("layer_types") or family.layer_types(config)
    sources = cache_layers(config, layer_types) if config.get("num_kv_shared_layers") else []
    for layer in range(config["num_hidden_layers"]):
        start, own = f"model.layers.{layer}.", layer_config(config, layer)
        kind = layer_types[layer]
        if kind == NGRAMS:
            for name, shape in _ngram_shapes(config).items():
                yield start + name, shape, True
            continue
        matrices, vectors = _attention_shapes(architecture, own)
        vectors |= _norm_shapes(config, layer)
        if config.get("indexer_types", [])[layer : layer + 1] == ["full"]:
            more_matrices, more_vectors = _indexer_shapes(config)
            matrices, vectors = matrices | more_matrices, vectors | more_vectors
        if sources and sources[layer] is not None:
            matrices = {x: shape for x, shape in matrices.items() if x[-6:] not in _KEYS_VALUES}
            del vectors["self_attn.k_norm"]
        elif config.get("attention_k_eq_v") and kind == "full_attention":
            del matrices["self_attn.v_proj"]
        if per_layer:
            matrices["per_layer_input_gate"] = (per_layer, hidden)
            matrices["per_layer_projection"] = (hidden, per_layer)
        if streams:
            more_matrices, more_vectors = _stream_shapes(config)
            matrices, vectors = matrices | more_matrices, vectors | more_vectors
            yield f"{start}altup.correct_output_scale", (hidden,), True
        mlp = _mlp_shapes(architecture, own, layer)
        if has_recurrence(config, kind):
            for part, shape, required in recurrent_shapes(config, layer):
                yield start + part, shape, required
        if kind in (MLP, MOE) or (has_recurrence(config, kind) and kind != HYBRID):
            matrices = {}
            vectors = {name: size for name, size in vectors.items() if "self_attn" not in name}
        if family.has_single_sublayers and kind not in (MLP, MOE):
            mlp = {}
        if family.has_missing_sublayers and kind == MLP:
            del vectors["input_layernorm"]
        if not own.get("has_mlp", True):
            mlp = {}
            del vectors["post_attention_layernorm"]
        if family.has_hyper_connections:
            for part in ("attn", "ffn"):
                count = config["hc_mult"]
                is_mixed = config.get("hc_magnitude") is None
                sizes = (count, count, count * count) if is_mixed else (count, count)
                parts = _hyper_shapes(config, sizes)
                for leaf, shape in parts.items():
                    yield f"{start}{part}_hc.{leaf}", shape, True
        for part in ("attn", "mlp") if family.has_stream_gates else ():
            for name, shape in _gate_shapes(config).items():
                yield f"{start}{part}_hyper_connection.{name}", shape, True
        for part in ("self_attention", "mlp") if family.has_residual_blocks else ():
            yield f"{start}{part}_res_score.weight", (hidden,), True
        if config.get("latent_moe_use_norm") and is_expert_layer(config, layer):
            yield f"{start}mlp.routed_expert_norm.weight", (config["moe_latent_size"],), True
        if config.get("has_block_keys") and "self_attn.indexer.wk" in matrices:
            dim, size = config["index_head_dim"], config["index_block_size"]
            for leaf, shape in (("gate", (dim, hidden)), ("ape", (size, dim))):
                yield f"{start}self_attn.indexer.index_kpool_compress_{leaf}", shape, True
        if family.has_shared_key:
            for name, shape in _shared_key_shapes(config, layer).items():
                yield start + name, shape, True
            if own.get("has_token_experts"):
                shape = vocab, config["num_experts_per_tok"]
                yield f"{start}mlp.gate.tid2eid", shape, True
        for module, shape in {**matrices, **mlp}.items():
            name = f"{start}{family.names.get(module, module)}"
            yield f"{name}.weight", shape, True
            has_bias = config.get("qkv_bias", family.qkv_bias)
            required = has_bias and module[-6:] in ("q_proj", "k_proj", "v_proj")
            yield f"{name}.bias", shape[:1], required
        for module, size in vectors.items():
            name = f"{start}{family.names.get(module, module)}"
            yield f"{name}.weight", (size,), True
            if family.has_norm_bias:
                yield f"{name}.bias", (size,), True
        if family.has_sinks and own.get("has_sinks", True):
            yield f"{start}self_attn.sinks", (config["num_attention_heads"],), True
        has_selection_bias = family.moe is not None and family.moe.has_selection_bias
        has_selection_bias = has_selection_bias and own.get("use_expert_bias", True)
        if has_selection_bias and is_expert_layer(config, layer):
            yield f"{start}mlp.gate.e_score_correction_bias", (num_experts(config),), True


def _gate_shapes(config: Config, has_factors: bool = True) -> dict[str, Shape]:
    """The shapes of gates through which a sublayer reads streams."""
    count, rank = config["hc_count"], config["hc_lowrank"]
    width = count * config["hidden_size"]
    shapes: dict[str, Shape] = {
        "hc_norm.weight": (width,),
        "input_mix_weight_down.weight": (rank, width),
        "input_mix_weight_up.weight": (width, rank),
    }
    return shapes | ({"block_inject_weight.weight": (count, width)} if has_factors else {})


def _ngram_shapes(config: Config) -> dict[str, Shape]:
    """The shapes of embeddings of n-grams, but for their table."""
    hidden, inner = config["hidden_size"], config["ple_embed_dim"]
    width = config["hc_count"] * hidden
    return {
        "ple.key_proj.weight": (width, inner),
        "ple.value_proj.weight": (hidden, inner),
        **{f"ple.norm_{part}.weight": (width,) for part in ("key", "query", "conv")},
        "ple.conv1d.weight": (width, 1, config["ple_conv_kernel_size"]),
    }


def _stream_shapes(config: Config) -> tuple[dict[str, Shape], dict[str, int]]:
    """The shapes of the matrices and norms by which a layer predicts and corrects streams."""
    hidden, count, rank = (
        config[key] for key in ("hidden_size", "altup_num_inputs", "laurel_rank")
    )
    matrices: dict[str, Shape] = {
        "altup.modality_router": (count, hidden),
        "altup.prediction_coefs": (count * count, count),
        "altup.correction_coefs": (count, count),
        "laurel.linear_left": (rank, hidden),
        "laurel.linear_right": (hidden, rank),
    }
    return matrices, {"altup.router_norm": hidden, "laurel.post_laurel_norm": hidden}


def _norm_shapes(config: Config, layer: int) -> dict[str, int]:
    """The sizes of a layer's norms, but for those of its attention."""
    family, hidden = FAMILIES[config["model_type"]], config["hidden_size"]
    if not family.has_norm_weights or family.norms == "none":
        return {}
    is_shared = family.shares_norm and config.get("use_parallel_residual", True)
    names = [] if family.mlp == "none" or is_shared else ["post_attention_layernorm"]
    if family.norms not in ("post", "sum") and (family.has_first_norm or layer > 0):
        names.append("input_layernorm")
    if family.norms not in ("pre", "stream"):
        names.append("post_feedforward_layernorm")
    if family.norms == "both":
        names.append("pre_feedforward_layernorm")
    if family.moe is not None and family.moe.reads_inputs:
        names.append("residual_layernorm")
    if config.get("hidden_size_per_layer_input"):
        names.append("post_per_layer_input_norm")
    if family.moe is not None and family.moe.has_norms and is_expert_layer(config, layer):
        names += [f"post_feedforward_layernorm_{i}" for i in (1, 2)]
        names.append("pre_feedforward_layernorm_2")
    found = {name: hidden for name in names}
    if family.has_inner_norms:
        found["self_attn.inner_norm"] = config["num_attention_heads"] * config["head_dim"]
        found["mlp.inner_norm"] = config["intermediate_size"]
    return found


def _attention_shapes(architecture: str, config: Config) -> tuple[dict[str, Shape], dict[str, int]]:
    """The shapes of the matrices and of the norms of a layer's attention."""
    family = FAMILIES[config["model_type"]]
    if family.has_shared_key:
        return {}, {}
    if family.has_latent_attention:
        return _latent_shapes(config)
    hidden, head = config["hidden_size"], config["head_dim"]
    value = head if family.value_size is None else config[family.value_size]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    size = config["num_key_value_heads"] * value
    matrices: dict[str, Shape] = {
        "self_attn.o_proj": (hidden, config["num_attention_heads"] * value)
    }
    overrides, gate, fused = (
        OVERRIDES.get(architecture, {}),
        "self_attn.gate_proj",
        "self_attn.qkv_proj",
    )
    if overrides.get("attn_gate") == gate:
        gates_heads = config.get("gates_heads", family.gates_heads)
        rows = config["num_attention_heads"] if gates_heads else q
        matrices[gate] = (rows, hidden)
    elif family.attention_gate:
        q *= 2
    is_fused = family.recurrent is None or architecture == "plamo2"
    is_fused = is_fused and config.get("has_fused_qkv", True)
    if overrides.get("attn_qkv") == fused and is_fused:
        matrices[fused] = (q + kv + size, hidden)
    else:
        for part, rows in (("q", q), ("k", kv), ("v", size)):
            matrices[f"self_attn.{part}_proj"] = (rows, hidden)
    if family.qk_norm in (None, "plain") or not config.get("use_qk_norm", True):
        return matrices, {}
    if family.qk_norm == "heads":
        for part, rows in (("q", q), ("k", kv)):
            matrices[f"self_attn.{part}_norm"] = (rows // head, head)
        return matrices, {}
    full = family.qk_norm == "full"
    norms = {"self_attn.q_norm": q if full else head, "self_attn.k_norm": kv if full else head}
    return matrices, norms


def _indexer_shapes(config: Config) -> tuple[dict[str, Shape], dict[str, int]]:
    """The shapes of the matrices and of the norms of an indexer."""
    hidden, count, dim = (config[key] for key in ("hidden_size", "index_n_heads", "index_head_dim"))
    matrices: dict[str, Shape]
    if not FAMILIES[config["model_type"]].has_latent_attention:
        sizes = {"q": count * dim, "k": dim}
        matrices = {f"self_attn.indexer.{x}_proj": (n, hidden) for x, n in sizes.items()}
        return matrices, {f"self_attn.indexer.{x}_norm": dim for x in sizes}
    matrices = {
        "self_attn.indexer.wq_b": (count * dim, config["q_lora_rank"]),
        "self_attn.indexer.wk": (dim, hidden),
        "self_attn.indexer.weights_proj": (count, hidden),
    }
    return matrices, {"self_attn.indexer.k_norm": dim}


def _shared_key_shapes(config: Config, layer: int) -> dict[str, Shape]:
    """The shapes of attention whose heads share one key."""
    hidden, heads, head, rank, groups = (
        config[key]
        for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups")
    )
    width = groups * config["o_lora_rank"]
    shapes: dict[str, Shape] = {
        "self_attn.q_a_proj.weight": (rank, hidden),
        "self_attn.q_a_norm.weight": (rank,),
        "self_attn.q_b_proj.weight": (heads * head, rank),
        "self_attn.kv_proj.weight": (head, hidden),
        "self_attn.kv_norm.weight": (head,),
        "self_attn.o_a_proj.weight": (width, heads // groups * head),
        "self_attn.o_b_proj.weight": (hidden, width),
    }
    kind, dim = config["entry_kinds"][layer], config["index_head_dim"]
    if kind == SLIDING:
        return shapes
    name, size = "self_attn.compressor", config["compress_rates"][kind]
    shapes |= _entry_shapes(name, size, head, hidden, kind == SELECTED)
    if kind == SELECTED:
        count, name = config["index_n_heads"], f"{name}.indexer"
        shapes |= _entry_shapes(name, size, dim, hidden, has_overlap=True)
        shapes[f"{name}.q_b_proj.weight"] = count * dim, rank
        shapes[f"{name}.scorer.weights_proj.weight"] = count, hidden
    return shapes


def _entry_shapes(
    name: str, size: int, numbers: int, hidden: int, has_overlap: bool
) -> dict[str, Shape]:
    """The shapes of what makes entries of so many numbers."""
    width = (1 + has_overlap) * numbers
    return {
        f"{name}.kv_proj.weight": (width, hidden),
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.kv_norm.weight": (numbers,),
        f"{name}.position_bias": (size, width),
    }


def _hyper_shapes(config: Config, sizes: tuple[int, ...]) -> dict[str, Shape]:
    """The shapes of hyper-connections with parts of these sizes."""
    rows, width = sum(sizes), config["hc_mult"] * config["hidden_size"]
    return {"fn": (rows, width), "base": (rows,), "scale": (len(sizes),)}


def _latent_shapes(config: Config) -> tuple[dict[str, Shape], dict[str, int]]:
    """The same of latent attention."""
    hidden, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    key, rotary, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query, inner = heads * (key + rotary), config["q_lora_rank"]
    matrices: dict[str, Shape] = {
        "self_attn.kv_a_proj_with_mqa": (rank + rotary, hidden),
        "self_attn.o_proj": (hidden, heads * value),
    }
    norms = {"self_attn.kv_a_layernorm": rank}
    if inner is None:
        matrices["self_attn.q_proj"] = (query, hidden)
    else:
        matrices |= {
            "self_attn.q_a_proj": (inner, hidden),
            "self_attn.q_b_proj": (query, inner),
        }
        norms["self_attn.q_a_layernorm"] = inner
    family = FAMILIES[config["model_type"]]
    if family.attention_gate and config.get("use_attention_gate", True):
        name = "gate_proj" if config["model_type"] == "hy_v4" else "g_proj"
        matrices[f"self_attn.{name}"] = (heads * (1 if family.gates_heads else value), hidden)
    if config["has_stacked_heads"]:
        for head in range(heads):
            matrices[f"self_attn.k_b_proj.{head}"] = (rank, key)
            matrices[f"self_attn.v_b_proj.{head}"] = (value, rank)
    else:
        matrices["self_attn.kv_b_proj"] = (heads * (key + value), rank)
    return matrices, norms


def _mlp_shapes(architecture: str, config: Config, layer: int) -> dict[str, Shape]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    is_fused = OVERRIDES.get(architecture, {}).get("ffn_up") == "mlp.gate_up_proj"
    if is_fused or config.get("has_gate_up"):
        return {"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)}
    family = FAMILIES[config["model_type"]]
    if family.mlp == "none":
        return {}
    moe, is_plain = family.moe, family.mlp == "plain"
    dense = _dense_shapes("mlp", inner, hidden, is_plain)
    if moe is None or not is_expert_layer(config, layer):
        return dense
    experts, inner = num_experts(config), config[moe.inner_size]
    shapes: dict[str, Shape] = dense if moe.has_norms else {}
    shapes |= {OVERRIDES[architecture]["ffn_gate_inp"]: (experts, hidden)}
    latent = config.get("moe_latent_size")
    if latent is not None:
        shapes["mlp.fc1_latent_proj"] = (latent, hidden)
        shapes["mlp.fc2_latent_proj"] = (hidden, latent)
    size = latent or hidden
    for part, module in EXPERTS[architecture].items():
        count, rows = experts, inner
        if part.endswith(OF_GROUPS):
            count, rows = experts // config["experts_per_group"], config["group_expert_size"]
        shape = (size, rows) if part.startswith("ffn_down") else (rows, size)
        shapes |= {module.format(index): shape for index in range(count)}
    shared, name = shared_size(config, moe), f"mlp.{moe.shared_module}"
    name = "mlp" if moe.shared_module == "mlp" else name
    fused = f"{name}.gate_up_proj"
    if shared and OVERRIDES[architecture].get("ffn_up_shexp") == fused:
        shapes |= {fused: (2 * shared, hidden), f"{name}.down_proj": (hidden, shared)}
    elif shared:
        shapes |= _dense_shapes(name, shared, hidden, is_plain)
        if moe.has_shared_gate:
            shapes[f"{name}_gate"] = (1, hidden)
    return shapes


def _dense_shapes(name: str, inner: int, hidden: int, is_plain: bool) -> dict[str, Shape]:
    """The shapes of the matrices of an MLP."""
    up = (inner, hidden)
    gate = {} if is_plain else {f"{name}.gate_proj": up}
    return {**gate, f"{name}.up_proj": up, f"{name}.down_proj": (hidden, inner)}
