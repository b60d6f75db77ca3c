"""Learn2PD: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import LLM
from anydecode.certification.denoising import bidirectional, dense
from anydecode.decoders.diffusion import learn2pd
from anydecode.decoders.diffusion.learn2pd import Filter, PredictedEnd, model_facts
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.scripted import MASK
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("learn2pd")


def test_certificate_rejects_an_ignored_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_parameter(monkeypatch, "learn2pd", "threshold")
    assert_rejected("learn2pd")


def test_certificate_rejects_a_filter_that_reads_unmasked_positions_as_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Filter.__call__
    monkeypatch.setattr(
        Filter, "__call__", lambda self, given: call(self, np.where(given == 1.0, 0.0, given))
    )
    assert_rejected("learn2pd")


def test_certificate_rejects_a_canvas_that_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PredictedEnd, "truncated_length", lambda self, canvas, predictions: None)
    assert_rejected("learn2pd")


def test_certificate_rejects_a_canvas_cut_at_the_first_predicted_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        learn2pd, "max", lambda ends, key: min(ends, key=lambda i: i), raising=False
    )
    assert_rejected("learn2pd")


def test_a_filter_of_another_model_is_refused() -> None:
    with bidirectional(dense()) as llm, pytest.raises(InvalidRequestError, match="another model"):
        llm.generate([5, 6, 7], decoder="learn2pd", max_tokens=8)
    with LLM("tiny-diffusion", dtype="int8") as llm:  # the same model in another format
        assert llm.generate("sort Leo Ada:", decoder="learn2pd", max_tokens=16).text


def test_a_filter_of_other_blocks_is_refused(tmp_path: Path) -> None:
    with bidirectional(dense(), block_size=4) as llm:
        path = written(tmp_path, {"model": model_facts(llm.model, MASK)}, {})
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        assert llm.generate([5, 6], decoder=f"learn2pd:filter={path}", **options).tokens
        llm.model.spec = replace(llm.model.spec, block_size=8)
        with pytest.raises(InvalidRequestError, match="for blocks of 4 .* model's have 8"):
            llm.generate([5, 6], decoder=f"learn2pd:filter={path}", **options)


def test_a_filter_that_is_trained_again_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, {"model": FACTS}, {})
    first = learn2pd.load(path)
    assert learn2pd.load(path) is first
    changed = {**FACTS, "vocab_size": 10}
    written(tmp_path, {"model": changed}, {})
    os.utime(path, ns=(1, 1))
    assert first.model["vocab_size"] == 9 and learn2pd.load(path).model["vocab_size"] == 10


FACTS = {"num_layers": 2, "vocab_size": 9, "mask_embedding": [0.5] * 4}


@pytest.mark.parametrize(
    "shapes",
    [
        {"hidden.weight": (3,)},
        {"hidden.weight": ()},
        {"hidden.bias": (2,)},
        {"hidden.bias": (1,)},
        {"hidden.weight": (3, 0), "output.weight": (0, 3), "output.bias": (0,)},
    ],
)
def test_filters_whose_tensors_do_not_fit_together_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(CheckpointError, match="the tensors do not fit together"):
        learn2pd.load(written(tmp_path, {"model": FACTS}, shapes))


@pytest.mark.parametrize(
    "described",
    [
        "[" * 10_000,
        5,
        {"model": {**FACTS, "mask_embedding": [[1], [1, 2]]}},
        {"model": {**FACTS, "mask_embedding": "abc"}},
        {"model": {**FACTS, "mask_embedding": [10**400]}},
        {"model": {"num_layers": 2}},
    ],
    ids=["deep", "a number", "ragged", "a text", "too large", "missing"],
)
def test_filters_that_do_not_say_for_which_model_are_refused(
    tmp_path: Path, described: Any
) -> None:
    with pytest.raises(CheckpointError, match="does not say for which model it was trained"):
        learn2pd.load(written(tmp_path, described, {}))


def test_filters_with_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        learn2pd.load(written(tmp_path, {"model": FACTS}, {}, np.nan))


def written(
    folder: Path, described: Any, shapes: dict[str, tuple[int, ...]], value: float = 0.0
) -> Path:
    """The file of a filter, with other shapes for some tensors."""
    usual = {
        "hidden.weight": (3, 4), "hidden.bias": (3,), "output.weight": (4, 3), "output.bias": (4,),
    }  # fmt: skip
    tensors = {name: np.full(s, value, np.float32) for name, s in {**usual, **shapes}.items()}
    text = described if isinstance(described, str) else json.dumps(described)
    save_file(tensors, folder / "filter.safetensors", metadata={"learn2pd": text})
    return folder / "filter.safetensors"
