"""A model family outside the package: Llama with a norm on the queries and keys of each head.

With the entry point in pyproject.toml, a folder whose config.json has the model type
"normed_llama" opens like any other:

    anydecode generate --model ./my-normed-llama --prompt "Once upon a time"
"""

from __future__ import annotations

from anydecode import Family
from anydecode.models.families.values import Config


def full_attention(config: Config) -> list[str]:
    """Full attention in every layer; the other type is "sliding_attention"."""
    return ["full_attention"] * config["num_hidden_layers"]


NORMED_LLAMA = Family(
    architectures=("NormedLlamaForCausalLM",),
    layer_types=full_attention,
    qk_norm="head",
    defaults={"rope_theta": 50_000.0},
)
