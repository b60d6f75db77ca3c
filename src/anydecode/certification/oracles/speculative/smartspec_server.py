"""Oracle test of smartspec-server (SmartSpec, arXiv:2406.14066): the draft length of maximum
goodput over all running requests, from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, oracle_test, scripted_llm
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.decoders.speculative.smartspec_server import (
    ServerGoodput,
    SharedBudget,
    SharedDrafts,
)
from anydecode.scoring.cost import DEFAULT_COSTS, CostModel
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

_TEXT: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@oracle_test("smartspec-server")
def smartspec_server() -> Iterator[Check]:
    """A pass costs 1 + 0.02 * rows; every acceptance rate starts at 0.6. Alone, 5, 6 and 7 drafts
    give 2.128, 2.132 and 2.119 tokens per cost: 6 are best. 60 requests together draft 1 each."""
    costs = FixedCosts(lambda rows, context: 1 + 0.02 * rows)
    for running in (1, 20, 60):
        expected = _best(running, 0.6, 1.0, 0.02)
        sizes = list(_sizes(ServerGoodput(), running, costs))
        yield Check(f"{running} requests draft {expected} each", sizes == [expected] * running)
    # By default, the costs of passes: 0.9 + 0.1 * rows unless measured.
    for running, by_hand in ((1, 3), (4, 1), (20, 0)):
        expected = _best(running, 0.6, 0.9, 0.1)
        sizes = list(_sizes(ServerGoodput(), running, DEFAULT_COSTS))
        is_right = sizes == [expected] * running and expected == by_hand
        yield Check(f"by default {running} requests draft {by_hand} each", is_right, str(sizes))
    sizes = list(_sizes(ServerGoodput(), 1, FixedCosts(lambda rows, context: 1.0)))
    yield Check("at most 8 drafts by default", sizes == [8], str(sizes))
    yield from _chances()
    yield from _rounds()
    same = (_best(1, 0.6, 1.0, 0.02), _best(60, 0.6, 1.0, 0.02)) == (6, 1)
    yield Check("6 drafts alone, 1 under load", same)
    with scripted_llm(drafting=ServerGoodput()) as llm:
        shared = {
            id(_shared(llm, key).requests) for key in ("prompt-lookup", "suffix", "token-recycling")
        }
        yield Check("one budget is shared by all drafters", len(shared) == 1)
        rejecting = llm.decoder("speculative-sampling:acceptance=rejection")
        yield Check(
            "a text that depends on drafts is unchanged", not isinstance(rejecting, SharedDrafts)
        )
        plain = [one.tokens for one in llm.generate(list(PROMPTS), **_TEXT)]
        drafted = llm.generate(list(PROMPTS), decoder="prompt-lookup", **_TEXT)
        yield Check("the text equals plain decoding", [d.tokens for d in drafted] == plain)
        passes = sum(one.stats.passes for one in drafted)
        yield Check("drafts are accepted", passes < sum(map(len, plain)), f"{passes} passes")
        yield Check(
            "finished requests share the budget no more",
            not _shared(llm, "prompt-lookup").requests.running,
        )


def _chances() -> Iterator[Check]:
    """The probabilities by which a pass is planned: 0.6, 0.36, 0.216 of a chain. Of a tree with two
    children of the root, and two of the first of them: 0.3 each, then 0.09 each."""
    for tree, expected in (
        (TokenTree.chain([1, 2, 3]), [0.6, 0.36, 0.216]),
        (TokenTree([1, 2, 3, 4], [-1, -1, 0, 0]), [0.3, 0.3, 0.09, 0.09]),
        (TokenTree([1, 3, 4, 2], [-1, 0, 0, -1]), [0.3, 0.09, 0.09, 0.09]),
    ):
        with scripted_llm(drafting=ServerGoodput()) as llm:
            sequence: Sequence = llm.request("abcabc", max_tokens=20).jobs[0].sequence
            budget = _shared(llm, "prompt-lookup").budget(sequence)
            found = list(budget.chances(tree))
        pairs = list(zip(found, expected, strict=False))
        is_right = len(found) == len(expected) and all(abs(a - b) < 1e-9 for a, b in pairs)
        yield Check("a pass may leave out drafts by their probabilities", is_right, str(found))
    with scripted_llm(drafting=ServerGoodput()) as llm:
        sequence = llm.request("abcabcabcabc", max_tokens=20).jobs[0].sequence
        sequence.cost_model = DEFAULT_COSTS
        request: Any = next(_shared(llm, "prompt-lookup").decode(sequence))
        optional = [round(one, 3) for one in request.optional]
    yield Check("a request's drafts are optional", optional == [0.6, 0.36, 0.216], str(optional))


def _rounds() -> Iterator[Check]:
    """What a method drafts that would draft 8 tokens: 3 at first, alone; nothing beside 19 others,
    except in the first round, in which the pass is long anyway, since it has the prompts."""
    drafts: list[list[int]] = []
    for count in (1, 20):
        prompts = [bytes([97 + n]).decode() * 2 + "abcabcabcabc" for n in range(count)]
        with scripted_llm(drafting="smartspec-server") as llm:
            answers = llm.generate(prompts, decoder="prompt-lookup:size=8", trace=True, **_TEXT)
        drafts = [[len(one["drafted"]) for one in answer.trace or ()] for answer in answers]
        if count == 1:
            yield Check("a request alone drafts 3 tokens at first", drafts[0][0] == 3, f"{drafts}")
    later = sum(sum(one[1:]) for one in drafts)
    yield Check("20 requests draft nothing", later == 0, f"{later} drafts")


def _best(running: int, rate: float, fixed: float, per_row: float) -> int:
    """The draft length of maximum goodput, from the definition."""

    def goodput(size: int) -> float:
        tokens = sum(rate**i for i in range(size + 1))
        return running * tokens / (fixed + per_row * running * (size + 1))

    return max(range(9), key=goodput)


def _sizes(server: ServerGoodput, running: int, costs: CostModel) -> Iterator[int]:
    """The draft length of each of `running` sequences, distributed over two drafters."""
    with scripted_llm(drafting=server) as llm:
        keys = ("prompt-lookup:size=20", "suffix:size=20")
        budgets = []
        for number in range(running):
            request = llm.request("abcabc", max_tokens=20)
            sequence: Sequence = request.jobs[0].sequence
            sequence.cost_model = costs
            budgets.append((sequence, _shared(llm, keys[number % 2]).budget(sequence)))
        for sequence, budget in budgets:
            assert isinstance(budget, SharedBudget)
            yield budget.size(sequence)


def _shared(llm: LLM, key: str) -> SharedDrafts:
    decoder = llm.decoder(key)
    assert isinstance(decoder, SharedDrafts)
    return decoder
