"""Monitored names: their certificate, mistakes that the certificate rejects, and their options."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.constraints.monitors import unknown_names
from anydecode.constraints import monitors
from anydecode.constraints.monitors import Monitor
from anydecode.errors import InvalidRequestError, MissingPackageError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("monitors")


def test_certificate_rejects_free_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        monitors._TokenSets, "name_tokens", lambda self, suffixes: self.free_tokens.copy()
    )
    assert_rejected("monitors")


def test_certificate_rejects_names_that_may_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "_ends_name", lambda data: False)
    assert_rejected("monitors")


def test_names_exist_only_with_a_monitor() -> None:
    pytest.importorskip("jedi")
    assert unknown_names(6, watched=True) == 0
    assert unknown_names(6, watched=False) > 0.5


def letters_llm() -> LLM:
    """A model that generates bytes up to "z", all with the same probability."""
    model = ScriptedModel(lambda seen: np.where(np.arange(259) < 123, 0.0, -1e9))
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=512)


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup", "auto"])
def test_a_name_started_in_the_prompt_is_completed(decoder: str) -> None:
    monitor = Monitor(completions=lambda text: {"alpha"} if text == "x = c." else ())
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 1}
    with letters_llm() as llm:
        found = llm.generate("x = c.al", constraint=monitor, decoder=decoder, **options)
    assert found.text.startswith("pha")


def test_two_constraints_and_other_decoders_as_constraints_are_refused() -> None:
    with letters_llm() as llm:
        with pytest.raises(InvalidRequestError, match="constraint"):
            llm.generate("x", decoder="monitors", constraint=Regex("a"))
        with pytest.raises(InvalidRequestError):
            llm.generate("x", constraint="asap")


def test_jedi_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jedi", None)
    with pytest.raises(MissingPackageError, match=r"anydecode\[monitors\]"):
        Monitor("x").start(ByteTokenizer(), 259)
