"""The drafter that comes with the package: found for its model alone, used by `auto` unasked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.decoders.speculative.draft_sources import DraftRecord, ModelSource
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import open_model
from anydecode.models.self_drafts import open_shipped_draft
from anydecode.models.shipped_drafters import norms_digest, shipped_drafter

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the native kernels")

QUESTIONS = ["Why is the sky blue?", "Write a short story about a lighthouse keeper."]


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, cache_positions=4096) as llm:
        yield llm


def chat(llm: LLM, question: str) -> list[int]:
    text = llm.tokenizer.render_chat([{"role": "user", "content": question}])
    return llm.tokenizer.encode(text, special=False)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_auto_drafts_with_it_and_the_text_is_that_of_plain_decoding(
    llm: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With costs that do not depend on the clock."""
    record = DraftRecord(3.0, 1.5, 6e-4, 2e-4)
    monkeypatch.setattr(ModelSource, "expected", lambda self, seconds: replace(record))
    llm.cost_model = FixedCosts(lambda rows, _: 3e-3 * (1 + 0.1 * rows))
    options: dict[str, Any] = {"max_tokens": 160, "temperature": temperature, "seed": 2}
    num_drafts = num_accepted = 0
    for question in QUESTIONS:
        prompt = chat(llm, question)
        plain = llm.generate(prompt, decoder="autoregressive", **options)
        answer = llm.generate(prompt, decoder="auto", trace=True, **options)
        assert answer.tokens == plain.tokens
        for step in answer.trace or ():
            if "model" in (step["sources"] or ()):
                num_drafts += 1
                num_accepted += bool(step["accepted"])
    assert num_drafts > 20
    assert num_accepted > 0.3 * num_drafts  # of first tokens; a random one is right in 1 of 49152


def test_it_is_opened_for_its_model_alone(llm: LLM, default_model_path: Path) -> None:
    assert "draft" in llm.engine.runners
    answer = llm.generate("a", decoder="auto", max_tokens=1)
    assert answer.draft_models == ["smollm2-135m-instruct (shipped)"]
    assert llm.generate("a", decoder="prompt-lookup", max_tokens=1).draft_models == []
    with LLM(default_model_path, draft="none", cache_positions=64) as without:
        assert "draft" not in without.engine.runners
    with LLM(default_model_path, draft="self:int8", cache_positions=64) as other:
        assert other.engine.runners["draft"].model.spec.states is None  # type: ignore[attr-defined]
        name = other.model.name
        assert other.generate("a", max_tokens=1).to_dict()["draft_models"] == [f"{name} (int8)"]
    assert open_shipped_draft(open_model("tiny-autoregressive")[0]) is None
    assert open_shipped_draft(open_model("smollm2-135m-blocks")[0]) is None


def test_it_is_found_by_norms_whatever_the_format(default_model_path: Path) -> None:
    checkpoint = load_checkpoint(default_model_path)
    for dtype in (None, "int8", "float32"):
        network = load_network(checkpoint, dtype)
        assert shipped_drafter(network) is not None
    layers = network.weights.layers
    norm = layers[3].mlp_norm
    assert norm is not None
    layers[3] = replace(layers[3], mlp_norm=np.nextafter(norm, np.float32(9)))
    assert shipped_drafter(network) is None
    layers[3] = replace(layers[3], mlp_norm=norm)
    assert norms_digest(network) == norms_digest(load_network(checkpoint))
