"""InternLM2 and 2.5 (Cai et al., 2024, arXiv:2403.17297): Llama, whose layout is converted when it
is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {"internlm2": Family(("InternLM2ForCausalLM",), all_full)}
