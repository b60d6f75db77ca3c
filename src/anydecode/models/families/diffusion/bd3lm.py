"""MDLM (Sahoo et al., "Simple and Effective Masked Diffusion Language Models", arXiv:2406.07524)
and BD3-LM (Arriola et al., "Block Diffusion", arXiv:2503.09573).

Their own layout is converted when they are loaded, `models/loading/bd3lm.py`.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "bd3lm": diffusion_family(
        "llama", "BD3LM", denoising=Denoising("BD3-LM", context="blocks", block_size="block_size")
    ),
    "mdlm": diffusion_family("llama", "MDLM", "BD3LM", denoising=Denoising("MDLM")),
}
