"""Schedules by key."""

from __future__ import annotations

import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.errors import InvalidRequestError


def test_schedules_are_built_by_key() -> None:
    with scripted_llm(schedule="sarathi-serve:budget=64") as llm:
        assert llm.engine.runners["target"].schedule.budget == 64
    with pytest.raises(InvalidRequestError, match="not a schedule"):
        scripted_llm(schedule="prompt-lookup")
    with pytest.raises(InvalidRequestError, match="the row budget is 0; allowed"):
        scripted_llm(schedule="sarathi:budget=0")
    with pytest.raises(InvalidRequestError, match="more than 1, not 1"):
        scripted_llm(schedule="layered-prefill:stretch=1")
