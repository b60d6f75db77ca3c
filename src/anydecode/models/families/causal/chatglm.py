"""ChatGLM 2 and 3 (GLM team, 2024, arXiv:2406.12793) and GLM-4-9B as first published, whose layout
is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "chatglm": family_like(
        "glm4",
        *("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM"),
        norms="pre",
        names={},
    )
}
