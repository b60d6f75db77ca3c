"""The prefix caches of a target and of the drafter that reads its states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random
from typing import Any

import pytest

from anydecode.engine.plan import Plan
from anydecode.memory.prefix import BLOCK
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring import sequence_data
from anydecode.scoring.sequence import TARGET
from random_worlds import world

#: Drafters by world, and the positions before a row whose states they read.
DRAFTERS = {"eagle": ("eagle", 1), "mtp": ("mtp", 1), "dflash": ("dflash", 0)}


def left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, seeds: Seq[int]
) -> tuple[set[tuple[int, int]], int]:
    """What drafters leave out in random chats, whose earlier turns are cached, by first position
    and count; and the number of positions that the target took from its cache."""
    decoder, _ = DRAFTERS[name]
    skip, found, num_cached = SequenceCache.skip, set[tuple[int, int]](), 0

    def recorded(self: SequenceCache, tokens: Seq[int], *given: Any) -> None:
        if len(tokens):
            found.add((self.length, len(tokens)))
        skip(self, tokens, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceCache, "skip", recorded)
        for seed in seeds:
            random = Random(seed)
            with world(name).open(cache_positions=2048) as llm:
                text = [random.randrange(97, 123) for _ in range(random.randrange(4, 80))]
                for _ in range(5):
                    answer = llm.generate(
                        list(text), decoder=decoder, max_tokens=random.randrange(4, 60),
                        temperature=random.choice([0.0, 0.8]), seed=seed, ignore_eos=True,
                    )  # fmt: skip
                    num_cached += answer.stats.num_cached_tokens
                    text += answer.tokens
                    text += [random.randrange(97, 123) for _ in range(random.randrange(1, 30))]
    return found, num_cached


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_leave_out_nothing_of_a_chat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: the target takes all that it has cached, so that a drafter whose own cache ends
    a block before leaves that block out."""
    _, lag = DRAFTERS[name]
    found, num_cached = left_out(monkeypatch, name, range(4))
    assert found == ({(0, lag)} if lag else set()) and num_cached > 100 * BLOCK // 10
    monkeypatch.setattr(sequence_data, "MAX_COMPUTED_AGAIN", 0)
    twin, num_more = left_out(monkeypatch, name, range(4))
    assert any(count >= BLOCK // 2 for first, count in twin if first) and num_more > num_cached


@pytest.mark.parametrize("rule", ["token-exact", "rejection"])
def test_a_pass_during_which_its_sequence_is_preempted_leaves_no_states(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong twin: the states of the released positions are kept, and the drafter reads them after
    the restart, when the target's cache begins again with what is in the prefix cache."""
    prompt, decoder = [97 + i % 7 for i in range(75)], f"eagle:acceptance={rule}"
    options = {"max_tokens": 20, "seed": 3, "ignore_eos": True, "temperature": 0.8}

    def texts(row: int) -> list[int]:
        """A text whose sequence is preempted during the pass that computes prompt row `row`."""
        with world("eagle").open(cache_positions=512, row_budget=24) as llm:
            request = llm.request(prompt, decoder=decoder, **options)
            (job,), runner = request.jobs, llm.engine.runners[TARGET]
            run = runner.run

            def preempting(plan: Plan) -> Any:
                output = run(plan)
                length = job.sequence.kv_cache().length
                if length > row and not llm.engine.num_preemptions:
                    llm.engine.preempt(job)
                return output

            monkeypatch.setattr(runner, "run", preempting)
            llm.start(request, background=False)
            llm.driver.advance(lambda: request.done)
            assert llm.engine.num_preemptions == (row < 1000)
            llm.engine.check_integrity()
            return request.generation().tokens

    plain = texts(1000)
    assert [texts(row) for row in (0, 30, 60, 74, 80)] == [plain] * 5
