"""The threshold of AdaDec: learned from entropies and hits, and from a model's own texts."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.training.entropy_threshold import fit_threshold, learn_threshold


def test_the_threshold_separates_hits() -> None:
    """Hits below 1.5 nats, but for some that are wrong."""
    random = np.random.default_rng(0)
    entropies = random.uniform(0, 3, 4000)
    hits = (entropies < 1.5) ^ (random.random(4000) < 0.05)
    found = fit_threshold(entropies, hits)
    assert found.threshold == pytest.approx(1.5, abs=0.1)
    assert found.accuracy == pytest.approx(0.95, abs=0.02)
    assert found.share_above == pytest.approx(0.5, abs=0.05) and found.num_tokens == 4000


def test_the_best_cut_of_all() -> None:
    """Hits by a logistic law: no other cut of hundredths is right more often."""
    random = np.random.default_rng(1)
    entropies = random.exponential(1.0, 3000)
    hits = random.random(3000) < 1 / (1 + np.exp(2 * entropies - 3))
    found = fit_threshold(entropies, hits)
    right = max(((entropies < cut) == hits).mean() for cut in np.arange(0, 5, 0.01))
    assert right - 0.01 < found.accuracy <= right + 0.001


@pytest.mark.parametrize(
    "entropies, hits, message",
    [
        ([1.0, 2.0], [True, True], "2 tokens of which 2"),
        ([], [], "0 tokens"),
        ([1.0, 2.0], [False, True], "not wrong more often"),
    ],
)
def test_what_has_no_threshold_is_refused(
    entropies: list[float], hits: list[bool], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fit_threshold(np.array(entropies), np.array(hits, bool))


def test_solutions_are_read_token_by_token() -> None:
    """The model is certain of an "a" at even positions, and of nothing at odd ones."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(257, np.float32)
        row[ord("a")] = 20.0 if len(seen) % 2 == 0 else 0.1
        return row

    done: list[int] = []
    with LLM(ScriptedModel(script, vocab_size=257), tokenizer=ByteTokenizer()) as llm:
        pairs = [("zz", "azaz"), ("zz", "azazaz"), ("zz", "")]
        found = learn_threshold(llm, pairs, done.append)
    assert done == [1, 2, 3] and found.num_tokens == 10
    assert 0.1 < found.threshold < np.log(257) and found.accuracy == 1 and found.share_above == 0.5
