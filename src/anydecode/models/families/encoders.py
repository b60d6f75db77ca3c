"""Encoders, which represent texts and cannot generate them; their families are added to the
table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.causal.modernbert_decoder import MODERNBERT, MODERNBERT_DEFAULTS
from anydecode.models.families.embedding_gemma2 import EMBEDDING_GEMMA_2
from anydecode.models.families.family import Family, MixtureOfExperts, Scales
from anydecode.models.families.patterns import all_full, no_rope
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config, head_dim

#: Norms are on the sums of sublayers and their inputs.
_BERT: dict[str, Any] = {
    "causal": False,
    "is_encoder": True,
    "norm": "layer",
    "has_norm_bias": True,
    "norms": "sum",
    "has_embedding_norm": True,
    "has_final_norm": False,
}
#: Configs of encoders omit what equals the defaults of `transformers`.
_BERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "attention_bias": True,
    "mlp_bias": True,
}
_BERT_PLAIN: dict[str, Any] = {
    **_BERT,
    "mlp": "plain",
    "has_position_table": True,
    "rope_layers": no_rope,
}


def _heads(name: str) -> tuple[str, ...]:
    """The architectures of an encoder whose classes start with `name`."""
    return tuple(
        f"{name}{head}"
        for head in ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
    )


def _disentangled_scales(config: Config) -> Scales:
    """Scores are sums of three products."""
    return Scales(attention=(3 * head_dim(config)) ** -0.5)


FAMILIES |= {
    "bert": Family(
        _heads("Bert"), all_full, has_segments=True, defaults=_BERT_DEFAULTS, **_BERT_PLAIN
    ),
    # Clark et al., 2020, arXiv:2003.10555.
    "electra": Family(
        _heads("Electra"),
        all_full,
        has_segments=True,
        defaults={
            **_BERT_DEFAULTS,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        **_BERT_PLAIN,
    ),
    # Sun et al., 2021, arXiv:2107.02137.
    "ernie": Family(
        _heads("Ernie"), all_full, has_segments=True, defaults=_BERT_DEFAULTS, **_BERT_PLAIN
    ),
    "distilbert": Family(
        _heads("DistilBert"),
        all_full,
        defaults={**_BERT_DEFAULTS, "num_hidden_layers": 6},
        **_BERT_PLAIN,
    ),
    # Song et al., 2020, arXiv:2004.09297.
    "mpnet": Family(
        _heads("MPNet"),
        all_full,
        has_distance_biases=True,
        defaults={**_BERT_DEFAULTS, "vocab_size": 30527},
        **_BERT_PLAIN,
    ),
    # He et al., 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543.
    "deberta-v2": Family(
        _heads("DebertaV2"),
        all_full,
        has_segments=True,
        has_relative_positions=True,
        scales=_disentangled_scales,
        mlp="plain",
        rope_layers=no_rope,
        defaults={
            **_BERT_DEFAULTS,
            "vocab_size": 128_100,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
        },
        **_BERT,
    ),
    # Sturua et al., 2024, arXiv:2409.10173: RoBERTa with a rotary position embedding.
    "jina_embeddings_v3": Family(
        (*_heads("JinaEmbeddingsV3"), *_heads("XLMRoberta"), "XLMRobertaLoRA"),
        all_full,
        has_segments=True,
        mlp="plain",
        defaults={
            **_BERT_DEFAULTS,
            "vocab_size": 250_002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "rope_theta": 20_000.0,
        },
        **_BERT,
    ),
    "modernbert": Family(
        _heads("ModernBert"),
        causal=False,
        is_encoder=True,
        **MODERNBERT,
        defaults={**MODERNBERT_DEFAULTS, "layer_norm_eps": 1e-5},
    ),
    "nomic_bert": Family(
        ("NomicBertModel", "NomicBertForMaskedLM"),
        all_full,
        has_segments=True,
        defaults={
            **_BERT_DEFAULTS,
            "vocab_size": 30528,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rope_theta": 1000.0,
            "attention_bias": False,
            "mlp_bias": False,
        },
        **_BERT,
    ),
    # Nussbaum and Duderstadt, 2025, arXiv:2502.07972.
    "nomic_bert_moe": Family(
        ("NomicBertModel", "NomicBertForMaskedLM"),
        all_full,
        has_segments=True,
        mlp="plain",
        moe=MixtureOfExperts("intermediate_size", is_normalised=False),
        defaults={**_BERT_DEFAULTS, "vocab_size": 250_048, "max_position_embeddings": 2048},
        **_BERT,
    ),
    # Günther et al., 2023, arXiv:2310.19923: linear biases on both sides, and a gated MLP.
    "jina_bert_v2": Family(
        _heads("JinaBert"),
        all_full,
        has_segments=True,
        has_alibi=True,
        rope_layers=no_rope,
        defaults={**_BERT_DEFAULTS, "mlp_bias": False},
        **_BERT,
    ),
    # Its model of code (2024): norms of queries and keys, and one more of the attention's sum.
    "jina_bert_code": Family(
        _heads("JinaBert"),
        all_full,
        has_segments=True,
        has_alibi=True,
        rope_layers=no_rope,
        qk_norm="full",
        has_second_sum=True,
        defaults={**_BERT_DEFAULTS, "mlp_bias": False},
        **_BERT,
    ),
    # Zhang et al., 2024, arXiv:2407.19669.
    "gte": Family(
        (*_heads("Gte"), *_heads("New")),
        all_full,
        has_segments=True,
        defaults={
            **_BERT_DEFAULTS,
            "vocab_size": 250_048,
            "type_vocab_size": 1,
            "max_position_embeddings": 8192,
            "rope_theta": 160_000.0,
            "mlp_bias": False,
        },
        **_BERT,
    ),
    # Boizard et al., 2025, arXiv:2503.05500: Llama whose rows attend to both sides.
    "eurobert": Family(
        _heads("EuroBert"),
        all_full,
        causal=False,
        is_encoder=True,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    ),
}
FAMILIES["embedding_gemma2_text"] = EMBEDDING_GEMMA_2
#: llama-embed-nemotron (Babakhin et al., 2025, arXiv:2511.07025), in the layout of Llama.
FAMILIES["llama_bidirec"] = replace(
    FAMILIES["eurobert"],
    architectures=("LlamaBidirectionalModel", "LlamaBidirectionalForCausalLM"),
)
FAMILIES |= {
    model_type: Family(
        _heads(name),
        all_full,
        has_segments=True,
        defaults={
            **_BERT_DEFAULTS,
            "vocab_size": size,
            "max_position_embeddings": 510,
            "layer_norm_eps": eps,
        },
        **_BERT_PLAIN,
    )
    for model_type, name, size, eps in (
        ("roberta", "Roberta", 50265, 1e-12),
        ("xlm-roberta", "XLMRoberta", 30522, 1e-12),
        ("camembert", "Camembert", 30522, 1e-12),
    )
}
