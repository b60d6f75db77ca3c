"""RemeDi (Huang et al., "Don't Settle Too Early: Self-Reflective Remasking for Diffusion Language
Models", arXiv:2509.23653): LLaDA's layers, and side layers that compute a second stream of hidden
states, from which each token has a confidence.

Its layout is converted when a model is loaded, `models/loading/llada.py`.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.patterns import FULL, SIDE
from anydecode.models.families.values import Config, num_layers

#: The layers that the side layers follow, as in its code; configs do not say them.
BEFORE_SIDE = (0, 10, 20, 30)
#: Where the side layers are among all layers.
SIDE_LAYERS = tuple(layer + index + 1 for index, layer in enumerate(BEFORE_SIDE))


def layer_types(config: Config) -> list[str]:
    """The type of each layer, from the number of layers."""
    return [SIDE if layer in SIDE_LAYERS else FULL for layer in range(num_layers(config))]


FAMILIES = {
    "remedi": diffusion_family(
        "llama",
        "RemeDiUPMModelLM",
        "RemeDiModelLM",
        model_types=("RemeDi",),
        layer_types=layer_types,
        denoising=Denoising(
            "RemeDi-Instruct, RemeDi-RL",
            context="prompt",
            block_size="block_size",
            default_block_size=32,
            mask_token=126336,
            decoder="remedi:cache=block",
        ),
        defaults={"rms_norm_eps": 1e-5},
    )
}
