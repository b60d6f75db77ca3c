"""Grammar-aligned decoding (ASAp): its certificate, mistakes that the certificate rejects, and its
tries."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex
from anydecode.certification.oracles.constrained.trap_model import TRUTH, WORDS, distance, trap_llm
from anydecode.decoders.autoregressive import Autoregressive
from anydecode.decoders.constrained import asap
from anydecode.decoders.constrained.asap import Asap, Node
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("asap")


def test_certificate_rejects_estimates_that_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "update", lambda self: None)
    assert_rejected("asap")


def test_certificate_rejects_estimates_of_the_last_prefix_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Asap, "_refine", staticmethod(lambda path: path[-1].update()))
    assert_rejected("asap")


def test_learned_samples_follow_the_conditional_distribution_and_masked_ones_do_not() -> None:
    decoder = Asap()
    distance(decoder, 60)
    (root,) = decoder.tries.values()
    learned = root.completion_probability
    assert distance(decoder, 150, first=1000) < 0.1
    assert distance(Autoregressive(), 100) > 0.35
    assert root.completion_probability <= learned + 1e-12
    assert root.completion_probability == pytest.approx(sum(TRUTH.values()), abs=1e-3)


def test_one_trie_is_kept_per_constraint() -> None:
    decoder = Asap()
    with trap_llm() as llm:
        for constraint in (WORDS, Regex("aa"), Regex("bb"), Regex("aa")):
            llm.generate("?", decoder=decoder, constraint=constraint, temperature=1.0, seed=1)
    assert len(decoder.tries) == 3


def test_the_first_sample_is_that_of_plain_masking() -> None:
    options: dict[str, Any] = {"constraint": WORDS, "temperature": 1.0, "seed": 3}
    with trap_llm() as llm:
        plain = llm.generate("?", decoder="autoregressive", **options).tokens
        assert llm.generate("?", decoder=Asap(), **options).tokens == plain


def test_the_trie_that_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asap, "MAX_TRIES", 2)
    decoder, constraints = Asap(), {word: Regex(word) for word in ("aa", "ba", "bb")}
    tries = {}
    with trap_llm() as llm:
        for word in ("aa", "ba", "aa", "bb"):
            llm.generate("?", decoder=decoder, constraint=constraints[word], temperature=1.0)
            tries.setdefault(word, next(reversed(decoder.tries.values())))
    assert list(decoder.tries.values()) == [tries["aa"], tries["bb"]]


def test_certificate_rejects_one_trie_for_all_temperatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = Node()

    def trie(self: Asap, sequence: Any) -> Node:
        return self.tries.setdefault("only", only)

    monkeypatch.setattr(Asap, "trie", trie)
    assert_rejected("asap")
