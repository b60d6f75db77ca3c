"""The language model of GLM-OCR (Z.ai, 2026): GLM-4 without biases."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "glm_ocr_text": family_like(
        "glm4", "GlmOcrForConditionalGeneration", defaults={"rms_norm_eps": 1e-5}
    )
}
