"""XGLM (Lin et al., 2022, arXiv:2112.10668) and BioGPT (Luo et al., 2022, arXiv:2210.10341), whose
layouts are converted when they are loaded."""

from __future__ import annotations

import math

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.patterns import all_full, no_rope
from anydecode.models.families.values import Config, bool_value, int_value


def _scaled(config: Config) -> Scales:
    """Embeddings are multiplied by the root of the hidden size."""
    if not bool_value(config, "scale_embedding", True):
        return Scales()
    return Scales(embedding=math.sqrt(int_value(config, "hidden_size")))


FAMILIES = {
    model_type: Family(
        (architecture,),
        all_full,
        rope_layers=no_rope,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        has_position_table=True,
        scales=_scaled,
        defaults={"attention_bias": True, "mlp_bias": True},
    )
    for model_type, architecture in (("xglm", "XGLMForCausalLM"), ("biogpt", "BioGptForCausalLM"))
}
