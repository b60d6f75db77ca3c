"""Oracle test of apar (Liu et al., arXiv:2401.06761): every detail written on its own flat row, and
a text that is assembled by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import logits_after
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

FORK, CHILD = 14, 15
PROMPT = list(b"list")
LETTERS = (*b"abcde", FORK, CHILD, EOS)


def forking_model(seed: int = 3) -> ScriptedModel:
    """Pseudo-random letters, forks, child tokens and ends, by the last three tokens."""

    @cache
    def row_after(last: tuple[int, ...]) -> np.ndarray:
        row = np.full(259, -30.0, np.float32)
        row[[*LETTERS]] = np.random.default_rng([seed, *last]).normal(size=len(LETTERS))
        return row

    return ScriptedModel(lambda seen: row_after(tuple(seen[-3:])))


def scripted_list() -> ScriptedModel:
    """Writes "x" fork "y" fork and ends; the details are "1" behind the first fork and "2", "3"
    behind the second."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        text = seen[len(PROMPT) :]
        answers: dict[tuple[int, ...], int] = {
            (): ord("x"), (ord("x"),): FORK, (ord("x"), FORK): ord("y"),
            (ord("x"), FORK, CHILD): ord("1"), (ord("x"), FORK, ord("y")): FORK,
            (ord("x"), FORK, ord("y"), FORK, CHILD): ord("2"),
            (ord("x"), FORK, ord("y"), FORK, CHILD, ord("2")): ord("3"),
        }  # fmt: skip
        row = np.zeros(259, np.float32)
        row[answers.get(text, EOS)] = 9.0
        return row

    return ScriptedModel(script)


def replay(
    model: ScriptedModel, seed: int, heat: float, limit: int, most: int, deepest: int
) -> list[int]:
    """The assembled text, until `limit` tokens are written; rows grow token by token, the older
    first."""
    # Of each row: its tokens, how many are not its own, its depth, and the fork it belongs to.
    rows: list[dict[str, Any]] = [{"text": [], "skip": 0, "depth": 0, "at": None, "over": False}]

    def joined(number: int) -> list[int]:
        row, text = rows[number], []
        for i in range(row["skip"], len(row["text"])):
            token = row["text"][i]
            if token == FORK:
                text += joined(next(n for n, one in enumerate(rows) if one["at"] == (number, i)))
            elif token != EOS:
                text.append(token)
        return text

    while True:
        for number in [n for n, one in enumerate(rows) if not one["over"]]:
            row = rows[number]
            logits = logits_after(model, PROMPT + row["text"]).astype(np.float64)
            logits[CHILD] = -np.inf
            busy = sum(not one["over"] for one in rows)
            last = row["text"][-1] if row["text"] else None
            if busy >= most or row["depth"] >= deepest or last in (FORK, CHILD):
                logits[FORK] = -np.inf
            if heat:
                noise = Noise(seed).forked(number) if number else Noise(seed)
                place = len(PROMPT) + len(row["text"])
                logits = logits / heat + noise.gumbel(range(259), place)
            token = int(logits.argmax())
            row["text"].append(token)
            row["over"] = token == EOS
            if token == FORK:
                rows.append({"text": [*row["text"], CHILD], "skip": len(row["text"]) + 1,
                             "depth": row["depth"] + 1, "at": (number, len(row["text"]) - 1),
                             "over": False})  # fmt: skip
        text = joined(0)
        if len(text) >= limit or all(one["over"] for one in rows):
            break
    return [*text, EOS][:limit] if rows[0]["over"] else text[:limit]


@oracle_test("apar")
def apar() -> Iterator[Check]:
    """The list by hand, the replays, and plain decoding with one row."""
    with LLM(scripted_list(), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        found = llm.generate(PROMPT, decoder="apar", max_tokens=20)
        yield Check("a list by hand", found.text == "x1y23", f"{found.text}")
        passes = found.stats.passes  # x fork y fork 2 3 end: the details fill the same passes
        yield Check("its details share passes", passes == 7, f"{passes} passes for 9 tokens")
    settings: dict[str, dict[str, int]] = {
        "apar": {"most": 32, "deepest": 2},
        "apar:rows=3": {"most": 3, "deepest": 2},
        "apar:depth=1": {"most": 32, "deepest": 1},
    }
    model = forking_model()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        for decoder, values in settings.items():
            wrong, lengths = 0, []
            for seed in range(20):
                for heat in (0.0, 1.0):
                    found = llm.generate(
                        PROMPT, decoder=decoder, seed=seed, temperature=heat, max_tokens=40
                    )
                    wrong += found.tokens != replay(model, seed, heat, 40, **values)
                    lengths.append(len(found.tokens))
            detail = f"{wrong} of 40 wrong, up to {max(lengths)} tokens"
            yield Check(f"{decoder} equals its replay", wrong == 0, detail)
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
        yield equal_tokens(
            "one row is plain decoding without marks",
            [llm.generate(PROMPT, decoder="apar:rows=1", seed=s, **options).tokens
             for s in range(6)],
            [llm.generate(PROMPT, decoder="autoregressive", seed=s,
                          logit_bias={FORK: -100.0, CHILD: -100.0}, **options).tokens
             for s in range(6)],
        )  # fmt: skip


@measure("apar", "passes per token, against one", samples=24, margin=-0.05)
def apar_passes(samples: int) -> float:
    """The passes of all texts divided by their tokens, less 1."""
    passes = tokens = 0
    with LLM(forking_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        for seed in range(samples):
            found = llm.generate(PROMPT, decoder="apar", seed=seed, temperature=1.0, max_tokens=40)
            passes, tokens = passes + found.stats.passes, tokens + len(found.tokens)
    return passes / tokens - 1
