"""Layers that fall with the position pass their certificate; other schedules do not."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM, catalogue
from anydecode.certification.certify import small_model
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth.skipdecode import SkipDecode
from anydecode.errors import AnydecodeError
from anydecode.kernels.interface import SkippedParts
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("skipdecode")


@pytest.mark.parametrize(
    "defaults", [{"max_layers": 9}, {"min_layers": 5}, {"warm_up": 2}], ids=str
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "skipdecode", **defaults)
    assert_rejected("skipdecode")


def test_the_first_layers_instead_of_the_last_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = SkipDecode.variant

    def first(self: SkipDecode, sequence: Any, index: int) -> Any:
        chosen = variant(self, sequence, index)
        if not isinstance(chosen, SkippedParts):
            return chosen
        last = frozenset(range(sequence.num_layers - len(chosen.mlps), sequence.num_layers))
        return SkippedParts(last, last)

    monkeypatch.setattr(SkipDecode, "variant", first)
    assert_rejected("skipdecode")


def test_a_schedule_one_token_late_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = SkipDecode.variant
    monkeypatch.setattr(
        SkipDecode,
        "variant",
        lambda self, sequence, index: variant(self, sequence, max(0, index - 1)),
    )
    assert_rejected("skipdecode")


def test_all_layers_give_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
    with LLM(tiny_model(layers=5), tokenizer=ByteTokenizer()) as llm:
        plain = llm.generate("the cat", decoder="autoregressive", **options)
        decoder = "skipdecode:max_layers=5,min_layers=5"
        assert llm.generate("the cat", decoder=decoder, **options).tokens == plain.tokens


def test_bad_parameters_are_refused_in_one_line() -> None:
    with LLM(tiny_model(layers=5), tokenizer=ByteTokenizer()) as llm:
        for options in ("max_layers=6", "min_layers=4,max_layers=3", "warm_up=2,min_layers=2"):
            with pytest.raises(AnydecodeError, match="must rise in this order"):
                llm.generate("a", decoder=f"skipdecode:{options}")


@pytest.mark.parametrize("key", ["skipdecode", "ffn-skip", "tide", "dynamax", "first-router"])
def test_samplers_that_read_inner_layers_are_refused_in_one_line(key: str) -> None:
    """Layers that a token may not have run."""
    _, open_llm = small_model(catalogue.find(key).card, catalogue.build(key).requirements)
    with LLM(tiny_model(layers=16), tokenizer=ByteTokenizer()) as plain, open_llm() as llm:
        own = llm if key in ("tide", "dynamax", "first-router") else plain
        with pytest.raises(AnydecodeError, match="read inner layers") as caught:
            own.generate("a", decoder=key, sampler="dola:layers=low")
    assert "\n" not in str(caught.value)
