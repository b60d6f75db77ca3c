"""What all acceptance rules share: log-probabilities and refusals."""

from __future__ import annotations

import pytest

from anydecode.certification.chi_square import PROMPT, small_llm
from anydecode.decoders.framework.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.framework.rejection import RejectionSampling, acceptance_rule
from anydecode.errors import InvalidRequestError


def test_every_rule_returns_log_probabilities() -> None:
    with small_llm() as llm:
        for name in ("rejection", "typical", "top-m", "token-exact"):
            decoder = f"speculative-sampling:acceptance={name}"
            options = {"temperature": 0.9, "seed": 3, "logprobs": 1, "max_tokens": 30}
            answer = llm.generate(PROMPT, decoder=decoder, **options)
            assert len(answer.logprobs) == 30
            assert None not in answer.logprobs


def test_invalid_parameters_have_one_line_errors() -> None:
    for make in (
        lambda: RejectionSampling(0),
        lambda: TypicalAcceptance(epsilon=1.5),
        lambda: TopMAcceptance(0),
        lambda: acceptance_rule("majority"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            make()
        assert "\n" not in str(error.value)
