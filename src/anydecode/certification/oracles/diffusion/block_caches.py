"""The tokens that change when a block cache is not used."""

from __future__ import annotations

from typing import Any

from anydecode.certification.denoising import random_model, share_of_differences, texts
from anydecode.decoders.diffusion.denoiser import Denoiser


def cache_loss(key: str, uncached: Denoiser, samples: int, shift: int = 0) -> float:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 9}
    with random_model(block_size=4, shift=shift) as llm:
        cached = texts(llm, key, samples, **options)
        return share_of_differences(cached, texts(llm, uncached, samples, **options))
