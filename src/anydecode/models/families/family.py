"""The properties in which model families differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anydecode.models.families.recurrent import RecurrentLayout
from anydecode.models.families.values import Config


@dataclass(frozen=True)
class MixtureOfExperts:
    """The properties of a family's mixture of experts.

    Attributes:
        inner_size: The config's key for the inner size of an expert.
        is_normalised: The default of `norm_topk_prob`, see `Routing.normalise`.
        has_biases: Whether the router and the experts have biases.
        is_interleaved: Whether stacked matrices are `[experts, in, out]`, with the columns of gate
            and up alternating (gpt-oss).
        is_transposed: Whether stacked matrices are `[experts, in, out]`, with the columns of gate
            before those of up (Llama 4), and not `[experts, out, in]`. None: the shape of the last
            stack says which (Qwen3-VL).
        scoring: See `Routing.scoring`; or several, of which the key `scoring_func` names one. The
            first is the default.
        has_selection_bias: See `ExpertWeights.selection_bias`; its tensor is `expert_bias` of the
            block or of the router, or `e_score_correction_bias`. None: if there is such a tensor.
        has_output_norm: See `LayerSpec.has_output_norm`.
        shared_module: The module of the MLP that every token runs through, if there is one; in the
            block of the experts, or beside it.
        shared_size: The config's key for its inner size; None for `n_shared_experts` times that of
            an expert.
        has_shared_gate: Whether its output is multiplied by a sigmoid of the token.
        has_norms: Whether the experts run beside the layer's MLP, with their own norms (Gemma 4).
        scales_inputs: See `Routing.scales_inputs`.
        by_logits: See `Routing.by_logits`.
        routes_inputs: See `LayerSpec.routes_inputs`.
        reads_inputs: See `LayerSpec.experts_read_inputs`.
        has_router_states: Whether routers are small networks and read the states of those before
            them (`RouterStates`); the config's `router_hidden_size` has their numbers.
        group_size: The config's key for the number of experts of a group with a further expert, see
            `LayerSpec.adjugate`. Its inner size is `group_expert_size`, and `group_scale` the
            factor of its weight. None: there are none.
        is_per_block: Whether the rows of a block choose from `expert_capacity` experts, see
            `Routing.block_experts`.
        is_blocks: Whether the experts are the blocks of a plain MLP (BlockFFN).
        norms_outputs: Whether the output of each expert is normed, see `Routing.output_eps`, with
            the epsilon of sublayers' outputs, and the experts' inputs of `moe_latent_size` numbers
            too.
        identity_experts: The config's key for the number of further experts that return their
            input; None: there are none.
        methods: The values of `topk_method` that its configs may have: "noaux_tc" (groups with the
            largest sums of two scores), "group_limited_greedy" (groups with the largest scores) and
            "greedy" (no groups). The first is the default.
    """

    inner_size: str = "moe_intermediate_size"
    is_normalised: bool = True
    has_biases: bool = False
    is_interleaved: bool = False
    is_transposed: bool | None = False
    scoring: str | tuple[str, ...] = "softmax"
    has_selection_bias: bool | None = False
    has_output_norm: bool = False
    shared_module: str | None = None
    shared_size: str | None = None
    has_shared_gate: bool = False
    has_norms: bool = False
    scales_inputs: bool = False
    by_logits: bool = False
    routes_inputs: bool = False
    reads_inputs: bool = False
    group_size: str | None = None
    has_router_states: bool = False
    is_per_block: bool = False
    is_blocks: bool = False
    norms_outputs: bool = False
    identity_experts: str | None = None
    methods: tuple[str, ...] = ("noaux_tc",)


class Scales(NamedTuple):
    """Constant factors of a model. `attention` is None for the usual 1 / sqrt(head size)."""

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Denoising:
    """How the diffusion models of a family fill masks.

    Attributes:
        models: The names of the models, for the documentation.
        context: What a row sees: "canvas", all of the text and of the canvas; "blocks", its own
            block and the blocks before it, counted from position 0; "causal", its own block and
            what is before it, where rows of the prompt and of finished blocks see what is before
            them only, and blocks are counted from the end of the prompt; "order", what is before
            it in an order that the decoder chooses (WeDLM); "prompt", its own block and the blocks
            before it, where the prompt is one block and the others are counted from its end.
        context_predicts_next: See `ModelSpec.context_predicts_next`.
        shift: 1 if row r predicts position r + 1, 0 if it predicts r; `right_shift_logits` in a
            config says otherwise.
        block_size: The config's key for the block size; None for models without blocks.
        default_block_size: The block size of the published models, if their configs lack the key.
        needs_block_size: Whether a model without a block size cannot be opened. Otherwise its rows
            see the whole canvas.
        has_canvas: See `ModelSpec.has_canvas`.
        time: What the layers' embedding of times receives: the "time", or the "noise"
            (`TimeSpec.reads_noise`); None: layers do not depend on the time.
        time_margin: `TimeSpec.margin` of the published models, if their configs lack `t_eps`.
        time_modulates_inputs: See `TimeSpec.modulates_inputs`.
        mask_token: The mask token of the published models, if neither their tokenizers nor their
            configs name it.
        num_noise_tokens: See `ModelSpec.num_noise_tokens`: that of the published models.
        decoder: The decoder with the parameters that the models were published with; None: the one
            that fits what a row sees and predicts.
        decoder_options: Returns the parameters of `decoder` that a config sets, where they differ
            from those that it was published with.
        edit_tokens: See `ModelSpec.edit_tokens`: the config's keys for them, and those of the
            published models; None: it has none.
        expand_token: See `ModelSpec.expand_token`: the config's key for it; None: it has none.
    """

    models: str
    context: str = "canvas"
    context_predicts_next: bool = False
    shift: int = 0
    block_size: str | None = None
    default_block_size: int | None = None
    needs_block_size: bool = False
    has_canvas: bool = False
    time: str | None = None
    time_margin: float = 1e-4
    time_modulates_inputs: bool = False
    mask_token: int | None = None
    num_noise_tokens: int | None = None
    decoder: str | None = None
    decoder_options: Callable[[Config], dict[str, int | float]] | None = None
    edit_tokens: tuple[tuple[str, int], tuple[str, int]] | None = None
    expand_token: str | None = None


@dataclass(frozen=True)
class Family:
    """The properties of a model family.

    Attributes:
        architectures: Allowed values of `architectures` in its configs.
        layer_types: Returns the attention type of each layer of a config.
        norms: See `LayerSpec.norms`. If the key `do_layer_norm_before` is false (OPT-350M), they
            are those of sums, and there is no final norm.
        qk_norm: See `LayerSpec.qk_norm`.
        norm_offset: Added to stored norm weights.
        has_final_offset: Whether that includes the weights of the final norm.
        has_scaled_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        has_attention_softcap: Whether `attn_logit_softcapping` applies.
        qkv_bias: Whether q, k and v have biases even without `attention_bias`.
        defaults: Values of keys that its configs may leave out.
        causal: Whether rows attend to earlier positions only.
        denoising: How diffusion models of the family fill masks; None for other models.
        model_types: Values of `model_type` in its configs, beside the family's key.
        is_own: Returns whether a config is one of this family, where another family has the same
            model type or architecture; None: if it is not one of another.
        keys: Config keys of the family, and the keys that they stand for.
        names: The usual names of a layer's modules, and the names in the family's checkpoints.
        stored_name: Returns the name in the family's checkpoints of a tensor or module, without the
            prefix of all names, from the config and the usual name; None: it is the usual one.
        output_bias: Whether `attention_bias` includes the attention's output.
        has_partial_rotary: Whether `partial_rotary_factor` applies.
        interleaved_rope: See `LayerSpec.interleaved_rope`.
        norm_after_rope: See `LayerSpec.norm_after_rope`.
        has_reversed_rope: Whether the rotary embedding rotates the other way round.
        rope_layers: Returns whether each layer has a rotary position embedding, from the config and
            the attention type of each layer; None: all have.
        norm: See `ModelSpec.norm`.
        has_norm_bias: Whether norms have biases.
        has_norm_weights: Whether norms have weights.
        mlp: See `LayerSpec.mlp`.
        is_parallel: See `LayerSpec.is_parallel`; the key `use_parallel_residual` may turn it off.
        shares_norm: Whether MLP and attention of a parallel layer read the same norm.
        has_position_table: See `ModelSpec.has_position_table`.
        scales: Returns the factors of embeddings, scores, sublayers and logits; None: the usual
            ones.
        moe: Its mixture of experts, if it has one.
        has_sinks: See `LayerSpec.has_sinks`; a layer's own key `has_sinks` may turn it off.
        has_clamped_swiglu: Whether the activation is a `ClampedSwiglu`.
        other_names: Names of modules that a checkpoint may have in place of those above.
        recurrent_norms: Where the norms of layers with a recurrence are, see `LayerSpec.norms`;
            None: as in the other layers.
        recurrent: Its recurrent sublayers, if it has some: those of the layers whose type is one of
            `RECURRENT_TYPES`.
        attention_gate: See `LayerSpec.attention_gate`; the key `use_attention_gate` may turn it
            off. The query matrix has the rows of both, head by head, if `self_attn.gate_proj` is no
            module of its own.
        gates_heads: See `LayerSpec.gates_heads`; so may the key `gates_heads`.
        has_inner_norms: Whether both norms inside the sublayers exist, see
            `LayerSpec.has_attention_inner_norm` and `has_mlp_inner_norm`.
        multipliers: Whether the config has factors of the attention's and the MLP's products
            (Falcon-H1).
        has_single_sublayers: Whether each layer is attention, a recurrence or an MLP alone
            (Nemotron-H).
        has_missing_sublayers: Whether layers of type "mlp" have no attention, and those whose own
            key `has_mlp` is false no MLP (Nemotron-NAS).
        derived: Returns keys that replace those of a config.
        is_encoder: See `ModelSpec.is_encoder`.
        has_embedding_norm: See `ModelSpec.has_embedding_norm`.
        has_embedding_norm_weights: Whether that norm has weights, where the others have.
        has_final_norm: See `ModelSpec.has_final_norm`.
        has_head_transform: Whether there is a matrix in front of the head's, see
            `ModelSpec.head_activation`, which is the config's `classifier_activation`.
        has_segments: Whether token types have embeddings.
        num_unused_embeddings: The rows of the embedding after those of the vocabulary.
        norm_gate: The config's key for the inner size of the gates of norms, see
            `LayerSpec.attention_norm_gate`: those of the inputs of every attention and of experts;
            None: there are none.
        has_raw_queries: See `LowRankQuery.has_raw`.
        has_second_sum: See `LayerSpec.has_second_sum`.
        has_first_norm: Whether the input of the first layer's attention is normed.
        has_latent_attention: Whether attention is multi-head latent attention, see `LatentSpec`.
        has_scaled_ranks: Whether queries and latents of latent attention are multiplied by
            sqrt(hidden size / their rank) (LongCat-Flash). The key `apply_mla_qkv_lora_rescale` may
            turn it off.
        has_rotary_norm: See `LatentSpec.has_rotary_norm`. The norms of latents and of low-rank
            queries have the epsilon of the config then.
        has_shortcuts: Whether the output of the experts of every second layer is added to that of
            the next layer, see `LayerSpec.memory`. The MLP beside them is that of the layer.
        value_size: The config's key for the numbers of one head's value, where these differ from
            those of its key; None: they are as many.
        has_indexer: Whether an indexer selects the positions that a row attends to, see
            `IndexerSpec`: with latent attention one whose heads have weights (DeepSeek-V3.2), else
            one without (MiniMax-M3). The config's `indexer_types` has "full" for each layer with
            one, and "none" for layers of the latter kind that attend to all positions.
        context_limit: The config's key for the longest context, where attention to longer ones is
            not supported; None, or a config without it: there is no such limit.
        has_shared_key: Whether the heads of attention share one key, see `SharedKeySpec`. The
            config's `entry_kinds` has the kind of each layer.
        has_hyper_connections: Whether sublayers have hyper-connections, see `models/hyper.py`.
        has_residual_blocks: Whether sublayers read sums over blocks of layers, see
            `models/block_residuals.py`.
        has_stream_gates: Whether sublayers read streams through gates, see
            `models/gated_streams.py`.
        has_limited_swiglu: Whether the activation is a `LimitedSwiglu`.
        has_limited_experts: Whether that of routed experts alone is one, if `swiglu_limit` is above
            0.
        query_rank: The config's key for the inner size of low-rank queries, see `LowRankQuery`;
            None for one matrix of queries. Latent attention has a key of its own.
        has_value_norm: See `LayerSpec.has_value_norm`.
        has_layer_scale: See `LayerSpec.has_scale`.
        has_per_layer_table: Whether embeddings per layer have a table (Gemma 4), and are not
            projections of the usual embeddings alone (EmbeddingGemma 2).
        has_alibi: Whether attention has linear biases, see `Attention.slopes`, unless the key
            `alibi` is false. The key `alibi_bias_max` has the exponent of the smallest slope.
        has_streams: Whether hidden states have several streams, see `models/streams.py`.
        has_states: Whether stacks of layers with a state each run in turn, on the sum of the states
            (HRM-Text). The config's `state_kinds` has `LayerSpec.memory` of the first layer of each
            run, which is of `loop_size` layers.
        has_shared_blocks: Whether attention and MLP of layers with both are one of a few blocks
            that layers share and that read the embeddings too, and other layers have no MLP, see
            `LayerSpec.memory` and `shared_blocks.py`.
        has_qkv_limit: Whether `clip_qkv` applies, see `LayerSpec.qkv_limit`.
        is_differential: See `LayerSpec.is_differential`. The config's heads are the usual ones.
        has_distant_pairs: See `LayerSpec.has_distant_pairs`.
        has_distance_biases: Whether scores have learned biases by distance, see
            `LayerSpec.bias_reach`.
        has_relative_positions: See `LayerSpec.has_relative_positions`.
        has_attention_experts: Whether queries and outputs of attention are those of experts, see
            `LayerSpec.query_routing`.
        has_key_bias: See `LayerSpec.has_key_bias`.
        is_convolved: See `LayerSpec.is_convolved`.
        has_sum_biases: Whether the inputs and outputs of sublayers, and the embeddings, have biases
            and factors (ZAYA1).
        residual_factors: The names of the factors of both sublayers' inputs in their sums, see
            `LayerSpec.has_residual_gates`; None: there are none, or those of Muse Spark.
        experts_key: The config's key that says whether there are experts, in a family that does not
            support them; None: their number says so.
        has_query_scale: See `LayerSpec.has_query_scale`; its indexers have queries of their own.
        has_learned_rope: Whether a tensor of the checkpoint has the logarithms of factors of the
            rotary frequencies.
        has_residual_gates: See `LayerSpec.has_residual_gates`. The norm behind attention has no
            weights, and those of the norm behind the MLP multiply its input.
        has_head_norm: See `LayerSpec.has_head_norm`.
        has_query_growth: Whether `llama_4_scaling_beta` of the rope parameters applies, see
            `LayerSpec.query_rope`.
    """

    architectures: tuple[str, ...]
    layer_types: Callable[[Config], list[str]]
    norms: str = "pre"
    qk_norm: str | None = None
    norm_offset: float = 0.0
    has_final_offset: bool = True
    has_scaled_embedding: bool = False
    has_attention_softcap: bool = False
    qkv_bias: bool = False
    defaults: Config = field(default_factory=dict)
    causal: bool = True
    denoising: Denoising | None = None
    model_types: tuple[str, ...] = ()
    is_own: Callable[[Config], bool] | None = None
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    stored_name: Callable[[Config, str], str] | None = None
    output_bias: bool = True
    has_partial_rotary: bool = False
    interleaved_rope: bool = False
    norm_after_rope: bool = False
    has_reversed_rope: bool = False
    rope_layers: Callable[[Config, list[str]], list[bool]] | None = None
    scales: Callable[[Config], Scales] | None = None
    norm: str = "rms"
    has_norm_bias: bool = False
    has_norm_weights: bool = True
    mlp: str = "gated"
    is_parallel: bool = False
    shares_norm: bool = False
    has_position_table: bool = False
    moe: MixtureOfExperts | None = None
    has_sinks: bool = False
    has_clamped_swiglu: bool = False
    other_names: Mapping[str, str] = field(default_factory=dict)
    recurrent_norms: str | None = None
    recurrent: RecurrentLayout | None = None
    attention_gate: str | None = None
    gates_heads: bool = False
    has_inner_norms: bool = False
    multipliers: bool = False
    has_single_sublayers: bool = False
    has_missing_sublayers: bool = False
    derived: Callable[[Config], dict[str, Any]] | None = None
    is_encoder: bool = False
    has_embedding_norm: bool = False
    has_embedding_norm_weights: bool = True
    has_final_norm: bool = True
    has_head_transform: bool = False
    norm_gate: str | None = None
    has_raw_queries: bool = False
    has_second_sum: bool = False
    has_first_norm: bool = True
    has_segments: bool = False
    num_unused_embeddings: int = 0
    has_latent_attention: bool = False
    has_scaled_ranks: bool = False
    has_rotary_norm: bool = False
    has_shortcuts: bool = False
    value_size: str | None = None
    has_indexer: bool = False
    context_limit: str | None = None
    has_shared_key: bool = False
    has_hyper_connections: bool = False
    has_residual_blocks: bool = False
    has_stream_gates: bool = False
    has_limited_swiglu: bool = False
    has_limited_experts: bool = False
    query_rank: str | None = None
    has_value_norm: bool = False
    has_layer_scale: bool = False
    has_per_layer_table: bool = True
    has_alibi: bool = False
    has_streams: bool = False
    has_states: bool = False
    has_shared_blocks: bool = False
    has_qkv_limit: bool = False
    is_differential: bool = False
    has_distant_pairs: bool = False
    has_query_growth: bool = False
    has_attention_experts: bool = False
    has_key_bias: bool = False
    is_convolved: bool = False
    has_sum_biases: bool = False
    residual_factors: tuple[str, str] | None = None
    experts_key: str | None = None
    has_query_scale: bool = False
    has_learned_rope: bool = False
    has_residual_gates: bool = False
    has_head_norm: bool = False
    has_distance_biases: bool = False
    has_relative_positions: bool = False
