"""Qwen (Bai et al., 2023, arXiv:2309.16609), whose layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "qwen": Family(("QWenLMHeadModel",), all_full, qkv_bias=True, context_limit="seq_length")
}
