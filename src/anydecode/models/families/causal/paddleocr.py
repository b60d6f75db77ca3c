"""The language model of PaddleOCR-VL (Cui et al., 2025, arXiv:2510.14528): ERNIE 4.5 whose rotary
pairs are those of Llama."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "paddleocr_vl_text": family_like(
        "ernie4_5",
        "PaddleOCRVLForConditionalGeneration",
        model_types=("paddleocr_vl",),
        interleaved_rope=False,
    )
}
