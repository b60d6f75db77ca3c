"""The default decoder: right whatever it drafts, and never a fool about what drafts cost."""

from __future__ import annotations

from threading import current_thread
from time import sleep

import numpy as np
import pytest

from anydecode.decoders.speculative import auto as module
from anydecode.decoders.speculative.auto import (
    Auto,
    Growth,
    Guesser,
    Rates,
    Source,
    best_count,
    grown,
    needed,
)
from anydecode.decoders.speculative.copies import SEPARATOR, MatchCursor, TokenHistory
from anydecode.decoders.speculative.successors import WIDTH, Successors
from anydecode.engine import costs
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.certify import certify_one
from anydecode.evaluation.mechanisms.auto import FixedCosts, cyclic, passes
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.cost import CostCorrection, CostTable, default_table
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT


def test_the_certificate() -> None:
    certificate = certify_one("auto")
    assert certificate.passed, [check for check in certificate.checks if not check.passed]


def test_a_careless_acceptance_breaks_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydecode.decoders.speculative.acceptance import AcceptanceResult, TokenExact

    def careless(self, tree, scores):
        path = tree.path(len(tree) - 1) if len(tree) else []
        return AcceptanceResult(
            path, [tree.tokens[n] for n in path] + [scores.sample(len(path) and path[-1] + 1)]
        )

    monkeypatch.setattr(TokenExact, "walk", careless)
    monkeypatch.setattr(module, "LEAST_GAIN", 0.0)
    checks = {check.name: check.passed for check in certify_one("auto").checks}
    assert not checks["equals plain decoding, scripted, T=0.0"]


def test_a_greedy_budget_breaks_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydecode.evaluation.mechanisms import auto as checks

    everything = lambda chances, costs, others, drafting: len(chances)  # noqa: E731
    monkeypatch.setattr(checks, "best_count", everything)
    assert not all(check.passed for check in checks.auto())


def test_dear_rows_are_never_drafted_for() -> None:
    assert passes(lambda n: float(n)) == 60
    assert passes(lambda n: 1.0) < 15


def test_what_earlier_answers_said_is_drafted_and_can_be_forgotten() -> None:
    random = np.random.default_rng(2)
    text = random.permutation(60).tolist()
    following = dict(zip(text, [*text[1:], 0], strict=True))

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(64, np.float32)
        logits[following.get(seen[-1], 0)] = 9.0
        return logits

    with LLM(ScriptedModel(script, vocab_size=64), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n: 1 + 0.02 * n)
        first = llm.generate([text[0]], decoder="auto", max_tokens=40)
        again = llm.generate([text[0]], decoder="auto", max_tokens=40, trace=True)
        llm.clear()
        cold = llm.generate([text[0]], decoder="auto", max_tokens=40)
    assert first.tokens == again.tokens == cold.tokens == text[1:41]
    assert again.stats.passes < first.stats.passes == cold.stats.passes
    assert any("past" in (record["sources"] or []) for record in again.trace)
    assert all(record["verify_seconds"] >= 0 for record in again.trace)


def test_memory_is_bounded() -> None:
    decoder = Auto(memory=50)
    for _ in range(20):
        decoder._learn(list(range(9)))
        assert len(decoder.past) <= 50
    decoder._learn(list(range(200)))
    assert len(decoder.past) <= 50


def test_old_guesses_fade() -> None:
    rates = Rates(module.PRIORS[True])
    for _ in range(500):
        rates.note(3, True)
    for _ in range(120):
        rates.note(3, False)
    assert rates[3] < 0.2
    assert rates.shares()[0] == pytest.approx(module.PRIORS[True][0])


def test_little_evidence_counts_for_less() -> None:
    few, many = Rates([0.5], weight=4.0), Rates([0.5], weight=400.0)
    assert few[0] < many[0] < 0.5


def test_chains_go_round_where_the_text_repeats_itself() -> None:
    corpus, follower = TokenHistory(), None
    follower = MatchCursor(corpus)
    for token in [5, 1, 2, 3, 1, 2, 3]:
        corpus.append(token)
        follower.step(corpus.tokens)
    assert follower.chain(7) == [1, 2, 3, 1, 2, 3, 1]


def test_chains_end_between_texts() -> None:
    corpus = TokenHistory()
    for token in [1, 2, 3, SEPARATOR, 9]:
        corpus.append(token)
    follower = MatchCursor(corpus)
    follower.step([1, 2])
    assert follower.chain(5) == [3]


def test_a_match_is_as_long_as_the_texts_agree() -> None:
    corpus = TokenHistory()
    for token in [9, 1, 2, 3, 4, 5, 6, 7, 8, SEPARATOR]:
        corpus.append(token)
    follower = MatchCursor(corpus)
    follower.step([0, 1, 2, 3, 4, 5, 6])
    assert (follower.at, follower.length) == (7, 6)
    assert follower.ahead([5, 6], [7]).chain(3) == [8]
    assert (follower.at, follower.length) == (7, 6)


def sources(*texts: list[int], rate: float = 0.6) -> list[Source]:
    found = []
    for number, text in enumerate(texts):
        corpus = TokenHistory()
        for token in text:
            corpus.append(token)
        source = Source(f"s{number}", corpus, Rates([rate - 0.1 * number] * len(module.CLASSES)))
        source.follower.step(text[:1])
        found.append(source)
    return found


def no_guesses() -> Guesser:
    return Guesser(Successors(), Rates([0.5] * 2 * WIDTH))


def test_two_sources_share_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAUTION", 0.0)
    tree = grown([7], sources([7, 1, 2, SEPARATOR], [7, 1, 3, SEPARATOR]), no_guesses(), 3, 0.0)
    assert tree.tokens == [1, 2, 3]
    assert tree.parents == [ROOT, 0, 0]
    assert tree.sources == ["s0", "s0", "s1"]
    assert tree.chances[0] == pytest.approx(0.6)
    assert tree.chances[1] == pytest.approx(0.36)
    assert tree.chances[2] == pytest.approx(0.6 * 0.5 * 0.4)


def test_what_is_forced_stands_before_what_sources_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAUTION", 0.0)
    forced = [5, 6]
    tree = grown([7], sources([7, 1, SEPARATOR], [7, 2, SEPARATOR]), no_guesses(), 2, 0.0, forced)
    assert tree.tokens == [5, 6, 1, 2]
    assert tree.parents == [ROOT, 0, 1, 1]
    assert tree.chances == pytest.approx([1, 1, 0.6, 0.2])


def test_what_the_model_thought_likely_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the copied 1 stand the successors of the pair (7, 1), behind 4 those of 4 alone."""
    monkeypatch.setattr(module, "CAUTION", 0.0)
    known = Successors()
    known.learn(9, 4, [8, 5])
    known.learn(7, 1, [4, 2])
    guesser = Guesser(known, Rates([0.5, 0.1, 0.4, 0.3]))
    tree = grown([0, 7], sources([7, 1, SEPARATOR]), guesser, 3, 0.0)
    assert tree.tokens == [1, 4, 8]
    assert tree.parents == [ROOT, 0, 1]
    assert tree.sources == ["s0", "recycled", "recycled"]
    assert tree.chances == pytest.approx([0.6, 0.3, 0.12])
    assert grown([0, 7], sources([7, 1, SEPARATOR]), guesser, 3, 0.2).tokens == [1, 4]


def test_guesses_of_a_pair_and_of_a_token_are_told_apart() -> None:
    known = Successors()
    known.learn(1, 2, [3, 4])
    assert known.find(1, 2) == (0, [3, 4])
    assert known.find(9, 2) == (WIDTH, [3, 4])
    assert known.find(1, 7) == (WIDTH, [])
    assert list(known.notes(9, 2, 4)) == [(WIDTH, False), (WIDTH + 1, True)]


def test_what_was_scored_once_is_guessed_again() -> None:
    """The text repeats no pair, but the model thinks the same behind each token, whatever stood
    before: drafts come from what it thought, and none of the text is copied."""
    order = [0, 1, 2, 0, 3, 4, 0, 5, 6, 0, 7, 8, 0, 9, 10, 0, 11, 12]

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(32, np.float32)
        logits[order[len(seen) % len(order)]] = 9.0
        return logits

    with LLM(ScriptedModel(script, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n: 1 + 0.02 * n)
        found = llm.generate([0], decoder="auto", max_tokens=50, trace=True)
        plain = llm.generate([0], decoder="autoregressive", max_tokens=50)
    assert found.tokens == plain.tokens
    drafted = {source for record in found.trace for source in record["sources"] or []}
    assert "recycled" in drafted


def test_a_part_keeps_the_shape() -> None:
    growth = Growth([4, 5, 6], [ROOT, 0, 0], ["a", "b", "c"], [0.9, 0.5, 0.1])
    kept = growth.first(2)
    assert (kept.tokens, kept.parents, kept.sources) == ([4, 5], [ROOT, 0], ["a", "b"])


def test_one_source_grows_what_it_would_beside_one_that_knows_nothing() -> None:
    (alone,) = sources([7, 1, 2, 3, 4, SEPARATOR], rate=0.7)
    silent = Source("silent", TokenHistory(), Rates([0.5] * len(module.CLASSES)))
    for count, least in ((4, 0.0), (2, 0.0), (4, 0.3)):
        found = grown([7], [alone], no_guesses(), count, least, [7])
        assert found == grown([7], [alone, silent], no_guesses(), count, least, [7])
    assert 1 < len(found.tokens) < 5


def test_no_draft_where_the_gain_is_nothing() -> None:
    assert best_count([0.1, 0.05], [1.0, 1.1, 1.2], 0, 0.0) == 0
    assert best_count([0.1, 0.05], [1.0, 1.0, 1.0], 0, 0.0) == 2
    assert best_count([0.1, 0.05], [1.0, 1.0, 1.0], 0, 0.2) == 0  # drafting takes time as well


def test_no_draft_of_less_likely_nodes_than_needed_pays() -> None:
    random = np.random.default_rng(5)
    pays = 0
    for _ in range(300):
        costs = [1.0, *(1 + np.cumsum(random.random(6) * 2))]
        others = int(random.integers(0, 5))
        bound = needed(costs, others)
        assert best_count([0.999 * bound] * 6, costs, others, 0.0) == 0
        if bound < 1.0:
            pays += 1
            assert best_count([1.001 * bound] * 6, costs, others, 0.0) > 0
    assert 50 < pays < 250
    assert needed([1.0, 2.0, 3.0], 0) > 1.0


class Company(FixedCosts):
    """Costs as given, among as many as really run."""

    def __init__(self, cost, llm: LLM) -> None:
        super().__init__(cost)
        self.engine = llm.engine

    def num_others(self) -> int:
        return max(0, len(self.engine.running) - 1)


def in_company(decoder: str, cost, temperature: float = 0.0):
    """Four repetitive texts together: their tokens, how many rows each pass had, and how many
    drafts were scored."""
    rows = []
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = Company(cost, llm)
        llm.engine.on_pass = lambda plan, seconds: rows.append(len(plan.rows))
        prompts = [[0, 1, 2, *range(first)] for first in range(1, 5)]
        options = {"max_tokens": 40, "temperature": temperature, "seed": 7, "ignore_eos": True}
        found = llm.generate(prompts, decoder=decoder, trace=True, **options)
        llm.engine.check_integrity()
    drafts = sum(len(record["drafted"]) for one in found for record in one.trace or ())
    return [one.tokens for one in found], rows, drafts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_company_that_drafts_do_not_pay_for_is_decoded_as_following_does(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is scored, no logits are searched, no text is looked through, and each token comes
    as soon as its pass is done."""
    looked, searched, emitted = [], [], []
    surest, top, emit = module._Session._surest, Scores.top, Sequence.emit

    def emitting(self, tokens, *rest):
        emitted.append(len(tokens))
        return emit(self, tokens, *rest)

    monkeypatch.setattr(module._Session, "_surest", lambda s: looked.append(s) or surest(s))
    monkeypatch.setattr(Scores, "top", lambda s, n: searched.append(s) or top(s, n))
    dear = lambda n: 0.003 * n  # noqa: E731
    following = in_company("following", dear, temperature)
    monkeypatch.setattr(Sequence, "emit", emitting)
    assert in_company("auto", dear, temperature) == following
    assert following[2] == 0 and len(following[1]) == 40
    assert (looked, searched) == ([], [])
    assert set(emitted) == {1}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_company_drafts_where_that_pays(temperature: float) -> None:
    plain, _, _ = in_company("autoregressive", lambda n: 0.003, temperature)
    tokens, rows, drafts = in_company("auto", lambda n: 0.003 * (1 + 0.01 * n), temperature)
    assert tokens == plain
    assert drafts > 20
    assert len(rows) < 30


def test_passes_are_noted_with_the_rows_of_all() -> None:
    noted = []
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model.record = lambda rows, context, seconds: noted.append((rows, context))
        llm.generate([[0, 1], [0, 1, 2], [0, 1, 2, 3]], decoder="following", max_tokens=9)
    assert noted == [(3, 3 + n) for n in range(1, 9)]  # the prompts' pass asks for fewer logits


def test_the_answer_may_be_one_token_long() -> None:
    with LLM(ScriptedModel(cyclic, vocab_size=32), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n: 1.0)
        assert len(llm.generate([0, 1, 0, 1, 0], decoder="auto", max_tokens=1).tokens) == 1


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Auto(most=0)


def test_costs_between_and_beyond_what_was_measured() -> None:
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


def test_costs_never_fall_with_rows() -> None:
    table = CostTable({0: {1: 2.0, 2: 1.5, 4: 3.0}})
    assert table.seconds(2, 0) == 2.0
    assert default_table().seconds(11, 5) == pytest.approx(2.0)


class Timed(ScriptedModel):
    """A scripted model that pretends to come from a file."""

    def __init__(self, path) -> None:
        super().__init__(cyclic, vocab_size=32)
        self.path = path
        self.executor = object()


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_is_busy", lambda: False)
    times = iter(range(1, 10_000))
    monkeypatch.setattr(costs, "_time", lambda model, cache, count, context: 1.0 * next(times))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    first = costs.load(Timed(file), tmp_path)
    assert next(times) > 1
    position = next(times)
    assert costs.load(Timed(file), tmp_path) == first
    assert next(times) == position + 1  # nothing was timed again
    file.write_bytes(b"another model")
    assert costs.load(Timed(file), tmp_path) != first


def test_costs_are_measured_where_no_pass_is_disturbed(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever runs the passes, between two of them: a model has one set of buffers."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    measured = []

    def measure(model):
        measured.append((current_thread().name, llm.engine.is_between_passes))
        return default_table(0.001)

    monkeypatch.setattr(costs, "_stored", lambda model, folder: measure(model))
    with LLM(Timed(file), tokenizer=ByteTokenizer()) as llm:
        plain = llm.request([0, 1], decoder="autoregressive", max_tokens=300)
        llm.start(plain)
        found = llm.request([0, 1, 2], decoder="auto", max_tokens=9)
        assert not measured
        llm.start(found)
        while not found.done:
            sleep(0.001)
        llm.abandon(plain)
    assert measured == [("anydecode", True)]


def test_what_a_busy_machine_costs_is_kept_until_it_is_idle(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")

    def cost(load: float, factor: float) -> float:
        monkeypatch.setattr(costs.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        monkeypatch.setattr(costs, "_time", lambda model, cache, count, context: factor * count)
        return costs.load(Timed(file), tmp_path).seconds(4, 256)

    assert cost(1e6, 1.0) == 4.0
    assert cost(1e6, 2.0) == 4.0  # as kept
    assert cost(0.0, 3.0) == 12.0
    assert cost(0.0, 4.0) == cost(1e6, 5.0) == 12.0


def test_time_of_other_processes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that has to wait for the cores: by the clock it takes a second more."""
    now = {"clock": 0.0, "work": 0.0}
    monkeypatch.setattr(costs, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(costs, "process_time", lambda: now["work"])
    model = ScriptedModel(lambda seen: np.zeros(32, np.float32), vocab_size=32, max_positions=64)

    class Waiting:
        spec, new_cache = model.spec, model.new_cache

        def run(self, rows, cache, want):
            now["clock"] += 1.0 + 0.25 * len(rows)
            now["work"] += 0.5 * len(rows)
            return type("Output", (), {"logits": __import__("torch").zeros(len(rows), 32)})()

    waiting = Waiting()
    assert costs.measure(waiting, rows=(1, 4), contexts=(16,)).seconds(4, 16) == 2.0
    waiting.executor = type("Executor", (), {"threads": 2})
    assert costs.measure(waiting, rows=(1, 4), contexts=(16,)).seconds(4, 16) == 1.0


def test_a_broken_cost_file_is_measured_anew(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_is_busy", lambda: False)
    monkeypatch.setattr(costs, "_time", lambda model, cache, count, context: 1.0 * count)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    costs.load(Timed(file), tmp_path)
    for stored in (tmp_path / "costs").iterdir():
        stored.write_text("{}")
    assert costs.load(Timed(file), tmp_path).seconds(4, 256) == 4.0


def test_models_without_a_file_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_time", lambda *_: 1 / 0)
    assert costs.load(ScriptedModel(cyclic, vocab_size=32)) == default_table()


def test_measuring_times_every_size_behind_every_context() -> None:
    model = ScriptedModel(lambda seen: np.zeros(32, np.float32), vocab_size=32, max_positions=64)
    asked = []

    class Recording:
        spec = model.spec
        new_cache = model.new_cache

        def run(self, rows, cache, want):
            asked.append((len(rows), int(rows.prefix[0])))
            assert rows.prefix[-1] == rows.positions[-1] + 1
            return type("Output", (), {"logits": __import__("torch").zeros(len(rows), 32)})()

    table = costs.measure(Recording(), rows=(1, 4), contexts=(16, 1024), rounds=2)
    assert set(asked) == {(1, 17), (4, 17), (1, 61), (4, 61)}
    assert table.seconds(4, 16) >= table.seconds(1, 16) > 0


def test_a_wrong_table_mends_itself() -> None:
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


def test_sizes_rarely_run_keep_up_with_the_machine() -> None:
    correction = CostCorrection()
    correction.record(8, 1.0)
    for _ in range(300):
        correction.record(1, 2.0)
    assert correction(1) == pytest.approx(2.0, abs=0.01)
    assert 1.6 < correction(8) < 2.0


def test_a_machine_that_is_slow_throughout_changes_no_choice() -> None:
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
