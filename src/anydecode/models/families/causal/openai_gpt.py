"""GPT (Radford et al., 2018), whose layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {"openai-gpt": family_like("gpt2", "OpenAIGPTLMHeadModel")}
