"""Constraints applied to drafts: forced tokens, and nodes that are removed."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.certification.checks import scripted_llm
from anydecode.constraints.drafts import pruned
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.tree import ROOT, TokenTree

SCHEMA = {
    "type": "object",
    "properties": {"first": {"enum": ["one", "two"]}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}


def test_forced_tokens_are_drafted_and_forbidden_nodes_are_removed() -> None:
    state = JsonSchema(SCHEMA, whitespace="").start(ByteTokenizer(), 259)
    forced = state.forced_tokens()
    assert bytes(forced) == b'{"first":"'
    drafted = TokenTree.merge([list(b'one"}'), list(b"thr"), list(b"x")])
    tree = pruned(forced, drafted, state)
    assert bytes(tree.tokens) == b'{"first":"one"t'
    assert tree.parents[len(forced)] == len(forced) - 1
    assert [tree.parents[-1], tree.tokens[-1]] == [len(forced) - 1, ord("t")]


def test_draft_distributions_and_sources_move_with_their_nodes() -> None:
    state = JsonSchema(SCHEMA, whitespace="").start(ByteTokenizer(), 259)
    forced = state.forced_tokens()
    after_root, after_first, after_last = (np.full(259, value) for value in (1.0, 2.0, 3.0))
    # Nodes 0 and 1 are forbidden; "o" and "n" are nodes 2 and 3.
    drafted = TokenTree(
        list(b"xyon"),
        [ROOT, 0, ROOT, 2],
        {ROOT: after_root, 0: after_first, 2: after_last},
        sources=["a", "b", "c", "d"],
    )
    tree = pruned(forced, drafted, state)
    first = len(forced)
    assert bytes(tree.tokens[first:]) == b"on"
    assert tree.probabilities.keys() == {first - 1, first}
    assert tree.probabilities[first - 1] is after_root and tree.probabilities[first] is after_last
    assert tree.sources == ["constraint"] * first + ["c", "d"]


@pytest.mark.parametrize(
    "decoder", ["prompt-lookup", "suffix", "token-recycling", "lookahead", "stand", "taps"]
)
def test_every_exact_drafter_drafts_forced_tokens(decoder: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"type": "boolean"}},
        "required": ["a_long_name"],
        "additionalProperties": False,
    }
    constraint = JsonSchema(schema, whitespace="")
    with scripted_llm() as llm:
        plain = llm.generate("x", constraint=constraint, decoder="autoregressive")
        fast = llm.generate("x", constraint=constraint, decoder=decoder)
    assert fast.tokens == plain.tokens
    assert fast.stats.passes * 4 < plain.stats.passes
