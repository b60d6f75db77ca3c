"""Draft trees of a draft model: oracle tests, equality with plain decoding, and cache use."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.certification.rounds import accepted, blurred, rounds, scripted, wordy
from anydecode.decoders.framework import draft_candidates
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.errors import InvalidRequestError
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ScriptedModel
from anydecode.scoring.tree import ROOT

TREES = ("opt-tree", "dyspec", "rsd", "fixed-tree", "taps")
TARGET, DRAFT = wordy(), blurred(wordy())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("key", [*TREES, "rsd:branching=2-2-1", "taps:drafters=suffix+opt-tree"])
def test_tokens_equal_plain_decoding_in_a_batch(key: str, temperature: float) -> None:
    prompts = ["abcabcabd", "the cab had a bad cab", "h"]
    options = {"temperature": temperature, "seed": 4, "max_tokens": 30, "ignore_eos": True}
    options["repetition_penalty"] = 1.2
    with scripted(TARGET, DRAFT) as llm:
        plain = [answer.tokens for answer in llm.generate(prompts, **options)]
        drafted = llm.generate(prompts, decoder=key, **options)
        assert [answer.tokens for answer in drafted] == plain
        llm.engine.check_integrity()


def test_branches_do_not_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every node attached to the root, the same rounds must draft something else."""
    with scripted(TARGET, DRAFT) as llm:
        right = rounds(llm, "fixed-tree", "abcabc", 20)
    expand = GrowingTree.expand

    def flat(self: GrowingTree, nodes: list[int]) -> object:
        positions, self._positions = self._positions, dict.fromkeys(self._positions, ROOT)
        yield from expand(self, nodes)
        self._positions = positions | self._positions

    monkeypatch.setattr(GrowingTree, "expand", flat)
    with scripted(TARGET, DRAFT) as llm:
        wrong = rounds(llm, "fixed-tree", "abcabc", 20)
    assert [one.tokens for one in right] != [one.tokens for one in wrong]


@pytest.mark.parametrize("key", ["dyspec", "rsd", "rsd:branching=3-2"])
def test_siblings_are_distinct_and_have_distributions(key: str) -> None:
    trees = []
    join = "," if ":" in key else ":"
    method = f"{key}{join}acceptance=rejection"
    with scripted(TARGET, DRAFT) as llm:
        decoder = llm.decoder(method)
        walk = decoder.acceptance.walk
        decoder.acceptance.walk = lambda tree, scores: (trees.append(tree), walk(tree, scores))[1]
        found = rounds(llm, decoder, "abcabc", 24, temperature=0.8)
    assert accepted(found) > 0
    for tree in trees:
        assert tree.kind == "wor"
        for parent in {*tree.parents}:
            q = tree.probabilities[parent]
            siblings = [tree.tokens[node] for node in tree.children(parent)]
            assert len(set(siblings)) == len(siblings) and q[siblings].min() > 0
            assert q.shape == (259,) and q.sum() == pytest.approx(1.0)


def test_first_draws_follow_the_draft_distribution() -> None:
    """Over many seeds, the first sibling is a sample of q (chi-square, 1% of the tail)."""
    counts: dict[int, int] = {}
    q = None
    with scripted(TARGET, DRAFT) as llm:
        for seed in range(400):
            decoder = llm.decoder("rsd:branching=2-1,acceptance=rejection")
            trees_seen = []
            decoder.acceptance.walk = _record_trees(decoder, trees_seen)
            llm.generate("ab", decoder=decoder, max_tokens=1, temperature=0.8, seed=seed)
            llm.clear()
            q = trees_seen[0].probabilities[ROOT]
            counts[trees_seen[0].tokens[0]] = counts.get(trees_seen[0].tokens[0], 0) + 1
    assert q is not None
    frequent = np.flatnonzero(400 * q >= 5)
    seen = np.array([counts.get(int(token), 0) for token in frequent])
    expected = 400 * q[frequent]
    rest, rest_expected = 400 - seen.sum(), 400 - expected.sum()
    statistic = ((seen - expected) ** 2 / expected).sum()
    statistic += (rest - rest_expected) ** 2 / max(rest_expected, 1.0)
    freedom = len(frequent)
    assert statistic < freedom + 2.6 * np.sqrt(2 * freedom) + 4


def _record_trees(decoder: object, trees_seen: list) -> object:
    from anydecode.decoders.framework.acceptance import TokenExact

    def walk(tree: object, scores: object) -> object:
        trees_seen.append(tree)
        return TokenExact().walk(tree, scores)  # type: ignore[arg-type]

    return walk


def test_pending_tree_grows_and_retains_a_path() -> None:
    kv_cache = SequenceCache(KVPool(ScriptedModel(TARGET, vocab_size=259), 16))
    kv_cache.append(2)
    kv_cache.tokens += [1, 2]
    kv_cache.branch([3, 4], [ROOT, ROOT], 3)
    pending = kv_cache.grow_branch([5, 6], [1, 2])
    assert pending.path(3) == [1, 2, 3] and len(set(pending.slots.tolist())) == 4
    kv_cache.retain([1, 2])
    assert kv_cache.tokens == [1, 2, 4, 5] and kv_cache.pool.num_used == 4
    with pytest.raises(ValueError, match="no token tree"):
        kv_cache.grow_branch([7], [ROOT])


@pytest.mark.parametrize(
    "decoder",
    [
        "opt-tree:depth=0",
        "rsd:width=0",
        "rsd:branching=3-x",
        "fixed-tree:shape=00",
        "dyspec:size=0",
    ],
)
def test_invalid_parameters_have_one_line_errors(decoder: str) -> None:
    with scripted(TARGET, DRAFT) as llm, pytest.raises(InvalidRequestError) as refusal:
        llm.generate("abc", decoder=decoder)
    assert "\n" not in str(refusal.value)


def test_trees_without_a_draft_model_are_rejected() -> None:
    with scripted(TARGET) as llm, pytest.raises(InvalidRequestError, match="needs a draft model"):
        llm.generate("abc", decoder="dyspec")


def test_cut_distributions_keep_token_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_candidates, "NUM_CANDIDATES", 4)
    with scripted(TARGET, DRAFT) as llm:
        found = rounds(llm, "fixed-tree", "abcabc", 20, temperature=0.8)
        plain = llm.generate("abcabc", max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)
    assert [token for one in found for token in one.generated][:20] == plain.tokens
