"""Oracle test of p-aligner (Song et al., arXiv:2508.04626): the search replayed on texts alone,
with every rewriting and every answer from the first token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.decoders.search.p_aligner import REQUEST, RULES, PAligner
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

INSTRUCTION = "do it"
#: Prompts that are answered as they are.
UNCHANGED = ('{"a": [1, 2]}', "def f(x):\n    return x", "x = 1\nprint(x)", "Mend:\n```\nf()\n```")
LETTERS = b"abcdef \n"
Mean = tuple[float, float]


def writing_model(seed: int = 2) -> ScriptedModel:
    """Pseudo-random letters, by the last four tokens and how long the text is."""

    @cache
    def row_after(last: tuple[int, ...], length: int) -> np.ndarray:
        row = np.full(259, -30.0, np.float32)
        drawn = np.random.default_rng([seed, length, *last]).normal(size=len(LETTERS) + 1)
        row[[*LETTERS, EOS]] = 1.5 * drawn
        row[EOS] -= 2.0
        return row

    return ScriptedModel(lambda seen: row_after(tuple(seen[-4:]), len(seen) % 16))


class Tree:
    """An instruction with the mean reward of its answers, its visits and what it became."""

    def __init__(self, text: str, value: float = 0.0) -> None:
        self.text, self.value, self.visits = text, value, 0
        self.under: dict[int, Tree] = {}

    def quality(self) -> float:
        return float(np.mean([self.value, *(one.quality() for one in self.under.values())]))

    def everyone(self) -> list[Tree]:
        return [self, *(x for one in self.under.values() for x in one.everyone())]


def replay(
    model: ScriptedModel,
    writer: ScriptedModel,
    seed: int,
    limit: int,
    *,
    iterations: int = 10,
    samples: int = 3,
    trained: bool = False,
) -> tuple[list[int], str]:
    """The answer at temperature 0, and the instruction that is answered."""
    search, coins = Noise(seed).with_purpose("search"), Noise(seed).with_purpose("coin")

    def grown(of: ScriptedModel, prompt: bytes, noise: Noise | None, line: bool) -> list[int]:
        new: list[int] = []
        while len(new) < limit and new[-1:] != [EOS]:
            row = logits_after(of, [*prompt, *new]).astype(np.float64)
            if noise is not None:
                row = row + noise.gumbel(range(len(row)), len(prompt) + len(new))
            new.append(int(row.argmax()))
            if line and "\n" in letters(new).lstrip():
                break
        return new

    def letters(tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode()

    def rewritten(text: str, rule: str) -> str:
        prompt = REQUEST.format(rule=rule, text=text).encode()
        if trained:
            prompt = f"Instruction: {text}\nRewritten instruction:".encode()
        return letters(grown(writer, prompt, None, True)).lstrip().split("\n")[0].strip() or text

    def reward(text: str, number: int) -> float:
        found = []
        for i in range(samples):
            noise = search.forked(1 + number * samples + i)
            answer = grown(model, text.encode(), noise, False)
            rows = [
                log_softmax(logits_after(model, [*text.encode(), *answer[:j]]))
                for j in range(len(answer))
            ]
            logs = [float(row[token]) for row, token in zip(rows, answer, strict=True)]
            found.append(min(1.0, math.exp(sum(logs) / len(logs))))
        return float(np.mean(found))

    root, iterations = Tree(INSTRUCTION), 0 if trained else iterations
    for number in range(iterations):
        line = [root]
        while len(line[-1].under) == 5:
            node = line[-1]
            scores = {
                rule: one.quality() + math.sqrt(math.log(node.visits) / one.visits)
                for rule, one in node.under.items()
            }
            line.append(node.under[max(scores, key=lambda rule: scores[rule])])
        left = sorted(set(range(5)) - set(line[-1].under))
        rule = left[int(coins.coin(number) * len(left))]
        text = rewritten(line[-1].text, RULES[rule])
        line[-1].under[rule] = Tree(text, reward(text, number))
        for node in [*line, line[-1].under[rule]]:
            node.visits += 1
    if iterations:
        root.value = reward(INSTRUCTION, iterations)
        best = max(one.value for one in root.everyone())
        chosen = next(one.text for one in root.everyone() if one.value == best)
    else:
        chosen = rewritten(INSTRUCTION, ", and ".join(RULES))
    return grown(model, chosen.encode(), None, False), chosen


@oracle_test("p-aligner")
def p_aligner() -> Iterator[Check]:
    """The replays, without and with another model that rewrites; prompts of code."""
    model, other = writing_model(), writing_model(3)
    settings: dict[str, dict[str, Any]] = {
        "p-aligner": {},
        "p-aligner:iterations=40,samples=1": {"iterations": 40, "samples": 1},
        "p-aligner:iterations=0": {"iterations": 0},
    }
    for writer, draft in ((model, None), (other, other)):
        if draft is not None:
            settings["p-aligner:trained=true"] = {"trained": True}
        for decoder, values in settings.items():
            wrong, chosen = 0, set()
            options: dict[str, Any] = {} if draft is None else {"draft": draft}
            with LLM(model, tokenizer=ByteTokenizer(), cache_positions=16384, **options) as llm:
                for seed in range(6):
                    found = llm.generate(INSTRUCTION, decoder=decoder, seed=seed, max_tokens=12)
                    expected, text = replay(model, writer, seed, 12, **values)
                    wrong += found.tokens != expected
                    chosen.add(text)
            name = f"{decoder} equals its replay" + ("" if draft is None else ", a draft model")
            yield Check(name, wrong == 0, f"{wrong} of 6 wrong, {len(chosen)} instructions")
    plain = rewarded = 0
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=16384) as llm:

        def raw_only(prompt: str, texts: list[str]) -> list[float]:
            return [0.0] * len(texts)

        for seed in range(4):
            options = {"seed": seed, "max_tokens": 12, "temperature": 0.8}
            kept = llm.generate(INSTRUCTION, decoder=PAligner(reward=raw_only), **options).tokens
            plain += kept == llm.generate(INSTRUCTION, decoder="autoregressive", **options).tokens
            rewarded += 1
        changed = 0
        for text in UNCHANGED:
            options = {"seed": 1, "max_tokens": 12, "temperature": 0.8}
            found = llm.generate(text, decoder="p-aligner", **options).tokens
            changed += found != llm.generate(text, decoder="autoregressive", **options).tokens
    yield Check("of equal instructions the given one", plain == rewarded, f"{plain} of {rewarded}")
    yield Check("code stays as it is", changed == 0, f"{changed} of {len(UNCHANGED)} changed")


@measure("p-aligner", "reward lost against sampling", samples=60, margin=-0.02)
def p_aligner_gain(samples: int) -> float:
    """The mean share of one letter in samples, less that in the answers of the default build with
    this reward."""

    def share(prompt: str, texts: list[str]) -> list[float]:
        return [text.count("a") / max(1, len(text)) for text in texts]

    means = []
    with LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=16384) as llm:
        for decoder in ("autoregressive", PAligner(reward=share)):
            options: dict[str, Any] = {"decoder": decoder, "temperature": 1.0, "max_tokens": 12}
            texts = [llm.generate(INSTRUCTION, seed=i, **options).text for i in range(samples)]
            means.append(np.mean(share("", texts)))
    return float(means[0] - means[1])
