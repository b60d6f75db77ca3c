"""LFM2.5-350M-diffusion-exp (Liquid AI, 2026): the layers of LFM2, which depend on the time of the
diffusion; blocks of random tokens behind a causal context.

Masked models of the same model type are refused: their configs lack `sigma_cond_dim`.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.patterns import lfm2_sizes
from anydecode.models.families.table import FAMILIES as CAUSAL
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import ConfigError, refusal


def _sizes(config: Config) -> dict[str, Any]:
    """The sizes of LFM2's layers; refuse models that were trained in another way."""
    if config.get("timestep_cond_dim") is None:
        raise ConfigError("the config lacks 'sigma_cond_dim'")
    for key in ("adaln_conditioning", "self_conditioning"):
        if not bool_value(config, key, True):
            raise refusal(key, False, "true")
    return lfm2_sizes(config)


FAMILIES = {
    "lfm2_diffusion": diffusion_family(
        "lfm2",
        "Lfm2ForBlockDiffusion",
        derived=_sizes,
        keys={**CAUSAL["lfm2"].keys, "sigma_cond_dim": ("timestep_cond_dim",)},
        denoising=Denoising(
            "LFM2.5-350M-diffusion",
            context="causal",
            block_size="diffusion_block_size",
            default_block_size=32,
            has_canvas=True,
            time="noise",
            time_margin=1e-3,
            time_modulates_inputs=True,
            mask_token=64400,
            num_noise_tokens=64400,
            # The preset "nfe8" of its sampler: 8 steps, then one that reads out the text.
            decoder="duo:cache=block,steps=9,rho=0.3,read_out=true,read_out_sigma=0.7,"
            "first_temperature=0.8,last_temperature=0.4",
        ),
    )
}
