"""GIDD (von Rütte et al., arXiv:2503.04482) and Duo (Sahoo et al., arXiv:2506.10892): transformers
whose layers depend on the time of the diffusion.

Their own layout is renamed when they are loaded, `models/loading/dit.py`.
"""

from __future__ import annotations

from functools import partial

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

_family = partial(diffusion_family, "starcoder2", has_norm_bias=False, names={})
_DUO = Denoising("Duo", time="noise", time_margin=1e-3, decoder="duo")

FAMILIES = {
    "dit": _family("DIT", denoising=Denoising("GIDD", time="time", decoder="gidd")),
    "duo": _family("DUO", denoising=_DUO),
}
