"""Oracle test of the default decoder: its text in company and in multi-step bursts, its choices
against an exhaustive search, and its effect where the best choice is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import NOT_RUN, Check, Restarts, equal_tokens, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.rounds import plain_token
from anydecode.certification.tiny import tiny_llm
from anydecode.constraints.languages import Regex
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative.auto import Auto
from anydecode.decoders.speculative.draft_choice import MIN_GAIN, best_count
from anydecode.decoders.speculative.draft_sources import (
    NUM_STANDARD_ERRORS,
    PRIORS,
    AcceptanceRates,
)
from anydecode.decoders.speculative.match_cursor import NGRAM_SIZES, MatchCursor
from anydecode.engine.plan import Plan
from anydecode.kernels.native import NativeExecutor
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

VOCABULARY, PERIOD = 32, 7


def longest_match(text: list[int]) -> int:
    """The largest of `NGRAM_SIZES` for which the end of `text` occurred before, by comparison."""
    for n in NGRAM_SIZES:
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n)):
            return n
    return 0


def best_by_enumeration(tree: TokenTree, costs: list[float], others: int, drafting: float) -> float:
    """The highest rate over all sets of nodes that include their nodes' parents."""
    best = MIN_GAIN * (others + 1) / costs[0]
    for count in range(1, len(costs)):
        for nodes in combinations(range(len(tree)), count):
            if all(tree.parents[node] in (ROOT, *nodes) for node in nodes):
                num_tokens = others + 1 + sum(tree.probabilities[node] for node in nodes)
                best = max(best, num_tokens / (costs[count] + drafting))
    return best


class BatchCosts(FixedCosts):
    """Fixed costs, beside the sequences that are really running."""

    def __init__(self, cost: Callable[[int, int], float], llm: LLM) -> None:
        super().__init__(cost)
        self.engine = llm.engine

    def num_others(self) -> int:
        """The number of other sequences."""
        return max(0, len(self.engine.running) - 1)


def cyclic(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of a text that counts up modulo `PERIOD`."""
    logits = np.zeros(VOCABULARY, np.float32)
    logits[(seen[-1] + 1) % PERIOD] = 9.0
    return logits


def passes(cost: Callable[[int, int], float], others: int = 0, tokens: int = 60) -> int:
    """The number of passes that `auto` needs for a text that repeats itself."""
    with LLM(ScriptedModel(cyclic, vocab_size=VOCABULARY), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(cost, others)
        return int(llm.generate([0, 1, 2], decoder=Auto(), max_tokens=tokens).stats.passes)


@oracle_test("auto")
def auto() -> Iterator[Check]:
    """The text of plain decoding in company; matches, rates and choices against oracles. Drafts are
    accepted where rows are cheap, and not proposed where they save no time."""
    for temperature in (0.0, 0.8):
        yield from _company(temperature)
    random = np.random.default_rng(6)
    wrong = 0
    for _ in range(20):
        history, text = NgramIndex(NGRAM_SIZES), []
        cursor = MatchCursor(history)
        for token in random.integers(0, 3, 40).tolist():
            history.append(token)
            text.append(token)
            cursor.step(text)
            here = text[cursor.position - cursor.length : cursor.position]
            is_match = not cursor.length or here == text[-cursor.length :]
            wrong += not is_match or cursor.length < longest_match(text)
    yield Check("follows a match of the maximum length", wrong == 0)
    rates = AcceptanceRates(PRIORS[True], weight=2.0)
    for hit in (True, True, False, True):
        rates.record(0, hit)
    rate = (2 * PRIORS[True][0] + 3) / 6
    bound = rate - NUM_STANDARD_ERRORS * (rate * (1 - rate) / 6) ** 0.5
    yield Check("rates and their lower bounds by hand", abs(rates[0] - bound) < 1e-12)
    yield Check("rates of other kinds are unchanged", rates.rates()[1:] == list(PRIORS[True][1:]))
    yield from _choices(random)
    yield Check("drafts are accepted where rows are cheap", passes(lambda n, _: 1 + 0.02 * n) <= 20)
    yield Check("no drafts where every row costs a pass", passes(lambda n, _: float(n)) == 60)
    steep = 1 + 0.02 * np.maximum(np.arange(999) - 8, 0) * 40
    alone, crowded = passes(lambda n, _: float(steep[n])), passes(lambda n, _: float(steep[n]), 8)
    detail = f"{alone} passes alone, {crowded} in a batch"
    yield Check("fewer drafts in a batch", alone < crowded == 60, detail)
    yield from _forced()


#: Prompt, number of tokens, and how many tokens the first sequence has when this one joins.
COMPANY = (
    ("the cat sat on the mat and the cat sat on", 250, 0),
    ("a", 150, 20),
    ("one two three one two three one two", 40, 30),
    ("aaaa bbbb aaaa bbbb aaaa", 48, 30),
    ('name: "x", name: "y", name: "', 12, 30),
)


class _Plain(Decoder):
    """One token per pass, sampled by the formula from its logits."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature, self.seed = temperature, seed

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            row = np.array(scores.logits[-1])
            sequence.emit([plain_token(row, sequence.length, self.temperature, self.seed)])


def _company(temperature: float) -> Iterator[Check]:
    """The default build on a transformer with multi-step kernels, among sequences that join and
    leave while the first one runs: it is alone before, and again at the end."""
    expected = []
    for seed, (prompt, length, _) in enumerate(COMPANY):
        with tiny_llm() as llm:
            decoder = _Plain(temperature, seed)
            options: dict[str, Any] = {
                "max_tokens": length,
                "temperature": temperature,
                "seed": seed,
            }
            answer = llm.generate(prompt, decoder=decoder, ignore_eos=True, **options)
        expected.append(answer.tokens)
    for costs, restarts in (("default", False), ("low", False), ("low", True)):
        with tiny_llm() as llm:
            if costs == "low":
                llm.cost_model = BatchCosts(lambda n, _: 0.001 + 1e-5 * n, llm)
            bursts: list[int] = []
            copied: list[int] = []
            widths: list[int] = []

            def on_pass(plan: Plan, seconds: float) -> None:
                bursts.append(plan.num_passes)  # noqa: B023
                for one in plan.output_spec.drafts:
                    copied.extend(one.rows)  # noqa: B023
                widths.append(len(llm.engine.running))  # noqa: B023

            llm.engine.on_pass = on_pass
            if restarts:
                with Restarts(llm.engine, seed=3, share=0.1):
                    texts, num_drafts = _side_by_side(llm, temperature)
            else:
                texts, num_drafts = _side_by_side(llm, temperature)
            llm.engine.check_integrity()
            is_native = isinstance(getattr(llm.model, "executor", None), NativeExecutor)
        where = f"{costs} costs, T={temperature}" + (", restarted" if restarts else "")
        yield equal_tokens(f"equals plain decoding in company, {where}", texts, expected)
        yield Check(f"all sequences ran side by side, {where}", max(widths) == len(COMPANY))
        if costs == "default":  # those of a large model: drafts are rare, and there are no bursts
            continue
        yield Check(f"drafts in company, {where}", num_drafts > 0, f"{num_drafts}")
        name, copying = (
            f"several passes per multi-step burst, {where}",
            f"drafts in bursts, {where}",
        )
        if is_native:
            yield Check(name, max(bursts) > 1, f"up to {max(bursts)} passes")
            yield Check(copying, max(copied) > 1, f"up to {max(copied) - 1} drafts in a pass")
        else:
            for missing in (name, copying):
                yield Check(missing, None, f"{NOT_RUN}: needs the kernels, which cannot be built")


def _side_by_side(llm: LLM, temperature: float) -> tuple[list[list[int]], int]:
    """The tokens of each of `COMPANY`, and the number of drafts."""
    requests = [
        llm.request(
            prompt, max_tokens=length, temperature=temperature, seed=seed, ignore_eos=True,
            trace=True,
        )
        for seed, (prompt, length, _) in enumerate(COMPANY)
    ]  # fmt: skip
    first = requests[0].jobs[0].sequence
    for request, (_, _, joins) in zip(requests, COMPANY, strict=True):
        llm.driver.advance(lambda: requests[0].done or len(first.tokens) >= joins)  # noqa: B023
        llm.start(request, background=False)
    llm.driver.advance(lambda: all(request.done for request in requests))
    answers = [request.generation() for request in requests]
    drafts = sum(len(record["drafted"]) for answer in answers for record in answer.trace or ())
    return [answer.tokens for answer in answers], drafts


def _choices(random: np.random.Generator) -> Iterator[Check]:
    worse = 0
    for _ in range(60):
        tree = TokenTree()
        for node in range(6):
            parent = int(random.integers(-1, node)) if node else ROOT
            tree.add(node, parent)
            above = 1.0 if parent == ROOT else tree.probabilities[parent]
            bound = min([above, *tree.probabilities.values()])
            tree.probabilities[node] = bound * float(random.random())
        costs = [1.0, *(1 + np.cumsum(random.random(6) * 0.4))]
        others, drafting = int(random.integers(0, 4)), float(random.random() * 0.1)
        nodes = range(best_count(tree.probabilities.values(), costs, others, drafting))
        num_tokens = others + 1 + sum(tree.probabilities[node] for node in nodes)
        rate = (
            num_tokens / (costs[len(nodes)] + drafting)
            if nodes
            else MIN_GAIN * num_tokens / costs[0]
        )
        whole = all(tree.parents[node] in (ROOT, *nodes) for node in nodes)
        worse += not whole or rate < best_by_enumeration(tree, costs, others, drafting) - 1e-12
    yield Check("the chosen nodes equal an exhaustive search over the tree", worse == 0)


def _forced() -> Iterator[Check]:
    """`tell me (yes|yEs)[.]` has no repetitions to draft from; everything but the choice is drafted
    from the constraint."""
    constraint = Regex("tell me (yes|yEs)[.]")
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(lambda n, _: 1 + 0.02 * n)
        plain = llm.generate("?", constraint=constraint, decoder="autoregressive")
        answer = llm.generate("?", constraint=constraint, decoder=Auto(), trace=True)
    drafted = [one["sources"] for one in answer.trace or ()]
    expected = [["constraint"] * len("tell me y"), ["constraint"] * len("s.")]
    same = answer.tokens == plain.tokens and answer.stats.passes == 2
    yield Check("tokens forced by a constraint are drafted", same and drafted == expected)
