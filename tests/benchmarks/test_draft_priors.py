"""`bench draft-priors` counts what copies and earlier passes' most probable tokens would draft."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from anydecode import LLM
from anydecode.benchmarks.draft_priors import (
    DraftRates,
    Pieces,
    Searching,
    drafter_rounds,
    means,
    measure,
    prediction_losses,
    saved_by_top_tokens,
    searches,
    shared_bursts,
)
from anydecode.certification.oracles.speculative.auto import BatchCosts
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_llm, tiny_model
from anydecode.cli.main import app
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.draft_sources import (
    MATCH_LENGTHS,
    PRIORS,
    DraftRecord,
    ModelSource,
)
from anydecode.kernels.library import load_library
from anydecode.models.scripted import ByteTokenizer
from anydecode.results_log import ResultsLog


def counts(rates: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(one["rate"], one["drafts"]) for one in rates]


def test_copies_count_by_the_length_of_their_match() -> None:
    """The text is 1 2 3 | 1 2 3 4: after the second 1, 2 is copied, then 3, then 1."""
    rates = DraftRates()
    rates.read([1, 2, 3], [1, 2, 3, 4], [[]] * 4)
    found = counts(rates.summary()["copies"])
    assert found[:3] == [(1.0, 1), (1.0, 1), (0.0, 1)]
    assert found[3:] == [(None, 0)] * (len(MATCH_LENGTHS) - 3)


def test_the_prompt_is_copied_from_but_does_not_count() -> None:
    rates = DraftRates()
    rates.read([5, 6, 5, 6, 5, 6], [5], [[]])
    assert sum(one["drafts"] for one in rates.summary()["copies"]) == 1


def test_successors_are_those_of_two_tokens_where_they_are_known() -> None:
    """After 7 8 the model ranked 9 first, and after 8 alone, behind another token, 3."""
    rates = DraftRates()
    rates.read([7, 8], [9, 0, 8, 3, 7, 8, 9], [[9, 4], [0], [8], [3, 4], [7], [8], [9, 4]])
    pairs, singles = rates.successors.summary()[:2], rates.successors.summary()[2:]
    # Of the pair (7, 8): 9. Of 8 alone: 9 before 3, whose pair (0, 8) was new.
    assert counts(pairs) == [(1.0, 1), (0.0, 1)]
    assert counts(singles)[1] == (0.0, 1)


def test_ranks_are_those_of_the_last_token_alone() -> None:
    rates = DraftRates()
    rates.read([1, 2], [3, 2, 5], [[3, 5], [2], [7, 5]])
    assert counts(rates.ranks.summary())[:2] == [(0.0, 1), (1.0, 1)]


def test_texts_of_a_model_are_read() -> None:
    """Without layers, each token depends on the last one only, so that texts repeat themselves."""
    with LLM(tiny_model(residual=0.0), tokenizer=ByteTokenizer()) as llm:
        rates = measure(llm, [[97, 98], [99]], 80, 0.0, Pieces())
    assert rates.copies.hits[-1] > 0 and rates.ranks.hits[0] == rates.ranks.tries[0] > 10


def test_the_command_prints_the_rates(tmp_path: Path) -> None:
    target = tmp_path / "rates.json"
    command = ["bench", "draft-priors", "--prompts", "1", "--tokens", "8"]
    result = CliRunner().invoke(app, [*command, "--json", str(target)])
    assert result.exit_code == 0 and "copies, matches from 1 " in result.stdout
    assert "16 of 16 pieces: " in result.stderr
    found = json.loads(target.read_text())
    assert found["tokens"] == 8
    for name in ("rates", "losses", "rounds", "company", "searches", "saved"):
        assert set(found[name]) == {"0.0", "0.8"}


@pytest.mark.slow
def test_the_command_resumes_with_more_prompts(tmp_path: Path) -> None:
    target, log = tmp_path / "rates.json", tmp_path / "log"
    command = ["bench", "draft-priors", "--tokens", "8", "--json", str(target), "--keep", str(log)]
    CliRunner().invoke(app, [*command, "--prompts", "2"])
    found, first = json.loads(target.read_text()), log.read_text()
    CliRunner().invoke(app, [*command, "--prompts", "2"])
    assert json.loads(target.read_text()) == found and log.read_text() == first
    result = CliRunner().invoke(app, [*command, "--prompts", "3"])
    assert json.loads(target.read_text())["prompts"] == 3 and "48 of 48 pieces" in result.stderr
    assert log.read_text().startswith(first) and log.read_text().count("\n") == 1 + 48


def test_pieces_of_a_log_are_not_run_again(tmp_path: Path) -> None:
    """A run that ends at its third piece is resumed there; the settings are those of the log."""
    file, ran = tmp_path / "log", list[int]()

    def run(given: int) -> list[int]:
        if given == 3:
            raise KeyboardInterrupt
        ran.append(given)
        return [2 * given]

    with pytest.raises(KeyboardInterrupt):
        Pieces(ResultsLog(file, {"seed": 7})).run("a", 0.0, [1, 2, 3], run)
    pieces = Pieces(ResultsLog(file, {"seed": 7}))
    assert pieces.run("a", 0.0, [1, 2, 4], run) == [[2], [4], [8]] and ran == [1, 2, 4]
    assert pieces.run("b", 0.0, [1], run) == pieces.run("a", 0.8, [1], run) == [[2]]
    assert ran == [1, 2, 4, 1, 1]
    result = CliRunner().invoke(app, ["bench", "draft-priors", "--keep", str(file)])
    assert "it has results of other settings" in str(result.exception).replace(str(file), "it")


def test_means_have_the_errors_of_prompts() -> None:
    """Of two prompts with 1 of 2 and 3 of 4: the mean is 2 / 3, and the residuals are a third."""
    found = means(np.array([[1, 0], [3, 0]]), np.array([[2, 0], [4, 0]]), ["share", "nothing"])
    assert found["share"] == pytest.approx(2 / 3) and found["nothing"] is None
    error = (2 * 2 * (1 / 3) ** 2) ** 0.5 / 6
    assert found["errors"] == {"share": pytest.approx(error), "nothing": None}
    assert means(np.array([[1]]), np.array([[2]]), ["share"])["errors"] == {"share": None}


def test_losses_are_those_of_rates_known_before() -> None:
    """Of a class whose prior is 0.17 and counts as 8 drafts, all are right: the second one is
    expected with (8 * 0.17 + 1) / 9. A short memory follows rates that change."""
    prior = 8 * PRIORS[True][0]
    first, second = prior / 8, (prior + 1) / 9
    found = prediction_losses([(0, True), (0, True)], is_greedy=True)
    expected = -(log(first) + log(second)) / 2
    assert list(found.values()) == pytest.approx([expected] * len(found))
    changing = [(0, number // 100 % 2 == 0) for number in range(1000)]
    assert [*found] == ["15.0", "30.0", "60.0", "120.0", "inf"]
    losses = list(prediction_losses(changing, is_greedy=True).values())
    assert losses == sorted(losses) and losses[-1] > 1.5 * losses[0]


def test_rarer_searches_take_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: `auto` that searches as often as it does by default."""
    prompts = [list(b"one two three one two three one"), [97, 98]]
    with tiny_llm() as llm:
        llm.cost_model = BatchCosts(lambda rows, _: 8e-3 * (1 + 0.002 * rows), llm)
        found = searches(llm, prompts, 64, 0.8, Pieces())
        calls = [one["calls"] for one in found.values()]
        assert calls[0] == max(calls) and calls[-1] < 0.5 * calls[0]
        assert found["1"]["calls"] == pytest.approx(found["1"]["passes"])
        assert all(0 < one["drafted"] < 1 for one in found.values())

        def by_default(self: Searching, is_greedy: bool) -> int:
            self.num_bursts += 1
            return Auto.max_multi_step(self, is_greedy)

        monkeypatch.setattr(Searching, "max_multi_step", by_default)
        calls = [one["calls"] for one in searches(llm, prompts, 64, 0.8, Pieces()).values()]
        assert calls[-1] > 0.5 * calls[0]


def test_rounds_of_a_drafter_are_those_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of each answer, in which the drafter reads the text, does not count."""
    monkeypatch.setattr(ModelSource, "expected", lambda *_: DraftRecord(2.0, 1.9, 1e-9, 1e-9))
    with tiny_llm(draft=tiny_model()) as llm:
        found = drafter_rounds(llm, [[97, 98], [99]], 64, 0.0, Pieces())
    assert found["rounds"] > 4 and 0 < found["accepted"] <= found["drafts"]
    assert found["seconds"] == pytest.approx(found["drafts"] * found["seconds_per_draft"])
    with tiny_llm() as llm:
        found = drafter_rounds(llm, [[97, 98]], 16, 0.0, Pieces())
    assert found["rounds"] == 0 and found["drafts"] is found["errors"]["drafts"] is None


@pytest.mark.skipif(load_library() is None, reason="needs the native kernels")
def test_drafts_in_company_are_those_of_bursts_that_all_ask_for_some() -> None:
    prompts = [list(b"one two three one two three one"), [97, 98], [99], list(b"tick tock tick")]
    with tiny_llm() as llm:
        llm.cost_model = BatchCosts(lambda rows, _: 8e-3 * (1 + 0.002 * rows), llm)
        found = shared_bursts(llm, [*prompts, [100]], 64, 0.0, Pieces())
        assert found["passes"] > 40 and 0 < found["share"] <= 1
        assert 0 < found["accepted"] <= found["drafts"]
        # No draft saves time where every row costs a pass, and a single prompt makes no group.
        llm.cost_model = BatchCosts(lambda rows, _: 8e-3 * rows, llm)
        assert shared_bursts(llm, prompts, 16, 0.0, Pieces())["passes"] == 0
        assert shared_bursts(llm, prompts[:3], 16, 0.0, Pieces())["passes"] == 0


def test_recording_top_tokens_saves_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same passes are counted with an `auto` that finds calls free, or endless. Passes take so
    long that what else was measured does not count."""
    monkeypatch.setattr(Auto, "record_call", lambda *_: None)
    prompts, passes = [[97, 98], [99]], {}
    with LLM(tiny_model(residual=0.0), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda rows, _: 1000.0 + rows)
        found = saved_by_top_tokens(llm, prompts, 64, 0.8, Pieces())
        for seconds in (0.0, 1e9):
            decoder, passes[seconds] = Auto(max_model_drafts=0), 0
            decoder.call_seconds, decoder.num_calls = seconds, 1
            for prompt in prompts:
                llm.clear()
                decoder.clear()
                answer = llm.generate(
                    prompt, decoder=decoder, max_tokens=64, temperature=0.8, seed=1
                )
                passes[seconds] += answer.stats.passes
    assert found["share"] == pytest.approx(1 - passes[0.0] / passes[1e9]) and found["share"] > 0
