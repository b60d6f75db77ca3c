"""Oracle test of smartspec-server (SmartSpec, arXiv:2406.14066): the drafts of maximum goodput over
all running requests, from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from inspect import signature
from itertools import chain, product
from math import prod
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, oracle_test, scripted_llm
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts, LoadedCosts
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import by_probability, draft_share
from anydecode.decoders.speculative.smartspec_server import ServerGoodput, ServerShare
from anydecode.scoring.score import MultiStep, ScoreRequest
from anydecode.scoring.tree import TokenTree

#: The default of `LLM`.
KEY = "smartspec-server"
_TEXT: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
#: Numbers of accepted drafts of chains of 4, of requests of two sources, in turn.
_HISTORY: dict[str, list[tuple[int, ...]]] = {
    "a": [(4, 4, 2, 4, 3), (1, 0, 2)],
    "b": [(0, 0, 0, 1)],
}


@oracle_test("smartspec-server")
def smartspec_server() -> Iterator[Check]:
    """A pass costs 1 + `slope` * rows. The drafts of three requests, whose acceptance rates follow
    from earlier rounds, are those of the most tokens per cost over all choices."""
    for slope, with_others in ((0.02, 2), (0.1, 2), (0.3, 2), (0.1, 11)):
        costs = _costs(slope, with_others)
        shares = _observed(ServerGoodput(max_drafts=6), costs)
        expected = _best(slope, with_others + 1)
        found = [share.size(20) for share in shares]
        name = f"three of {with_others + 1} requests, {slope:g} per row: {expected} drafts"
        yield Check(name, found == list(expected), f"{found}")
    many = FixedCosts(lambda rows, context: 1.0, 3)
    sizes = [share.size(20) for share in _observed(ServerGoodput(), many)]
    yield Check("at most 8 levels by default", sizes == [8, 8, 8], f"{sizes}")
    own = [share.size(3) for share in _observed(ServerGoodput(), many)]
    yield Check("no more than the method drafts", own == [3, 3, 3], f"{own}")
    alone = FixedCosts(lambda rows, context: 1 + rows)
    shares = _observed(ServerGoodput(), alone)
    sizes = [share.size(20) for share in shares]
    yield Check("a request alone drafts as its method says", sizes == [20, 20, 20], f"{sizes}")
    chances = [list(share.chances(TokenTree.chain([1, 2]))) for share in shares]
    yield Check("its drafts are not optional", chances == [[], [], []])
    yield from _host_time()
    yield from _chances()
    yield from _trees()
    yield from _trials()
    yield from _texts()


def _costs(slope: float, others: int) -> FixedCosts:
    """A pass costs 1 + `slope` * rows."""
    return FixedCosts(lambda rows, context: 1 + slope * rows, others)


def _observed(server: ServerGoodput, costs: FixedCosts) -> list[ServerShare]:
    """The shares of three requests of two sources that have had the rounds of `_HISTORY`."""
    with scripted_llm() as llm:
        sources = {name: llm.decoder(key) for name, key in (("a", "suffix"), ("b", "copyspec"))}
        shares = []
        for name, histories in _HISTORY.items():
            for _ in histories:
                sequence = llm.request("abcabc", max_tokens=20).jobs[0].sequence
                sequence.cost_model = costs
                shares.append(server.open(sequence, sources[name]))
    histories = [*chain.from_iterable(_HISTORY.values())]
    for turn in range(max(map(len, histories))):
        for share, history in zip(shares, histories, strict=True):
            if turn < len(history):
                tree = TokenTree.chain([1, 2, 3, 4])
                share.observe(tree, list(range(history[turn])), 0.0)
    return shares


def _rates(own: Seq[int], shared: Seq[int]) -> list[float]:
    """The acceptance rate of the first four drafts of a chain. A round counts exp(-1 / 32) of the
    next one for its request, about, and exp(-1 / 256) for all of a source; the rate of a source
    begins with that of the draft before, the first one with 1, as one draft; that of a request with
    that of its source, as four."""

    def counts(history: Seq[int], depth: int, memory: int) -> tuple[float, float]:
        weights = [(1 - 1 / memory) ** age for age in range(len(history))][::-1]
        reached = [(w, n) for w, n in zip(weights, history, strict=True) if n >= depth]
        return sum(w for w, _ in reached), sum(w for w, n in reached if n > depth)

    found, rate = [], 1.0
    for depth in range(4):
        tested, accepted = counts(shared, depth, 256)
        rate = (accepted + rate) / (tested + 1)
        tested, accepted = counts(own, depth, 32)
        found.append((accepted + 4 * rate) / (tested + 4))
    return found


def _all_rates() -> list[list[float]]:
    """The rates of the three requests of `_observed`."""
    found = []
    for histories in _HISTORY.values():
        turns = range(max(map(len, histories)))
        shared = [one[turn] for turn in turns for one in histories if turn < len(one)]
        found += [_rates(own, shared) for own in histories]
    return found


def _best(slope: float, num_requests: int) -> tuple[int, ...]:
    """The numbers of drafts, up to 6 each, of the most tokens per cost."""
    rates = _all_rates()

    def goodput(counts: Seq[int]) -> float:
        tokens = float(num_requests)
        for one, count in zip(rates, counts, strict=True):
            rate = [*one, *[one[-1]] * 4]
            tokens += sum(prod(rate[: depth + 1]) for depth in range(count))
        return tokens / (1 + slope * (num_requests + sum(counts)))

    return max(product(range(7), repeat=3), key=goodput)


def _host_time() -> Iterator[Check]:
    """A pass over n rows takes 1 + n / 10 seconds, 0.3 of them beside the pass itself, which 8
    passes without drafts take once. Of 3 requests, of which one has a sure draft, 4 tokens in 1.4
    seconds are better than 3 in 1.3, but not than 3 in 1.04."""

    class Costs(FixedCosts):
        def host_seconds(self, num_sequences: int) -> float:
            return 0.3

    server = ServerGoodput(max_drafts=1)
    with scripted_llm() as llm:
        sequence = llm.request("abcabc", max_tokens=20).jobs[0].sequence
        sequence.cost_model = Costs(lambda rows, context: 1 + rows / 10, 2)
        share = server.open(sequence, llm)
    sizes = [share.size(20, can_burst) for can_burst in (False, True)]
    yield Check("passes without drafts share the time beside them", sizes == [1, 0], f"{sizes}")


def _chances() -> Iterator[Check]:
    """The probabilities by which a pass is planned: products of the rates of depth and rank. Those
    of the second and third sibling begin with 1/2 and 1/4."""
    costs = FixedCosts(lambda rows, context: 1.0, 3)
    first, second, third, fourth = _all_rates()[1]
    share = _observed(ServerGoodput(), costs)[1]
    paths = [first, first * second, first * second * third, first * second * third * fourth]
    paths.append(paths[-1] * fourth)
    for tree, expected in (
        (TokenTree.chain([1, 2, 3, 4, 5]), paths),
        (
            TokenTree([1, 2, 3, 4, 5], [-1, -1, 0, 0, -1]),
            [first, 0.5, first * second, first / 2, 0.25],
        ),
    ):
        found = list(share.chances(tree))
        close = all(abs(a - b) < 1e-9 for a, b in zip(found, expected, strict=False))
        is_right = len(found) == len(expected) and close
        yield Check("a pass may leave out drafts by their probabilities", is_right, f"{found}")
    tree = TokenTree([10, 20, 11, 21, 12], [-1, -1, 0, 1, 2])
    ordered, chances, _ = by_probability(tree, [0.8, 0.2, 0.6, 0.1, 0.5])
    is_right = (ordered.tokens, ordered.parents, list(chances)) == (
        [10, 11, 12, 20, 21],
        [-1, 0, 1, -1, 3],
        [0.8, 0.6, 0.5, 0.2, 0.1],
    )
    yield Check("the most probable nodes of a tree come first", is_right, f"{ordered.tokens}")


def _trees() -> Iterator[Check]:
    """A tree is drafted as a whole if its first level saves time, and a draft of which passes need
    all rows if these do."""
    tree = TokenTree([1, 2, 3, 4], [-1, -1, -1, -1])
    for is_whole, slope, path, expected in (
        (False, 0.1, [2], 20),
        (False, 0.1, [], 0),
        (True, 0.05, [2], 20),
        (True, 0.4, [2], 0),
        (False, 0.4, [2], 20),
    ):
        costs = _costs(slope, 1)
        share = _observed(ServerGoodput(), costs)[0]
        for _ in range(200):
            share.observe(tree, path, 0.0, is_whole)
        found = share.size(20)
        name = f"{len(path)} of 4 siblings at {slope:g} per row{', whole' * is_whole}"
        yield Check(f"{name}: {expected} drafts", found == expected, f"{found}")


def _trials() -> Iterator[Check]:
    """Drafts that were never accepted are left out, and tried again after a while."""
    costs = _costs(0.1, 3)
    share = _observed(ServerGoodput(), costs)[0]
    sizes = []
    for _ in range(1500):
        sizes.append(share.size(4))
        share.observe(TokenTree.chain([1, 2, 3, 4][: sizes[-1]]), [], 0.0)
    late = [bool(size) for size in sizes[300:]]
    is_right = 0 < sum(late) < 0.05 * len(late)
    yield Check("wrong drafts are tried now and then", is_right, f"{sum(late)} of {len(late)}")
    server = ServerGoodput()
    share = _observed(server, costs)[0]
    share.observe(TokenTree.chain([1, 2, 3, 4]), [0, 1, 2, 3], 400.0)
    sizes = []
    for _ in range(1500):
        sizes.append(share.size(4))
        share.observe(TokenTree.chain([1, 2, 3, 4][: sizes[-1]]), list(range(sizes[-1])), 0.0)
    is_right = sizes[0] == 0 and all(sizes[-100:])
    yield Check("drafts return after a slow one", is_right, f"{sizes.count(0)} rounds without")


def _texts() -> Iterator[Check]:
    with scripted_llm(drafting=KEY) as llm:
        sequence = llm.request("abcabc", max_tokens=20).jobs[0].sequence
        exact = draft_share(sequence, llm, TokenExact())
        rejecting = draft_share(sequence, llm, RejectionSampling())
    yield Check("token-exact requests share the budget", isinstance(exact, ServerShare))
    default = signature(LLM).parameters["drafting"].default
    yield Check("it is the default", default == KEY, f"{default}")
    is_own = not isinstance(rejecting, ServerShare)
    yield Check("but not where the text depends on the drafts", is_own)
    with scripted_llm(drafting=KEY) as llm:
        plain = [one.tokens for one in llm.generate(list(PROMPTS), **_TEXT)]
        drafted = llm.generate(list(PROMPTS), decoder="prompt-lookup", **_TEXT)
        server: Any = llm.resources.draft_policy
    yield Check("the text equals plain decoding", [d.tokens for d in drafted] == plain)
    passes = sum(one.stats.passes for one in drafted)
    yield Check("drafts are accepted", passes < sum(map(len, plain)), f"{passes} passes")
    yield Check("finished requests share the budget no more", not server.running)
    drafts = [_num_drafts(drafting) for drafting in (KEY, "fixed")]
    is_less = drafts[0] < 0.3 * drafts[1]
    yield Check("20 requests together draft less than their methods say", is_less, f"{drafts}")
    yield from _planned()


def _num_drafts(drafting: str) -> int:
    """The verified drafts of 20 requests, of which few are accepted."""
    prompts = [bytes([97 + n]).decode() * 2 + "abcabcabcabc" for n in range(20)]
    with scripted_llm(drafting=drafting) as llm:
        llm.cost_model = LoadedCosts(llm.engine, 0.1)
        answers = llm.generate(prompts, decoder="prompt-lookup:size=8", trace=True, **_TEXT)
    return sum(len(one["drafted"]) for answer in answers for one in answer.trace or ())


def _planned() -> Iterator[Check]:
    """What a request beside another one asks for, and what is kept of it."""
    with scripted_llm(drafting=KEY) as llm:
        llm.cost_model = FixedCosts(lambda rows, context: 1.0, 1)
        sequence = llm.request("abcabcabcabc", max_tokens=20).jobs[0].sequence
        request: Any = next(llm.decoder("prompt-lookup:size=3").decode(sequence))
    is_right = isinstance(request, ScoreRequest) and list(request.optional) == [1.0, 1.0, 1.0]
    yield Check("a request's drafts are optional", is_right, f"{list(request.optional)}")
    with scripted_llm(drafting=KEY) as llm:
        llm.cost_model = FixedCosts(lambda rows, context: float(rows**2), 9)
        actions = []
        for key in ("prompt-lookup", "suffix", "speculative-sampling", "rsd", "token-recycling"):
            sequence = llm.request("abcabcabcabc", max_tokens=20).jobs[0].sequence
            sequence.emit([97])
            actions.append(type(next(llm.decoder(key).decode(sequence))))
    is_right = actions == [*[MultiStep] * 4, ScoreRequest]
    name = "without drafts tokens are generated several at a time, unless a method learns from each"
    yield Check(name, is_right, f"{actions}")
