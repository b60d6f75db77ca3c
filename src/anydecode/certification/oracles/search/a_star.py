"""Oracle test of a-star (Chatziveroglou, arXiv:2505.13672): the search replayed on texts alone,
hand-made trees, and the best text under a perfect reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.certification.oracles.search.particle_filtering import PIECES, line_model
from anydecode.decoders.search.a_star import AStar
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

PROMPT, END = [0, 1], 3
Texts = tuple[int, ...]


def words(text: list[int]) -> str:
    return "".join(PIECES[token] for token in text if token < len(PIECES))


def replay(
    model: ScriptedModel, seed: int, limit: int, *, k: int = 4, budget: int = 64, frontier: int = 64
) -> list[int]:
    """The answer of the default build, every step from the first token."""
    end = len(PIECES)

    def is_over(text: list[int]) -> bool:
        return len(text) == limit or text[-1:] == [end]

    def reward(text: list[int]) -> float:
        rows = [log_softmax(logits_after(model, PROMPT + text[:i])) for i in range(len(text))]
        logs = [row[token] for row, token in zip(rows, text, strict=True)]
        return min(1.0, math.exp(sum(logs) / len(logs)))

    def grown(text: list[int], noise: Noise | None) -> list[int]:
        new = list(text)
        while not is_over(new):
            row = logits_after(model, PROMPT + new).astype(np.float64)
            if noise is not None:
                row = row + noise.gumbel(range(len(row)), len(PROMPT) + len(new))
            new.append(int(row.argmax()))
            if noise is not None and "\n\n" in words(new)[max(0, len(words(text)) - 1) :]:
                break
        return new

    #: Cost, rest, depth, order, text.
    open_nodes: list[tuple[float, float, int, int, list[int]]] = [(0.0, 1.0, 0, 0, [])]
    whole: list[tuple[float, list[int]]] = []
    for expansion in range(budget + 1):
        open_nodes.sort(key=lambda node: (node[0] + node[1], -node[2], node[3]))
        cost, rest, depth, _, text = open_nodes[0]
        if text and is_over(text):
            return text
        if expansion == budget:
            break
        children: dict[Texts, int] = {}
        for i in range(k):
            order = 1 + expansion * k + i
            children.setdefault(tuple(grown(text, Noise(seed).forked(order))), order)
        open_nodes = open_nodes[1:]
        for child, order in children.items():
            h = 1 - reward(list(child))
            open_nodes.append((cost + max(0.0, h - rest), h, depth + 1, order, list(child)))
            if is_over(list(child)):
                whole.append((h, list(child)))
        open_nodes.sort(key=lambda node: (node[0] + node[1], -node[2], node[3]))
        open_nodes = open_nodes[:frontier]
    return min(whole)[1] if whole else grown(text, None)


def coin_model() -> ScriptedModel:
    """Three equally probable tokens, and an end that is improbable."""
    return ScriptedModel(lambda seen: np.array([0, 0, 0, -30], np.float32), vocab_size=4)


def leaf_values(seed: int, length: int) -> dict[Texts, float]:
    """A value for every text of three tokens."""
    random = np.random.default_rng(seed)
    return {text: float(random.random()) for text in product(range(3), repeat=length)}


def perfect(values: dict[Texts, float]) -> Callable[[str, list[str]], list[float]]:
    """The reward of a beginning: the value of the best whole text that begins so."""

    def reward(prompt: str, texts: list[str]) -> list[float]:
        begins = [tuple(text.encode()) for text in texts]
        return [
            max(value for text, value in values.items() if text[: len(begin)] == begin)
            for begin in begins
        ]

    return reward


#: Rewards of a tree of two steps, and the order in which its beginnings are sampled.
TREE = {"0": 0.8, "1": 0.6, "2": 0.1, "00": 0.5, "01": 0.45, "02": 0.3, "10": 0.55, "11": 0.5,
        "12": 0.58, "20": 1.0, "21": 1.0, "22": 1.0}  # fmt: skip


def tree_order() -> list[list[str]]:
    """The beginnings that the search values in each extension. "0" has cost 0 and rest 0.2; its
    best child has cost 0.3 and rest 0.5. Then "1" with 0 and 0.4, whose best child "12" has 0.02
    and 0.42, less than all others, and is a whole text."""
    seen: list[list[str]] = []

    def reward(prompt: str, texts: list[str]) -> list[float]:
        names = ["".join(map(str, text.encode())) for text in texts]
        seen.append(sorted(names))
        return [TREE[name] for name in names]

    with LLM(coin_model(), tokenizer=ShortTokenizer(), cache_positions=4096) as llm:
        decoder = AStar(40, reward, step_tokens=1)
        answer = llm.generate(PROMPT, decoder=decoder, temperature=1.0, seed=1, max_tokens=2)
    return [*seen, ["".join(map(str, answer.tokens))]]


@oracle_test("a-star")
def a_star() -> Iterator[Check]:
    """The replays, the tree, and the best texts."""
    lines = line_model()
    settings: dict[str, dict[str, int]] = {
        "a-star": {},
        "a-star:k=3,expansions=2": {"k": 3, "budget": 2},
        "a-star:frontier=1": {"frontier": 1},
    }
    for key, budgets in settings.items():
        wrong = steps = 0
        with LLM(lines, tokenizer=PieceTokenizer(*PIECES), cache_positions=8192) as llm:
            for seed in range(12):
                found = llm.generate(PROMPT, decoder=key, temperature=1.0, seed=seed, max_tokens=24)
                wrong += found.tokens != replay(lines, seed, 24, **budgets)
                steps += found.text.count("\n\n") > 0
        detail = f"{wrong} of 12 wrong, {steps} of several steps"
        yield Check(f"{key} equals its replay", wrong == 0 < steps, detail)
    expected = [["0", "1", "2"], ["00", "01", "02"], ["10", "11", "12"], ["12"]]
    order = tree_order()
    yield Check("the tree is searched in order", order == expected, str(order))
    with LLM(coin_model(), tokenizer=ShortTokenizer(), cache_positions=4096) as llm:
        missed = 0
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 4}
        for seed in range(20):
            values = leaf_values(seed, 4)
            decoder_of = AStar(40, perfect(values), step_tokens=1, expansions=4)
            found = llm.generate(PROMPT, decoder=decoder_of, seed=seed, **options)
            missed += tuple(found.tokens) != max(values, key=lambda text: values[text])
        yield Check("a perfect reward finds the best text", missed == 0, f"{missed} of 20 missed")


@measure("a-star", "reward lost against sampling", samples=60, margin=-0.1)
def a_star_gain(samples: int) -> float:
    """The mean share of one token in samples, less that in the answers of the default build with
    this reward and steps of one token."""

    def share(prompt: str, texts: list[str]) -> list[float]:
        return [text.count("\0") / max(1, len(text)) for text in texts]

    means = []
    with LLM(coin_model(), tokenizer=ShortTokenizer(), cache_positions=8192) as llm:
        for decoder in ("autoregressive", AStar(reward=share, step_tokens=1)):
            options: dict[str, Any] = {"decoder": decoder, "temperature": 1.0, "max_tokens": 6}
            texts = [llm.generate(PROMPT, seed=seed, **options).text for seed in range(samples)]
            means.append(np.mean(share("", texts)))
    return float(means[0] - means[1])
