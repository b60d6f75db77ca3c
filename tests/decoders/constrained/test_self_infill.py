"""Self-infilling: its certificate, mistakes that the certificate rejects, and its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex
from anydecode.certification.checks import scripted_llm
from anydecode.certification.oracles.constrained.self_infill import filling_llm
from anydecode.decoders.constrained import self_infill
from anydecode.decoders.constrained.self_infill import SelfInfill
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import FillInTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("self-infill")


def test_certificate_rejects_a_model_that_is_always_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_infill, "max_probability", lambda row: 1.0)
    assert_rejected("self-infill")


def test_certificate_rejects_an_interruption_at_threshold_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_infill, "max_probability", lambda row: -1.0)
    assert_rejected("self-infill")


def test_left_part_middle_and_suffix_are_emitted_in_this_order() -> None:
    with filling_llm([]) as llm:
        assert llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=12).text == "xmr!"
        short = llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=2)
        assert len(short.tokens) == 2 and short.finish_reason == "length"


def test_log_probabilities_of_the_prompt_do_not_change_the_text() -> None:
    """They leave the prompt in the cache, with which those of the branches do not begin."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(262)
        logits[ord("y" if path[0] >= 259 else "n")] = 20.0  # a mark, or the prompt itself
        return logits

    model = ScriptedModel(script, vocab_size=262)
    with LLM(model, tokenizer=FillInTokenizer(), cache_positions=1024) as llm:
        answer = llm.generate("f(", decoder="self-infill", max_tokens=9, prompt_logprobs=1)
    assert answer.text == "yyyyyyyyy"


def test_a_constraint_without_a_gap_is_refused() -> None:
    with filling_llm([]) as llm, pytest.raises(UnsupportedCombinationError, match="suffix"):
        llm.generate("f(", decoder="self-infill", constraint=Regex("a+"))


def test_a_model_without_sentinels_is_refused() -> None:
    message = "fill-in-the-middle model"
    with scripted_llm() as llm, pytest.raises(UnsupportedCombinationError, match=message):
        llm.generate("f(", decoder="self-infill")


def test_invalid_options_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        SelfInfill(threshold=2)
    with pytest.raises(InvalidRequestError):
        SelfInfill(sentinels="a b")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"begins": "r"}, "xmmmr!"),  # the suffix fits into the six tokens
        ({"suffix": ")"}, "mmmmmm"),  # a given suffix is not part of the answer
    ],
)
def test_a_middle_without_end_leaves_room_for_the_suffix(
    options: dict[str, Any], expected: str
) -> None:
    with filling_llm([]) as llm:
        model: Any = llm.model
        script, middle = model.script, 261

        def endless(path: tuple[int, ...]) -> np.ndarray:
            row: np.ndarray = script(path)
            if middle in path:
                row[ord("m")] = 40.0
            return row

        model.script = endless
        assert llm.generate("f(", decoder=SelfInfill(**options), max_tokens=6).text == expected
