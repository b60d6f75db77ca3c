"""Random requests of every method and option beside each other on a used engine: the same texts as
alone, no errors but refusals in one line, and nothing is left."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Seq
from random import Random

import pytest

from anydecode.engine.engine import Engine, Job
from anydecode.errors import OutOfMemoryError
from anydecode.scoring.sequence import Sequence
from random_scenarios import Failure, Player, Scenario, alone, play, random_scenario
from random_worlds import WORLDS

#: Worlds that do not need other packages.
NAMES = [name for name in WORLDS if name != "torch"]


def played(seeds: range, names: Seq[str] = NAMES, keys: Seq[str] = ()) -> Counter[str]:
    """The number of finished requests by method, in these worlds, of all methods or of `keys`."""
    finished: Counter[str] = Counter()
    for seed in seeds:
        scenario = random_scenario(Random(seed), names, keys)
        failures, counts = play(scenario)
        assert not failures, f"{failures[0]}\n--scenario {scenario.source()!r}"
        finished += counts
    return finished


def test_random_requests_beside_each_other() -> None:
    assert len(played(range(5))) > 5


def test_requests_that_read_embeddings_beside_each_other() -> None:
    """Rejects a model whose embeddings are wider than its hidden states."""
    assert played(range(6), ["scripted"], ["superposed"])["superposed"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(6, 486, 40))
def test_many_random_requests_beside_each_other(start: int) -> None:
    assert len(played(range(start, start + 40))) > 30


def test_a_search_that_runs_out_of_memory_ends_with_one_line_and_changes_no_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {"decoder": "autoregressive", "max_tokens": 17, "temperature": 0.8, "ignore_eos": True}
    search = {**plain, "decoder": "best-of-n", "max_tokens": 90}
    requests = [
        {"prompt": [97] * 150, "seed": 0, **search},
        *({"prompt": "zqzqzqzq", "seed": seed, **plain} for seed in range(3)),
    ]
    events = [event for number in range(4) for event in (("start", number), ("steps", 2))]
    scenario = Scenario("tiny", {"cache_positions": 200}, requests, events)
    player = Player(scenario)
    assert player.play() == []
    kinds = [kind for kind, _ in player.outcomes.values()]
    assert sorted(kinds) == ["out of memory", "texts", "texts", "texts"]
    end = Engine._end

    def with_two_lines(self: Engine, job: Job, error: BaseException | None) -> None:
        is_memory = isinstance(error, OutOfMemoryError)
        end(self, job, OutOfMemoryError(f"{error}\nat a place") if is_memory else error)

    monkeypatch.setattr(Engine, "_end", with_two_lines)
    assert [one.kind for one in play(scenario)[0]] == ["engine: AssertionError"]


@pytest.mark.parametrize("decoder", ["beam", "best-of-n"])
def test_a_search_that_fits_alone_fits_in_company_too(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the smallest cache in which it ends alone, beside another request and preempted."""
    plain = {"max_tokens": 12, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    search = {"prompt": [97, 98] * 20, "decoder": decoder, **plain}
    other = {"prompt": [99] * 20, "decoder": "autoregressive", **plain}
    sizes = range(41, 300)
    index = bisect_left(
        sizes, True, key=lambda size: alone("tiny", {"cache_positions": size}, search)[0] == "texts"
    )
    events = [("start", 0), ("steps", 5), ("start", 1), ("steps", 3), ("preempt", 0), ("steps", 6)]
    for prefix_cache in (True, False):
        engine = {"cache_positions": sizes[index], "prefix_cache": prefix_cache}
        scenario = Scenario("tiny", engine, [search, other], [*events, ("preempt", 1)])
        player = Player(scenario)
        assert player.play() == []
        assert [kind for kind, _ in player.outcomes.values()] == ["texts", "texts"]

    def end(self: Engine, job: Job) -> None:
        message = "the key-value cache holds too few positions; increase cache_positions"
        self._end(job, OutOfMemoryError(message))

    monkeypatch.setattr(Engine, "preempt", end)
    assert "out of memory instead of texts" in {one.kind for one in play(scenario)[0]}


def failures_of(seeds: range, names: list[str]) -> list[Failure]:
    """What fails in these scenarios."""
    return [one for seed in seeds for one in play(random_scenario(Random(seed), names))[0]]


def test_noise_that_depends_on_the_company_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sequence.sample

    def dependent(self: Sequence, *given: object) -> int:
        if self.cost_model.num_others():
            self.noise = self.noise.forked(1)
        return sample(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Sequence, "sample", dependent)
    assert any("texts instead of" in one.kind for one in failures_of(range(6), ["scripted"]))


def test_memory_of_ended_jobs_that_is_not_freed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Engine._release

    def only_of_running(self: Engine, job: Job) -> None:
        if not job.done:
            release(self, job)

    monkeypatch.setattr(Engine, "_release", only_of_running)
    kinds = {one.kind for one in failures_of(range(2), ["tiny"])}
    assert kinds & {"left: slots", "engine: AssertionError"}


def test_a_long_prompt_gets_the_memory_of_jobs_that_are_preempted_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong twin: a job that was preempted for the prompt runs again at once, and takes what is
    then too little for it: it is preempted next for what the other one holds, and so on."""
    options = {"decoder": "speculative-sampling", "temperature": 0.0, "max_tokens": 17}
    requests = [
        {**options, "prompt": [(3 + 7 * i) % 250 for i in range(197)], "max_tokens": 1},
        {**options, "prompt": "one two three one two three one"},
        {**options, "prompt": 'name: "x", name: "y", name: "'},
    ]
    engine = {"cache_positions": 200, "drafting": "fixed"}
    events = [("start", 0), ("start", 1), ("steps", 3), ("start", 2)]
    assert play(Scenario("tiny", engine, requests, events))[0] == []
    at_once = property(lambda job: None, lambda job, request: None)
    monkeypatch.setattr(Job, "gives_way_to", at_once, raising=False)
    failures, _ = play(Scenario("tiny", engine, requests, events))
    assert "endless" in {failure.kind for failure in failures}
