"""Oracle test of simul-mt (Ma et al., arXiv:1810.08398; EAST): which words are read before each
token, replayed from the texts alone, and the lag of wait-k."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import logits_after
from anydecode.decoders.search.simul_mt import average_lagging
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

#: Words of one or two tokens, and the marks.
PIECES = (" a", " b", "c", " dd", "e", "<r>", "<w>", "<|end-of-read|>", "<|end-of-write|>", "=")
READ, WRITE, END = 5, 6, len(PIECES)
SOURCES = ("= a bc dd a bec dd a", "= dd ddc a b a a be a", "= a b")
TRAINED = "simul-mt:policy=trained,end_of_read=<r>,end_of_write=<w>"
LIMIT = 24


def part_model(seed: int = 6, *, ends: bool = True) -> ScriptedModel:
    """Pseudo-random pieces; the marks of the first kind are probable, the end is not. Unless it
    `ends` parts, neither by a mark nor by a word."""

    @cache
    def row_after(last: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([seed, *last]).normal(size=END + 1)
        row[[READ, WRITE]] += 1.0
        row[END] -= 1.5
        if not ends:
            row[[0, 1, 3, WRITE, END]] -= 30.0
        return np.asarray(row, np.float32)

    return ScriptedModel(lambda seen: row_after(tuple(seen[-3:])), vocab_size=END + 1)


def part_llm(*, ends: bool = True) -> LLM:
    return LLM(part_model(ends=ends), tokenizer=PieceTokenizer(*PIECES), cache_positions=4096)


def replay(
    model: ScriptedModel, source: str, seed: int, heat: float, k: int | None, limit: int = LIMIT
) -> tuple[list[int], list[int]]:
    """The text, and how many words had been read before each of its tokens; by a trained model if
    there is no k."""
    encode = PieceTokenizer(*PIECES).encode
    words = [encode(" " + word) for word in source.split(" ")[1:]]
    read_mark, write_mark = ([READ], [WRITE]) if k is None else ([7], [8])
    context = encode(source[: source.index(" ")])
    text: list[int] = []
    delays: list[int] = []
    if k is not None:  # without a marker, the source is the whole prompt
        words, context = [encode(source[: source.index(" ")]), *words], []

    def draw(row: np.ndarray) -> int:
        place = len(encode(source)) + len(text)
        if heat == 0:
            return int(row.argmax())
        return int((row / heat + Noise(seed).gumbel(range(END + 1), place)).argmax())

    parts = used = last = 0
    while True:
        context += words[used]
        used += 1
        if used < len(words):
            if k is None:
                row = logits_after(model, context).astype(np.float64)
                row[[WRITE, END]] = -np.inf
                if row.argmax() != READ:
                    continue
            elif used < k + parts:
                continue
        context += read_mark
        part: list[int] = []
        while True:
            row = logits_after(model, context).astype(np.float64)
            if k is None:
                row[READ] = -np.inf
            token = draw(row)
            is_last = used == len(words)
            ends = token == END or (k is None and token == WRITE)
            if k is None or not is_last:
                ends |= len(part) == 2 * (used - last + 25)
            if not is_last:
                ends |= k is not None and (*PIECES, "")[token][:1] == " " and len(part) > 0
            if ends and not is_last:
                break
            text.append(END if ends else token)
            delays.append(used)
            if ends or len(text) == limit:
                return text, delays
            part.append(token)
            context.append(token)
        context += write_mark
        parts, last = parts + 1, used


@oracle_test("simul-mt")
def simul_mt() -> Iterator[Check]:
    """The replays, and the lag of wait-k."""
    model = part_model()
    settings: dict[str, int | None] = {
        "simul-mt": 3, "simul-mt:k=1": 1, "simul-mt:k=40": 40, TRAINED + ",source==": None,
    }  # fmt: skip
    with part_llm() as llm:
        for decoder, k in settings.items():
            wrong, lags = 0, set()
            for source in SOURCES:
                for seed, heat in ((0, 0.0), (1, 1.0), (2, 1.0), (3, 0.5)):
                    options: dict[str, Any] = {"temperature": heat, "seed": seed}
                    found = llm.generate(
                        source, decoder=decoder, max_tokens=LIMIT, trace=True, **options
                    )
                    expected, delays = replay(model, source, seed, heat, k)
                    read = [one["num_read"] for one in found.trace or ()]
                    wrong += (found.tokens, read) != (expected, delays)
                    lags |= set(delays)
            detail = f"{wrong} of 12 wrong, {len(lags)} different delays"
            yield Check(f"{decoder} equals its replay", wrong == 0, detail)
    with part_llm(ends=False) as llm:
        for decoder, k in (("simul-mt:k=1", 1), (TRAINED + ",source==", None)):
            wrong, count, model = 0, 240, part_model(ends=False)
            for source in SOURCES:
                found = llm.generate(source, decoder=decoder, max_tokens=count, trace=True)
                expected, delays = replay(model, source, 0, 0.0, k, count)
                read = [one["num_read"] for one in found.trace or ()]
                wrong += (found.tokens, read) != (expected, delays)
            yield Check(f"{decoder} equals its replay, long parts", wrong == 0, f"{wrong} of 3")
    for k in (1, 3, 5):
        lag = average_lagging([min(k + i, 9) for i in range(9)], 9, 9)
        yield Check(f"wait-{k} lags {k} words behind", lag == k, f"{lag:g}")


@measure("simul-mt", "words that are read before the first token, less k", samples=3, margin=0.0)
def simul_mt_delay(samples: int) -> float:
    """The largest number, over sources of more than k words."""
    delays = []
    with part_llm() as llm:
        for source in SOURCES[:samples]:
            trace = llm.generate(source, decoder="simul-mt", max_tokens=4, trace=True).trace
            delays.append((trace or [{}])[0]["num_read"] - 3)
    return float(max(delays))
