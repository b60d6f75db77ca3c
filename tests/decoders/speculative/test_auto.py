"""The default decoder: token-exact, and drafts only where they save time."""

from __future__ import annotations

from itertools import pairwise
from threading import current_thread
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.certify import certify_one
from anydecode.certification.oracles.speculative.auto import BatchCosts, FixedCosts, cyclic, passes
from anydecode.certification.tiny import eagle3_checkpoint, with_drafter
from anydecode.constraints.languages import Regex
from anydecode.decoders.framework import text_parts
from anydecode.decoders.framework.ngram_index import SEPARATOR, NgramIndex
from anydecode.decoders.speculative import auto as module
from anydecode.decoders.speculative import draft_choice, draft_sources
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.draft_choice import (
    CandidateTree,
    best_count,
    grow_tree,
    min_useful_probability,
    with_chain,
)
from anydecode.decoders.speculative.draft_sources import (
    MATCH_LENGTHS,
    PRIORS,
    AcceptanceRates,
    CopySource,
    LearnedDrafts,
    ModelSource,
    SuccessorPredictor,
)
from anydecode.decoders.speculative.match_cursor import NGRAM_SIZES, MatchCursor
from anydecode.decoders.speculative.successors import NUM_SUCCESSORS, Successors
from anydecode.engine import costs
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import SampleSpec
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring import score
from anydecode.scoring.cost import CostCorrection, CostTable, default_table
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT
from certificates import assert_certified, assert_rejected

PROMPTS = ["the quick brown fox jumps over", "a lazy dog and", "zq"]


def test_certificate() -> None:
    assert_certified("auto")


def test_bursts_with_the_noise_of_the_next_position_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*fields: Any) -> SampleSpec:
        spec = SampleSpec(*fields)
        return spec._replace(position=spec.position + 1)

    monkeypatch.setattr(score, "SampleSpec", late)
    assert_rejected("auto")


@pytest.mark.slow
def test_accepting_all_drafts_fails_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydecode.decoders.framework.acceptance import AcceptanceResult, TokenExact

    def accept_all(self, tree, scores):
        path = tree.path(len(tree) - 1) if len(tree) else []
        return AcceptanceResult(
            path, [tree.tokens[n] for n in path] + [scores.sample(len(path) and path[-1] + 1)]
        )

    monkeypatch.setattr(TokenExact, "walk", accept_all)
    monkeypatch.setattr(draft_choice, "MIN_GAIN", 0.0)
    checks = {check.name: check.passed for check in certify_one("auto").checks}
    assert not checks["equals plain decoding, scripted, T=0.0"]


def test_drafting_everything_fails_the_oracle_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydecode.certification.oracles.speculative import auto as checks

    everything = lambda chances, costs, others, drafting: len(chances)  # noqa: E731
    monkeypatch.setattr(checks, "best_count", everything)
    assert not all(check.passed for check in checks.auto())


def test_no_drafts_when_rows_are_expensive() -> None:
    assert passes(lambda n, _: float(n)) == 60
    assert passes(lambda n, _: 1.0) < 15


def test_earlier_answers_are_drafted_until_clear() -> None:
    random = np.random.default_rng(2)
    text = random.permutation(60).tolist()
    following = dict(zip(text, [*text[1:], 0], strict=True))

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(64, np.float32)
        logits[following.get(seen[-1], 0)] = 9.0
        return logits

    with LLM(ScriptedModel(script, vocab_size=64), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n, _: 1 + 0.02 * n)
        first = llm.generate([text[0]], decoder="auto", max_tokens=40)
        again = llm.generate([text[0]], decoder="auto", max_tokens=40, trace=True)
        llm.clear()
        cold = llm.generate([text[0]], decoder="auto", max_tokens=40)
    assert first.tokens == again.tokens == cold.tokens == text[1:41]
    assert again.stats.passes < first.stats.passes == cold.stats.passes
    assert any("past" in (record["sources"] or []) for record in again.trace)
    assert all(record["verify_seconds"] >= 0 for record in again.trace)


def test_stored_answers_are_bounded() -> None:
    decoder = Auto(memory=30_000)
    for _ in range(20):
        decoder._learn(list(range(9)))
        assert decoder.num_bytes <= 30_000
    decoder._learn(list(range(200)))
    assert 10_000 <= decoder.num_bytes <= 15_000
    decoder = Auto(memory=0)
    decoder._learn([1, 2, 3])
    assert not decoder.past.parts


@pytest.mark.parametrize("num_parts", [8, 1])
def test_the_last_answers_are_kept_where_the_memory_is_full(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all of the memory, of which the oldest part is dropped; the wrong twin drops all."""
    monkeypatch.setattr(text_parts, "NUM_PARTS", num_parts)
    decoder, fewest = Auto(memory=60_000), 100
    for number in range(60):
        decoder.successors.learn(number, number, [1, 2])
        decoder._learn([number] * 9)
        tokens = [token for part in decoder.past.parts for token in part.tokens]
        found = sorted(set(tokens) - {SEPARATOR})
        assert found == list(range(found[0], number + 1)) if found else num_parts == 1
        if number > 20:
            fewest = min(fewest, len(found))
    assert (fewest >= 8) == (num_parts == 8)
    assert len(decoder.successors) <= 100
    successors = Successors()
    for number in range(8):
        successors.learn(number, number, [1, 2])
    successors.limit(5)
    assert len(successors) == 5
    assert [successors.find(number, number)[0] for number in range(8)] == 3 * [2] + 5 * [0]


def test_old_observations_decay() -> None:
    rates = AcceptanceRates(PRIORS[True])
    for _ in range(500):
        rates.record(3, True)
    for _ in range(120):
        rates.record(3, False)
    assert rates[3] < 0.2
    assert rates.rates()[0] == pytest.approx(PRIORS[True][0])


def test_lower_bound_rises_with_observations() -> None:
    few, many = AcceptanceRates([0.5], weight=4.0), AcceptanceRates([0.5], weight=400.0)
    assert few[0] < many[0] < 0.5


def test_chains_repeat_the_period_of_the_text() -> None:
    corpus = NgramIndex(NGRAM_SIZES)
    cursor = MatchCursor(corpus)
    for token in [5, 1, 2, 3, 1, 2, 3]:
        corpus.append(token)
        cursor.step(corpus.tokens)
    assert cursor.chain(7) == [1, 2, 3, 1, 2, 3, 1]


def test_chains_end_at_the_separator() -> None:
    corpus = NgramIndex(NGRAM_SIZES)
    for token in [1, 2, 3, SEPARATOR, 9]:
        corpus.append(token)
    cursor = MatchCursor(corpus)
    cursor.step([1, 2])
    assert cursor.chain(5) == [3]


def test_match_length_is_the_common_suffix() -> None:
    corpus = NgramIndex(NGRAM_SIZES)
    for token in [9, 1, 2, 3, 4, 5, 6, 7, 8, SEPARATOR]:
        corpus.append(token)
    cursor = MatchCursor(corpus)
    cursor.step([0, 1, 2, 3, 4, 5, 6])
    assert (cursor.position, cursor.length) == (7, 6)
    assert cursor.advanced([5, 6], [7]).chain(3) == [8]
    assert (cursor.position, cursor.length) == (7, 6)


def sources(*texts: list[int], rate: float = 0.6) -> list[CopySource]:
    found = []
    for number, text in enumerate(texts):
        corpus = NgramIndex(NGRAM_SIZES)
        for token in text:
            corpus.append(token)
        source = CopySource(
            f"s{number}", corpus, AcceptanceRates([rate - 0.1 * number] * len(MATCH_LENGTHS))
        )
        source.cursor.step(text[:1])
        found.append(source)
    return found


def no_predictions() -> SuccessorPredictor:
    return SuccessorPredictor(Successors(), AcceptanceRates([0.5] * 2 * NUM_SUCCESSORS))


def test_two_sources_grow_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_sources, "NUM_STANDARD_ERRORS", 0.0)
    tree = grow_tree(
        [7], sources([7, 1, 2, SEPARATOR], [7, 1, 3, SEPARATOR]), no_predictions(), 3, 0.0
    )
    assert tree.tokens == [1, 2, 3]
    assert tree.parents == [ROOT, 0, 0]
    assert tree.sources == ["s0", "s0", "s1"]
    assert tree.probabilities[0] == pytest.approx(0.6)
    assert tree.probabilities[1] == pytest.approx(0.36)
    assert tree.probabilities[2] == pytest.approx(0.6 * 0.5 * 0.4)


def test_forced_tokens_precede_copied_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_sources, "NUM_STANDARD_ERRORS", 0.0)
    forced = [5, 6]
    tree = grow_tree(
        [7], sources([7, 1, SEPARATOR], [7, 2, SEPARATOR]), no_predictions(), 2, 0.0, forced
    )
    assert tree.tokens == [5, 6, 1, 2]
    assert tree.parents == [ROOT, 0, 1, 1]
    assert tree.probabilities == pytest.approx([1, 1, 0.6, 0.2])


def test_successors_extend_copied_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the copied 1 come the successors of the pair (7, 1), after 4 those of the single token
    4.
    """
    monkeypatch.setattr(draft_sources, "NUM_STANDARD_ERRORS", 0.0)
    known = Successors()
    known.learn(9, 4, [8, 5])
    known.learn(7, 1, [4, 2])
    predictor = SuccessorPredictor(known, AcceptanceRates([0.5, 0.1, 0.4, 0.3]))
    tree = grow_tree([0, 7], sources([7, 1, SEPARATOR]), predictor, 3, 0.0)
    assert tree.tokens == [1, 4, 8]
    assert tree.parents == [ROOT, 0, 1]
    assert tree.sources == ["s0", "recycled", "recycled"]
    assert tree.probabilities == pytest.approx([0.6, 0.3, 0.12])
    assert grow_tree([0, 7], sources([7, 1, SEPARATOR]), predictor, 3, 0.2).tokens == [1, 4]


def test_successors_of_pairs_and_tokens_are_separate() -> None:
    known = Successors()
    known.learn(1, 2, [3, 4])
    assert known.find(1, 2) == (0, [3, 4])
    assert known.find(9, 2) == (NUM_SUCCESSORS, [3, 4])
    assert known.find(1, 7) == (NUM_SUCCESSORS, [])
    assert list(known.outcomes(9, 2, 4)) == [(NUM_SUCCESSORS, False), (NUM_SUCCESSORS + 1, True)]


def test_recorded_successors_are_drafted() -> None:
    """The text repeats no token pair, but the model's top tokens after each token are the same:
    they are drafted, and nothing is copied."""
    order = [0, 1, 2, 0, 3, 4, 0, 5, 6, 0, 7, 8, 0, 9, 10, 0, 11, 12]

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(32, np.float32)
        logits[order[len(seen) % len(order)]] = 9.0
        return logits

    with LLM(ScriptedModel(script, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n, _: 1 + 0.02 * n)
        found = llm.generate([0], decoder="auto", max_tokens=50, trace=True)
        plain = llm.generate([0], decoder="autoregressive", max_tokens=50)
    assert found.tokens == plain.tokens
    drafted = {source for record in found.trace for source in record["sources"] or []}
    assert "recycled" in drafted


def test_prefix_of_a_candidate_tree_is_a_tree() -> None:
    growth = CandidateTree([4, 5, 6], [ROOT, 0, 0], ["a", "b", "c"], [0.9, 0.5, 0.1])
    kept = growth.first(2)
    assert (kept.tokens, kept.parents, kept.sources) == ([4, 5], [ROOT, 0], ["a", "b"])


def test_chain_equals_tree_beside_an_empty_source() -> None:
    (alone,) = sources([7, 1, 2, 3, 4, SEPARATOR], rate=0.7)
    empty = CopySource(
        "silent", NgramIndex(NGRAM_SIZES), AcceptanceRates([0.5] * len(MATCH_LENGTHS))
    )
    for count, min_probability in ((4, 0.0), (2, 0.0), (4, 0.3)):
        found = grow_tree([7], [alone], no_predictions(), count, min_probability, [7])
        assert found == grow_tree(
            [7], [alone, empty], no_predictions(), count, min_probability, [7]
        )
    assert 1 < len(found.tokens) < 5


def test_no_draft_without_gain() -> None:
    assert best_count([0.1, 0.05], [1.0, 1.1, 1.2], 0, 0.0) == 0
    assert best_count([0.1, 0.05], [1.0, 1.0, 1.0], 0, 0.0) == 2
    assert best_count([0.1, 0.05], [1.0, 1.0, 1.0], 0, 0.2) == 0  # drafting takes time as well


def test_min_useful_probability_is_the_threshold() -> None:
    random = np.random.default_rng(5)
    num_useful = 0
    for _ in range(300):
        costs = (1.0, *(1 + np.cumsum(random.random(6) * 2)))
        others = int(random.integers(0, 5))
        bound = min_useful_probability(costs, others)
        assert best_count([0.999 * bound] * 6, costs, others, 0.0) == 0
        if bound < 1.0:
            num_useful += 1
            assert best_count([1.001 * bound] * 6, costs, others, 0.0) > 0
    assert 50 < num_useful < 250
    assert min_useful_probability((1.0, 2.0, 3.0), 0) > 1.0


def run_batch(decoder: str, cost, temperature: float = 0.0):
    """Decode four repetitive texts together. Returns their tokens, the rows of each pass, and the
    number of drafts scored."""
    rows = []
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = BatchCosts(cost, llm)
        llm.engine.on_pass = lambda plan, seconds: rows.append(len(plan.rows))
        prompts = [[0, 1, 2, *range(first)] for first in range(1, 5)]
        options = {"max_tokens": 40, "temperature": temperature, "seed": 7, "ignore_eos": True}
        found = llm.generate(prompts, decoder=decoder, trace=True, **options)
        llm.engine.check_integrity()
    drafts = sum(len(record["drafted"]) for one in found for record in one.trace or ())
    return [one.tokens for one in found], rows, drafts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_without_useful_drafts_decodes_multi_step(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is scored, no logits are searched, no text is looked through, and each token is
    emitted when its pass is done."""
    draft_checks, top_searches, emitted = [], [], []
    max_probability, top, emit = module._Session._max_probability, Scores.top, Sequence.emit

    def emitting(self, tokens, *rest):
        emitted.append(len(tokens))
        return emit(self, tokens, *rest)

    monkeypatch.setattr(
        module._Session, "_max_probability", lambda s: draft_checks.append(s) or max_probability(s)
    )
    monkeypatch.setattr(Scores, "top", lambda s, n: top_searches.append(s) or top(s, n))
    expensive = lambda n, _: 0.003 * n  # noqa: E731
    following = run_batch("multi-step", expensive, temperature)
    monkeypatch.setattr(Sequence, "emit", emitting)
    assert run_batch("auto", expensive, temperature) == following
    assert following[2] == 0 and len(following[1]) == 40
    assert (draft_checks, top_searches) == ([], [])
    assert set(emitted) == {1}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_drafts_where_drafts_save_time(temperature: float) -> None:
    plain, _, _ = run_batch("autoregressive", lambda n, _: 0.003, temperature)
    tokens, rows, drafts = run_batch("auto", lambda n, _: 0.003 * (1 + 0.01 * n), temperature)
    assert tokens == plain
    assert drafts > 20
    assert len(rows) < 30


def test_calls_are_averaged_and_hiccups_are_forgotten() -> None:
    decoder = Auto()
    assert decoder.multi_step_pays(1.0, measures_calls=True)  # before a call was measured
    assert not decoder.multi_step_pays(1.0, measures_calls=False)
    for seconds in (0.5, *[0.001] * 12):  # the first call is longer
        decoder.record_call(seconds)
    assert decoder.call_seconds == pytest.approx(0.001, rel=0.2)
    for measures_calls in (True, False):
        assert decoder.multi_step_pays(0.07, measures_calls)
        assert not decoder.multi_step_pays(0.11, measures_calls)
    decoder.record_call(0.1)
    assert decoder.call_seconds < 0.012


def test_top_tokens_are_recorded_where_that_takes_less_than_it_saves() -> None:
    decoder = Auto()
    assert decoder.learning_pays(1e-6)
    for _ in range(50):
        decoder.record_learning(0.001)
    assert decoder.learning_pays(0.1) and not decoder.learning_pays(0.06)


def test_pass_costs_are_recorded_with_all_rows() -> None:
    recorded = []
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model.record = lambda rows, context, seconds: recorded.append((rows, context))
        llm.generate([[0, 1], [0, 1, 2], [0, 1, 2, 3]], decoder="multi-step", max_tokens=9)
    assert recorded == [(3, 3 + n) for n in range(1, 9)]  # the prefill pass needs fewer logits


def test_one_token_answer() -> None:
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n, _: 1.0)
        assert len(llm.generate([0, 1, 0, 1, 0], decoder="auto", max_tokens=1).tokens) == 1


@pytest.mark.parametrize("wrong", [{"max_drafts": 0}, {"memory": -1}, {"max_model_drafts": -1}])
def test_invalid_parameters_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError):
        Auto(**wrong)


def test_cost_table_interpolates_and_extrapolates() -> None:
    table = CostTable({100: {1: 1.0, 3: 2.0}, 200: {1: 2.0, 3: 4.0}})
    assert table.seconds(1, 100) == 1.0
    assert table.seconds(2, 100) == 1.5
    assert table.seconds(2, 150) == pytest.approx(2.25)
    assert table.seconds(5, 100) == pytest.approx(3.0)
    assert table.seconds(1, 300) == pytest.approx(3.0)
    assert table.seconds(1, 0) == 1.0
    assert CostTable.from_dict(table.to_dict()) == table
    with pytest.raises(ValueError):
        CostTable({})


def test_a_clock_that_did_not_advance_gives_costs_above_zero() -> None:
    for table in (
        CostTable({0: {1: 0.0, 2: 0.0}}),
        CostTable({0: {1: 0.0, 2: 0.0}, 9: {1: 0.0, 2: 1.0}}),
    ):
        costs = tuple(table.seconds(rows, 4) for rows in (1, 2, 3))
        assert min(costs) > 0
        assert min_useful_probability(costs, 0) < 1e9


def test_costs_are_monotonic_in_rows() -> None:
    table = CostTable({0: {1: 2.0, 2: 1.5, 4: 3.0}})
    assert table.seconds(2, 0) == 2.0
    assert default_table().seconds(11, 5) == pytest.approx(2.0)


class FileModel(ScriptedModel):
    """A scripted model that has a file path."""

    def __init__(self, path) -> None:
        super().__init__(cyclic, vocab_size=32)
        self.path = path
        self.executor = object()


def test_costs_are_measured_once_and_cached(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_is_busy", lambda: False)
    times = iter(range(1, 10_000))
    monkeypatch.setattr(costs, "time_pass", lambda model, cache, count, *_: 1.0 * next(times))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    first = costs.load(FileModel(file), tmp_path)
    assert next(times) > 1
    position = next(times)
    assert costs.load(FileModel(file), tmp_path) == first
    assert next(times) == position + 1  # nothing was measured again
    file.write_bytes(b"another model")
    assert costs.load(FileModel(file), tmp_path) != first


def test_costs_are_measured_between_passes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that runs the passes also measures, between two of them: buffers are shared."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    measured = []

    def measure(model):
        measured.append((current_thread().name, llm.engine.is_between_passes))
        return default_table(0.001)

    monkeypatch.setattr(costs, "_stored", lambda *_: measure(None))
    with LLM(FileModel(file), tokenizer=ByteTokenizer()) as llm:
        plain = llm.request([0, 1], decoder="autoregressive", max_tokens=300)
        llm.start(plain)
        found = llm.request([0, 1, 2], decoder="auto", max_tokens=9)
        assert not measured
        llm.start(found)
        while not found.done:
            sleep(0.001)
        llm.abandon(plain)
    assert measured == [("anydecode", True)]


def test_costs_of_a_busy_machine_are_replaced_when_idle(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")

    def cost(load: float, factor: float) -> float:
        monkeypatch.setattr(costs.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        monkeypatch.setattr(costs, "time_pass", lambda model, cache, count, *_: factor * count)
        return costs.load(FileModel(file), tmp_path).seconds(4, 256)

    assert cost(1e6, 1.0) == 4.0
    assert cost(1e6, 2.0) == 4.0  # as cached
    assert cost(0.0, 3.0) == 12.0
    assert cost(0.0, 4.0) == cost(1e6, 5.0) == 12.0


def test_time_of_other_processes_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that waits for the cores takes a second longer in wall time."""
    now = {"clock": 0.0, "work": 0.0}
    monkeypatch.setattr(costs, "perf_counter", lambda: now["clock"])
    model = ScriptedModel(lambda seen: np.zeros(32, np.float32), vocab_size=32, max_positions=64)

    class Waiting:
        spec, new_cache = model.spec, model.new_cache

        def run(self, rows, cache, want):
            now["clock"] += 1.0 + 0.25 * len(rows)
            now["work"] += 0.5 * len(rows)
            return type("Output", (), {"logits": np.zeros((len(rows), 32), np.float32)})()

    waiting = Waiting()
    assert costs.measure(waiting, rows=(1, 4), contexts=(16,)).seconds(4, 16) == 2.0
    waiting.executor = SimpleNamespace(threads=2, processor_seconds=lambda: now["work"])
    assert costs.measure(waiting, rows=(1, 4), contexts=(16,)).seconds(4, 16) == 1.0


def test_broken_cost_file_is_measured_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_is_busy", lambda: False)
    monkeypatch.setattr(costs, "time_pass", lambda model, cache, count, *_: 1.0 * count)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    costs.load(FileModel(file), tmp_path)
    for stored in (tmp_path / "costs").iterdir():
        stored.write_text("{}")
    assert costs.load(FileModel(file), tmp_path).seconds(4, 256) == 4.0


def test_models_without_a_file_use_the_default_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "time_pass", lambda *_: 1 / 0)
    assert costs.load(ScriptedModel(cyclic, vocab_size=32)) == default_table()


def test_measure_times_all_row_counts_and_contexts() -> None:
    model = ScriptedModel(lambda seen: np.zeros(32, np.float32), vocab_size=32, max_positions=64)
    passes_run = []

    class Recording:
        spec = model.spec
        new_cache = model.new_cache

        def run(self, rows, cache, want):
            passes_run.append((len(rows), int(rows.prefix[len(rows) // 2])))
            assert rows.prefix[-1] == rows.positions[-1] + 1
            return type("Output", (), {"logits": np.zeros((len(rows), 32), np.float32)})()

    table = costs.measure(Recording(), rows=(1, 4), contexts=(16, 1024), rounds=2)
    assert set(passes_run) == {(1, 17), (4, 17), (1, 61), (4, 61)}
    assert table.seconds(4, 16) >= table.seconds(1, 16) > 0


def test_cost_correction_converges() -> None:
    correction = CostCorrection()
    assert correction(8) == 1.0
    for _ in range(1000):
        correction.record(1, 1.0)
        correction.record(8, 3.0)
    assert correction(1) == pytest.approx(1.0, abs=0.01)
    assert correction(9) == pytest.approx(3.0, abs=0.01)
    assert correction(100) == correction(9)
    correction.record(1, 1000.0)  # a hiccup
    assert correction(1) < 1.2


def test_cost_correction_of_rare_row_counts_follows() -> None:
    correction = CostCorrection()
    correction.record(8, 1.0)
    for _ in range(300):
        correction.record(1, 2.0)
    assert correction(1) == pytest.approx(2.0, abs=0.01)
    assert 1.6 < correction(8) < 2.0


def stepwise(correction: CostCorrection, rows: int) -> float:
    """The wrong twin: one factor for all rows of one bit length."""
    return correction(1 << rows.bit_length() - 1)


def test_a_cost_correction_has_no_step_between_two_numbers_of_rows() -> None:
    """Passes of one sequence with drafts may take less than the table says, and those of several
    sequences more. A draft must not seem to be free where both meet."""
    table, correction = CostTable({0: {1: 0.003, 8: 0.006, 16: 0.01}}), CostCorrection()
    for _ in range(400):
        for rows, ratio in ((1, 1.0), (4, 1.3), (8, 0.9), (12, 0.9)):
            correction.record(rows, ratio)
    for rows, ratio in ((1, 1.0), (4, 1.3), (8, 0.9), (12, 0.9)):
        assert correction(rows) == pytest.approx(ratio, rel=0.03)
    for factor, is_smooth in ((correction, True), (lambda n: stepwise(correction, n), False)):
        factors = [factor(rows) for rows in range(4, 17)]
        drops = [before / after for before, after in pairwise(factors)]
        assert (max(drops) < 1.15) == is_smooth
        if not is_smooth:  # the eighth row would save a quarter of the pass
            assert factor(8) * table.seconds(8, 0) < factor(7) * table.seconds(7, 0)


def test_more_rows_never_cost_less() -> None:
    cheaper = FixedCosts(lambda rows, _: 0.01 if rows < 8 else 0.006 + 0.001 * (rows - 8))
    costs = cheaper.pass_seconds(6, 16, 0)
    assert costs[:7] == (0.01,) * 7 and costs == tuple(sorted(costs)) and costs[-1] > 0.015


def test_uniformly_slow_machine_scales_all_costs() -> None:
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        cost_model = llm.cost_model
        cost_model.seconds(1, 0)
        for _ in range(200):
            for rows in (1, 3, 9):
                cost_model.record(rows, 10, 2 * default_table().seconds(rows, 10))
        for rows in (1, 3, 9):
            assert cost_model.seconds(rows, 10) == pytest.approx(
                2 * default_table().seconds(rows, 10), rel=1e-3
            )


# --- with a draft model


def test_a_chain_joins_the_nodes_that_it_shares() -> None:
    """Compared with the sum over which of the sources is right."""
    tree = CandidateTree([], [], [], [])
    a = tree.add(1, ROOT, "copy", 0.5)
    tree.add(2, ROOT, "past", 0.2)
    tree.add(3, a, "copy", 0.25)
    joined = with_chain(tree, [(1, 0.6), (4, 0.5)], "model")
    paths = {}
    for node, token in enumerate(joined.tokens):
        parent = joined.parents[node]
        paths[(*(paths_of(joined, parent)), token)] = joined.probabilities[node]
        assert parent < node
    both = 1 - 0.4 * 0.5
    expected = {(1,): both, (2,): 0.2 * 0.4, (1, 4): both * 0.5, (1, 3): both * 0.5 * 0.5}
    assert paths == pytest.approx(expected)
    assert joined.probabilities == sorted(joined.probabilities, reverse=True)


def paths_of(tree: CandidateTree, node: int) -> list[int]:
    return [] if node == ROOT else [*paths_of(tree, tree.parents[node]), tree.tokens[node]]


def drafted_llm(**options: Any) -> LLM:
    """A tiny model with an EAGLE-3 drafter that it often agrees with; drafts are cheap."""
    llm = with_drafter(lambda target: eagle3_checkpoint(target), **options)
    llm.cost_model = FixedCosts(lambda rows, _: 1.0 + 0.01 * rows)
    return llm


def model_rounds(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in trace if "model" in (record["sources"] or ())]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_drafter_is_used_without_changing_the_text(temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 4, "max_tokens": 60}
    with drafted_llm() as llm:
        expected = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        alone = [llm.generate(p, decoder="auto", trace=True, **options) for p in PROMPTS]
        together = llm.generate(PROMPTS, decoder="auto", **options)
        certain = llm.generate(PROMPTS[0], decoder="auto", constraint=Regex("[ab]{30}"), **options)
        plain = llm.generate(
            PROMPTS[0], decoder="autoregressive", constraint=Regex("[ab]{30}"), **options
        )
    assert [answer.tokens for answer in alone] == expected
    assert [answer.tokens for answer in together] == expected
    assert certain.tokens == plain.tokens
    assert all(model_rounds(answer.trace or []) for answer in alone)
    assert sum(answer.stats.passes for answer in alone) < 0.9 * sum(map(len, expected))


def test_a_drafter_drafts_no_more_tokens_than_allowed() -> None:
    with drafted_llm() as llm:
        for count in (0, 1, 2):
            decoder = f"auto:max_model_drafts={count}"
            answers = [llm.generate(p, decoder=decoder, max_tokens=60, trace=True) for p in PROMPTS]
            rounds = [one for answer in answers for one in model_rounds(answer.trace or [])]
            longest = max((one["sources"].count("model") for one in rounds), default=0)
            assert longest == count


def test_a_drafter_that_is_never_right_is_left_after_some_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = ModelSource.draft

    def wrong(self: ModelSource, *given: Any) -> Any:
        chain = yield from draft(self, *given)
        self._drafted = [(token + 1) % 200 for token, _ in chain]
        return [(token, 0.9) for token in self._drafted]

    monkeypatch.setattr(ModelSource, "draft", wrong)
    with drafted_llm() as llm:
        llm.cost_model = FixedCosts(lambda rows, _: 1.0 + 0.05 * rows)
        answer = llm.generate(PROMPTS[0], decoder="auto", max_tokens=400, trace=True)
        expected = llm.generate(PROMPTS[0], decoder="autoregressive", max_tokens=400)
    rounds = model_rounds(answer.trace or [])
    assert answer.tokens == expected.tokens
    assert 1 <= len(rounds) < 40
    late = [record for record in rounds if record["position"] > len(PROMPTS[0]) + 200]
    assert 1 <= len(late) <= 5  # tried again now and then


def test_certificate_rejects_a_drafter_whose_drafts_are_taken_unverified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anydecode.decoders.framework.acceptance import AcceptanceResult, TokenExact

    walk = TokenExact.walk

    def trusting(self: TokenExact, tree: Any, scores: Scores) -> AcceptanceResult:
        if not len(tree) or (tree.sources or [""])[0] != "model":
            return walk(self, tree, scores)
        return AcceptanceResult([0], [tree.tokens[0], scores.sample(1)])

    monkeypatch.setattr(TokenExact, "walk", trusting)
    assert_rejected("auto")


@pytest.mark.parametrize("is_right", [True, False])
def test_the_text_is_not_read_for_a_drafter_whose_drafts_are_not_accepted(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes take 1 s, reading a token 0.2 s: no time that is measured here decides."""
    observe = ModelSource.observe
    drafts: list[int] = []

    def scripted(self: ModelSource, round: Any) -> None:
        if self._drafted:
            drafts.append(len(self._drafted))
            self._record((4, 3 if is_right else 0, 0.3, 4), 1.0)
            self._drafted, self.num_undrafted, self.learned.num_undrafted = [], 0, 0
        else:
            observe(self, round)

    monkeypatch.setattr(ModelSource, "observe", scripted)
    monkeypatch.setattr(LearnedDrafts, "record_reading", lambda *_: None)
    monkeypatch.setattr(ModelSource, "drafts_in_bursts", False)
    monkeypatch.setattr(CopySource, "probability", lambda *_: 0.0)  # nothing else is drafted
    monkeypatch.setattr(SuccessorPredictor, "predictions", lambda *_: [])
    with drafted_llm() as llm:
        decoder = Auto(memory=0)
        decoder.learned_drafts[True].read_seconds = 0.2
        options: dict[str, Any] = {"max_tokens": 60}
        texts = [f"request {i}: " + PROMPTS[i % 3] for i in range(6)]
        expected = [
            llm.generate(text, decoder="autoregressive", **options).tokens for text in texts
        ]
        counts = []
        for text, tokens in zip(texts, expected, strict=True):
            drafts.clear()
            assert llm.generate(text, decoder=decoder, **options).tokens == tokens
            counts.append(len(drafts))
    assert counts[0] > 0, counts
    assert all(counts) if is_right else not any(counts[-3:]), counts
