"""Texts that depend on what is drafted do not depend on preemptions: what a request's drafter knows
is kept meanwhile."""

from __future__ import annotations

import pytest

from anydecode.certification.checks import PROMPTS, Restarts, scripted_llm
from anydecode.decoders.depth import self_speculation
from anydecode.decoders.framework import speculation
from anydecode.decoders.speculative import jacobi, pearl

METHODS = ["bandit", "jacobi", "lookahead", "pearl", "del"]


def _texts(method: str, share: float, number: int) -> list[list[int]]:
    """Texts under a lossy rule, with preemptions before a share of the engine's steps."""
    found = []
    for prompt in PROMPTS[:4]:
        with scripted_llm() as llm, Restarts(llm.engine, number, share):
            text = llm.generate(
                prompt, decoder=f"{method}:acceptance=typical", max_tokens=40, temperature=0.8,
                seed=5, ignore_eos=True,
            )  # fmt: skip
        found.append(text.tokens)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_lossy_texts_do_not_depend_on_preemptions(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _texts(method, 0.0, 0)
    assert _texts(method, 0.3, 1) == expected
    assert _texts(method, 0.1, 2) == expected
    for module in (jacobi, pearl, self_speculation, speculation):
        monkeypatch.setattr(module, "carried", lambda sequence, key, rule, make: make())
    assert _texts(method, 0.3, 1) != expected, "a wrong twin that forgets its drafts"
