"""A constraint keeps exactly the candidates that it allows, in whatever form its mask and the
candidates are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.constrained import Constrained

VOCABULARY = 12
tokens = st.frozensets(st.integers(0, VOCABULARY - 1), min_size=1)


def constrained(allowed: frozenset[int], form: str) -> Constrained:
    ids = np.array(sorted(allowed), np.int32)
    mask: Any = ids
    if form == "bool":
        mask = np.zeros(VOCABULARY, bool)
        mask[ids] = True
    return Constrained(SimpleNamespace(mask=lambda: mask))  # type: ignore[arg-type]


@given(tokens, st.none() | tokens, st.sampled_from(["bool", "ids"]))
def test_the_allowed_candidates_are_kept_with_their_scores(
    allowed: frozenset[int], given_tokens: frozenset[int] | None, form: str
) -> None:
    offered = frozenset(range(VOCABULARY)) if given_tokens is None else given_tokens
    ids = None if given_tokens is None else np.array(sorted(offered), np.int32)
    candidates = Candidates(ids, np.array([100.0 + t for t in sorted(offered)], np.float32))
    rule = constrained(allowed, form)
    if not allowed & offered:
        with pytest.raises(ConstraintError, match="allows none"):
            rule.apply(candidates)
        return
    kept = rule.apply(candidates).allowed()
    found = range(VOCABULARY) if kept.tokens is None else kept.tokens.tolist()
    assert dict(zip(found, kept.scores.tolist(), strict=True)) == {
        token: 100.0 + token for token in allowed & offered
    }
    assert [rule.allows(token) for token in range(VOCABULARY)] == [
        token in allowed for token in range(VOCABULARY)
    ]
    assert rule.forbids_little() == (form == "bool" and 2 * len(allowed) > VOCABULARY)
