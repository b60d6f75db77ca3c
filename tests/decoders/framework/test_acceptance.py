"""What all acceptance rules share: log-probabilities and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.certification.chi_square import PROMPT, TARGET_SCRIPT, small_llm
from anydecode.certification.oracles.speculative.acceptance_outcomes import TableTrees
from anydecode.certification.rounds import blurred, rounds, scripted, wordy
from anydecode.decoders.framework import rejection
from anydecode.decoders.framework.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.framework.rejection import RejectionSampling, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.errors import InvalidRequestError


def test_every_rule_returns_log_probabilities() -> None:
    with small_llm() as llm:
        for name in ("rejection", "typical", "top-m", "token-exact"):
            decoder = f"speculative-sampling:acceptance={name}"
            options = {"temperature": 0.9, "seed": 3, "logprobs": 1, "max_tokens": 30}
            answer = llm.generate(PROMPT, decoder=decoder, **options)
            assert len(answer.logprobs) == 30
            assert None not in answer.logprobs


def test_the_longest_path_is_kept_and_of_equal_ones_the_most_probable() -> None:
    """Not the first one that was drafted."""
    decoder = Speculative(TableTrees("point"), 6, TypicalAcceptance())
    with small_llm() as llm:
        trace = rounds(llm, decoder, PROMPT, 80, temperature=0.8)
    num_others, lengths = 0, set()
    for one in trace:
        accepted = {(): 1.0}
        for path in one.paths:
            p = np.exp(TARGET_SCRIPT((*one.text, *path[:-1])).astype(float) / 0.8)
            p /= p.sum()
            bound = min(0.09, 0.3 * float(np.exp((p * np.log(p)).sum())))
            if path[:-1] in accepted and p[path[-1]] > bound:
                accepted[path] = accepted[path[:-1]] * float(p[path[-1]])
        best = max(accepted, key=lambda path: (len(path), accepted[path]))
        assert tuple(one.tokens[node] for node in one.accepted) == best
        num_others += best != max(accepted, key=len)
        lengths.add(len(best))
    assert num_others > 3 and lengths == {0, 1, 2}


def _texts_near_their_limit(*keys: str) -> list[list[str]]:
    """Texts of a schema that leaves little room, by method."""
    properties = {"name": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2, 30]}}
    schema = JsonSchema({"type": "object", "properties": properties, "required": list(properties)})
    prompts = ["abcabcabd the cab had a bad cab abcabcabd the cab had", "abcabc abcabc"]
    options: dict[str, Any] = {"constraint": schema, "max_tokens": 70, "temperature": 0.0}
    with scripted(wordy(), blurred(wordy())) as llm:
        found = [llm.generate(prompts, decoder=key, **options) for key in keys]
    return [[one.text for one in texts] for texts in found]


def test_greedy_rejection_near_the_limit_of_a_schema_is_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what follows from the distribution with a forced completion, which is its token alone."""
    key = "speculative-sampling:acceptance=rejection"
    plain, drafted = _texts_near_their_limit("autoregressive", key)
    assert drafted == plain
    monkeypatch.setattr(rejection, "constraint_of", lambda sampler: None)
    assert _texts_near_their_limit(key) != [plain]


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
