"""The reward that compares embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import Similarity, catalogue
from anydecode.certification.checks import scripted_llm
from toy_models import letters_llm


def cosine(one: list[float], other: list[float]) -> float:
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("reference", ["bad cab", None])
def test_the_text_nearest_to_the_reference_is_kept(reference: str | None) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "n": 6}
    with letters_llm() as llm, scripted_llm() as encoder:
        decoder = catalogue.build("best-of-n", n=6, reward=Similarity(encoder, reference))
        ranked = llm.generate("ab", decoder=decoder, **options).samples
        plain = llm.generate("ab", decoder="autoregressive", **options).samples
        target = encoder.embed(reference or "ab")
        values = {one.text: cosine(encoder.embed(one.text), target) for one in plain}
    assert [one.text for one in ranked] == sorted(values, key=lambda text: -values[text])
    assert [one.score for one in ranked] == pytest.approx(sorted(values.values())[::-1], abs=1e-5)


def test_the_model_that_generates_may_compute_the_embeddings() -> None:
    with letters_llm() as llm:
        decoder = catalogue.build("best-of-n", n=3, reward=Similarity(llm, "abc"))
        answers = llm.generate(["ab", "ba"], decoder=decoder, temperature=1.0, seed=4, max_tokens=6)
    assert all(one.score is not None and -1 <= one.score <= 1 for one in answers)
