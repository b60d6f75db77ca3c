"""Adapters that are loaded and removed while requests run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_files import save_adapter
from anydecode import LLM
from anydecode.certification.tiny import tiny_llm
from anydecode.errors import CheckpointError, InvalidRequestError

PROMPT = "the cat sat on the mat and "


@pytest.fixture
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm


def text(llm: LLM, **options: Any) -> str:
    return llm.generate(PROMPT, max_tokens=24, ignore_eos=True, seed=1, **options).text


def num_factors(llm: LLM) -> list[int]:
    return [len(adapter) for adapter in llm.model.network.adapters]


def test_names_are_unique_until_they_are_removed(llm: LLM, tmp_path: Path) -> None:
    first, second = save_adapter(tmp_path / "1", 1), save_adapter(tmp_path / "2", 2)
    plain = text(llm)
    llm.add_adapter("a", first)
    with pytest.raises(InvalidRequestError, match="already an adapter called 'a'"):
        llm.add_adapter("a", second)
    old = text(llm, adapter="a")
    llm.remove_adapter("a")
    assert llm.adapters == []
    with pytest.raises(InvalidRequestError, match="no adapter is called 'a'"):
        text(llm, adapter="a")
    with pytest.raises(InvalidRequestError, match="no adapter is called 'a'"):
        llm.remove_adapter("a")
    llm.add_adapter("a", second)
    new = text(llm, adapter="a")
    assert len({plain, old, new}) == 3
    with tiny_llm() as fresh:
        fresh.add_adapter("b", second)
        # Not with the cached prefix of the adapter that had the name before.
        assert new == text(fresh, adapter="b")
    assert text(llm) == plain


def test_a_removed_adapter_serves_the_requests_that_use_it(llm: LLM, tmp_path: Path) -> None:
    llm.add_adapter("a", save_adapter(tmp_path / "1", 1))
    llm.add_adapter("b", save_adapter(tmp_path / "2", 2))
    expected, other = text(llm, adapter="a"), text(llm, adapter="b")
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 1}
    stream = llm.stream(PROMPT, adapter="a", **options)
    parts = [next(stream).text]
    llm.remove_adapter("a")
    assert text(llm, adapter="b") == other
    assert all(num_factors(llm))  # in use
    parts += [chunk.text for chunk in stream]
    assert "".join(parts) == expected
    del stream
    gc.collect()
    first, second = num_factors(llm)
    assert first == 0 and second > 0
    assert text(llm, adapter="b") == other


def test_an_adapter_is_loaded_while_a_request_runs(llm: LLM, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "1", 1)
    expected = text(llm)
    stream = llm.stream(PROMPT, max_tokens=24, ignore_eos=True, seed=1)
    parts = [next(stream).text]
    llm.add_adapter("a", folder)
    adapted = text(llm, adapter="a")
    parts += [chunk.text for chunk in stream]
    assert "".join(parts) == expected != adapted
    with tiny_llm() as fresh:
        fresh.add_adapter("a", folder)
        assert text(fresh, adapter="a") == adapted


def test_a_failed_load_leaves_the_name_free(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter_config.json is missing"):
        llm.add_adapter("a", tmp_path)
    llm.add_adapter("a", save_adapter(tmp_path / "1", 1))
    assert llm.adapters == ["a"]
