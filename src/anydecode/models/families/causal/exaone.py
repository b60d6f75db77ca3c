"""EXAONE 3, 3.5 and Deep (LG AI Research, 2024, arXiv:2412.04862): Llama, whose layout is converted
when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {"exaone": Family(("ExaoneForCausalLM",), all_full)}
