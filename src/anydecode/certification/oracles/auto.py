"""Oracle tests of the default decoder: its choices against an exhaustive search, and its effect
where the best choice is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.constraints.languages import Regex
from anydecode.decoders.speculative.auto import (
    MIN_GAIN,
    NUM_STANDARD_ERRORS,
    PRIORS,
    AcceptanceRates,
    Auto,
    best_count,
)
from anydecode.decoders.speculative.copies import NGRAM_SIZES, MatchCursor, TokenHistory
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
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


class FixedCosts:
    """A cost model in which a pass over n rows takes `cost(n)` seconds, beside `num_others` other
    sequences."""

    def __init__(self, cost: Callable[[int], float], num_others: int = 0) -> None:
        self.cost = cost
        self._num_others = num_others

    def seconds(self, rows: int, context: int) -> float:
        return self.cost(rows)

    def num_others(self) -> int:
        return self._num_others


def cyclic(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of a text that counts up modulo `PERIOD`."""
    logits = np.zeros(VOCABULARY, np.float32)
    logits[(seen[-1] + 1) % PERIOD] = 9.0
    return logits


def passes(cost: Callable[[int], float], others: int = 0, tokens: int = 60) -> int:
    """The number of passes that `auto` needs for a text that repeats itself."""
    with LLM(ScriptedModel(cyclic, vocab_size=VOCABULARY), tokenizer=ByteTokenizer()) as llm:
        llm.cost_model = FixedCosts(cost, others)
        return int(llm.generate([0, 1, 2], decoder=Auto(), max_tokens=tokens).stats.passes)


@oracle_test("auto")
def auto() -> Iterator[Check]:
    """Matches, rates and choices against oracles. Drafts are accepted where rows are cheap, and not
    proposed where they do not pay."""
    random = np.random.default_rng(6)
    wrong = 0
    for _ in range(20):
        history, text = TokenHistory(), []
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
    yield Check("drafts are accepted where rows are cheap", passes(lambda n: 1 + 0.02 * n) <= 20)
    yield Check("no drafts where every row costs a pass", passes(lambda n: float(n)) == 60)
    steep = 1 + 0.02 * np.maximum(np.arange(999) - 8, 0) * 40
    alone, crowded = passes(lambda n: float(steep[n])), passes(lambda n: float(steep[n]), 8)
    detail = f"{alone} passes alone, {crowded} in a batch"
    yield Check("fewer drafts in a batch", alone < crowded == 60, detail)
    yield from _forced()


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
        llm.cost_model = FixedCosts(lambda n: 1 + 0.02 * n)
        plain = llm.generate("?", constraint=constraint, decoder="autoregressive")
        answer = llm.generate("?", constraint=constraint, decoder=Auto(), trace=True)
    drafted = [one["sources"] for one in answer.trace or ()]
    expected = [["constraint"] * len("tell me y"), ["constraint"] * len("s.")]
    same = answer.tokens == plain.tokens and answer.stats.passes == 2
    yield Check("tokens forced by a constraint are drafted", same and drafted == expected)
