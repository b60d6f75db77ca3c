"""Optional rows: the drafts of all requests that save time together, and texts that do not depend
on which of them ran."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_llm
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import verify_tree
from anydecode.engine import model_runner
from anydecode.engine.schedule import ScheduledSpan
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.score import Decoding, ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

PROMPTS = ["one fish two fish", "red fish blue fish", "a", "this one has a little star"]


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 0.6), min_size=16, max_size=16),
)
def test_the_rows_with_the_highest_rate_are_chosen(
    probabilities: list[list[float]], steps: list[float]
) -> None:
    """Against all combinations of counts, for costs that rise in any way."""
    probabilities = [sorted(rows, reverse=True) for rows in probabilities]
    costs = [1.0]
    for step in steps:
        costs.append(costs[-1] + step)
    num_tokens = len(probabilities)

    def rate(counts: tuple[int, ...]) -> float:
        gained = sum(sum(rows[:n]) for rows, n in zip(probabilities, counts, strict=True))
        return (num_tokens + gained) / costs[sum(counts)]

    best = max(rate(counts) for counts in product(*(range(len(p) + 1) for p in probabilities)))
    chosen = useful_counts(probabilities, num_tokens, lambda rows: costs[rows])
    assert rate(tuple(chosen)) == pytest.approx(best)


class TreeDecoder(Decoder):
    """Verifies trees in which the right tokens may be anywhere, with made-up probabilities."""

    def __init__(self, text: list[int], is_chain: bool) -> None:
        self.text, self.is_chain = text, is_chain
        self.num_drafted = self.num_verified = self.num_accepted = 0

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            done = len(sequence.tokens)
            tree = TokenTree()
            right = ROOT
            for number, token in enumerate(self.text[done : done + 4]):
                if not self.is_chain:
                    tree.add((token + 1 + number) % 256, right)
                right = tree.add(token, right)
            tree = tree if sequence.tokens else TokenTree()
            optional = [0.9 * 0.8**node for node in range(len(tree))]
            round = yield from verify_tree(sequence, tree, TokenExact(), 0.0, optional)
            self.num_drafted += len(tree)
            self.num_verified += len(round.tree)
            self.num_accepted += round.num_accepted


def run(llm: LLM, texts: list[list[int]], is_chain: bool, temperature: float) -> list[TreeDecoder]:
    decoders = [TreeDecoder(text, is_chain) for text in texts]
    requests = [
        llm.request(prompt, decoder=decoder, max_tokens=24, temperature=temperature, seed=3)
        for prompt, decoder in zip(PROMPTS, decoders, strict=True)
    ]
    for request in requests:
        llm.start(request, background=False)
    llm.driver.advance(lambda: all(request.done for request in requests))
    llm.engine.check_integrity()
    assert [request.generation().tokens for request in requests] == texts
    return decoders


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_chain", [True, False])
def test_texts_do_not_depend_on_the_rows_that_are_left_out(
    is_chain: bool, temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    verified = []
    for slope in (0.0, 0.1, 0.2, 10.0):
        with tiny_llm() as llm:
            texts = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
            llm.cost_model = FixedCosts(lambda rows, _, slope=slope: 1.0 + slope * rows)
            decoders = run(llm, texts, is_chain, temperature)
        verified.append(sum(decoder.num_verified for decoder in decoders))
        assert all(decoder.num_verified <= decoder.num_drafted for decoder in decoders)
        if slope == 0.0:
            assert all(decoder.num_verified == decoder.num_drafted for decoder in decoders)
            assert all(decoder.num_accepted > 10 for decoder in decoders)
    assert verified[0] > verified[1] > verified[2] > verified[3] == 0


def test_rows_of_a_pass_save_time_beside_all_others() -> None:
    """Each alone saves time; with the drafts of all others, only the most probable ones do."""

    def cost(rows: int, context: int) -> float:
        return 1.0 if rows <= 8 else 1.0 + 0.5 * (rows - 8)

    kept: list[int] = []
    without = model_runner.without_useless_rows

    def counted(scheduled: list[ScheduledSpan], pass_cost: Callable[..., float]) -> Any:
        result = without(scheduled, pass_cost)
        kept.append(sum(count for _, _, count in result))
        return result

    patch = pytest.MonkeyPatch()
    patch.setattr(model_runner, "without_useless_rows", counted)
    try:
        with tiny_llm() as llm:
            options: dict[str, Any] = {"max_tokens": 24, "seed": 3}
            texts = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
            llm.cost_model = FixedCosts(cost)
            kept.clear()
            run(llm, texts, True, 0.0)
    finally:
        patch.undo()
    steady = kept[2:-4]
    assert steady and max(steady) <= 8


def test_results_of_rows_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ScoreRequest.keep_optional

    def forgetful(self: ScoreRequest, count: int) -> None:
        positions = self.positions
        keep(self, count)
        self.positions = positions

    with tiny_llm() as llm:
        texts = [llm.generate(p, max_tokens=24, seed=3).tokens for p in PROMPTS]
        llm.cost_model = FixedCosts(lambda rows, _: 1.0 + 10.0 * rows)
        monkeypatch.setattr(ScoreRequest, "keep_optional", forgetful)
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            run(llm, texts, True, 0.0)
