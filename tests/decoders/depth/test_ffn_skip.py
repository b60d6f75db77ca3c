"""MLPs that are skipped by cosine pass their certificate; other rules do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.checks import Restarts
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth import ffn_skip
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("ffn-skip")


@pytest.mark.parametrize(
    "defaults",
    [
        {"threshold": 0.97},
        {"count": 3},
        {"count": None},
        {"warm_up": 24},
        {"first": 1},
        {"last": 2},
    ],
    ids=str,
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "ffn-skip", **defaults)
    assert_rejected("ffn-skip")


def test_the_cosine_with_the_output_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    cosines = ffn_skip.cosines
    monkeypatch.setattr(ffn_skip, "cosines", lambda x, y: cosines(x, y - x))
    assert_rejected("ffn-skip")


def test_keys_and_values_of_full_passes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the text before run again in full, as if they had been the prompt."""

    def variant(self: Any, sequence: Any, index: int) -> Any:
        is_last = index == len(sequence.tokens) - 1
        sequence.truncate(max(0, min(sequence.kv_cache().length, len(sequence.prompt) - 1)))
        return own(self, sequence, index) if is_last else None

    own = ffn_skip.FfnSkip.variant
    monkeypatch.setattr(ffn_skip.FfnSkip, "variant", variant)
    assert_rejected("ffn-skip")


def test_a_threshold_above_one_gives_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
    with LLM(tiny_model(layers=5), tokenizer=ByteTokenizer()) as llm:
        plain = llm.generate("the cat", decoder="autoregressive", **options)
        found = llm.generate("the cat", decoder="ffn-skip:threshold=2", **options)
    assert found.tokens == plain.tokens


def test_rows_of_a_batch_skip_on_their_own() -> None:
    """And a text whose keys and values another request has computed in full is computed again."""
    prompts = ["the cat sat", "abcabc", "q"]
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "decoder": "ffn-skip"}
    with LLM(tiny_model(layers=15, residual=0.4), tokenizer=ByteTokenizer()) as llm:
        alone = [llm.generate(prompt, **options).tokens for prompt in prompts]
        batch = [one.tokens for one in llm.generate(prompts, **options)]
        assert alone == batch
        plain = llm.generate("q", max_tokens=60, ignore_eos=True, decoder="autoregressive").tokens
        llm.generate([*b"q", *alone[2][:40]], max_tokens=2, decoder="autoregressive")
        assert llm.generate("q", **options).tokens == alone[2] != plain


def test_a_text_that_is_interrupted_goes_on_with_the_same_keys_and_values() -> None:
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "decoder": "ffn-skip"}
    with LLM(tiny_model(layers=15, residual=0.4), tokenizer=ByteTokenizer()) as llm:
        alone = llm.generate("the cat sat", **options).tokens
        with Restarts(llm.engine, seed=1, share=0.2):
            assert llm.generate("the cat sat", **options).tokens == alone


def test_cosines_are_those_of_rows() -> None:
    x, y = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])
    assert np.allclose(ffn_skip.cosines(x, y), [0.96, 0.0])


def test_bad_parameters_and_models_are_refused_in_one_line() -> None:
    with LLM(tiny_model(layers=3), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="leaves no layer"):
            llm.generate("a", decoder="ffn-skip:first=2,last=1")
        with pytest.raises(AnydecodeError, match="guidance"):
            llm.generate("a", decoder="ffn-skip", guidance_scale=2.0)
        with pytest.raises(AnydecodeError, match="count"):
            llm.generate("a", decoder="ffn-skip:count=-1")
