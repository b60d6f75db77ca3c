"""Oracle tests of drafts from a diffusion model: the distributions of masked positions are
recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import TracedRound, accepted, plain_token, rounds, wordy
from anydecode.models.scripted import EOS, MASK, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

TARGET = wordy()
PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


def draft_logits(path: tuple[int, ...]) -> np.ndarray:
    """Logits of the diffusion model: the target's after the text before the masks, with masks
    before the position replaced by the most probable tokens."""
    *seen, position = path
    text = [token for token in seen if token != MASK]
    row: np.ndarray = TARGET(tuple(text)) * 0.5
    for _ in range(position - len(text)):
        text.append(int(row.argmax()))
        row = TARGET(tuple(text)) * 0.5
    return row


def open_llm() -> LLM:
    """An engine with the target `TARGET` and the draft model `proposing`."""
    draft = ScriptedModel(draft_logits, causal=False)
    return LLM(ScriptedModel(TARGET), tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096)


def marginals(text: list[int], count: int) -> list[np.ndarray]:
    """Logits of `count` masked positions after `text`."""
    canvas = (*text, *[MASK] * count)
    rows = [draft_logits((*canvas, len(text) + ahead)).copy() for ahead in range(count)]
    for row in rows:
        row[MASK] = -np.inf
    return rows


def _all_rounds(decoder: str, temperature: float) -> list[TracedRound]:
    with open_llm() as llm:
        return [
            one
            for prompt in PROMPTS
            for one in rounds(llm, decoder, prompt, temperature=temperature)
        ]


@oracle_test("deer")
def deer() -> Iterator[Check]:
    """Each position is sampled independently, with the target's noise."""
    for temperature in (0.0, 0.8):
        trace = _all_rounds("deer:size=5", temperature)
        wrong = 0
        for one in trace:
            rows = marginals(one.text, 5)
            expected = [
                plain_token(row, len(one.text) + ahead, temperature)
                for ahead, row in enumerate(rows)
            ]
            wrong += one.tokens != expected
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0, f"{len(trace)}")
        yield Check(f"drafts are accepted at T={temperature}", accepted(trace) > 9)


@oracle_test("specdiff-2")
def specdiff() -> Iterator[Check]:
    """The first path uses the target's sampler; the others are samples at their own temperature."""
    noise = Noise(5).with_purpose("draft")
    for temperature in (0.8, 0.0):
        trace = _all_rounds("specdiff-2:size=4,paths=3", temperature)
        wrong = 0
        for one in trace:
            rows, start = marginals(one.text, 4), len(one.text)
            paths = [[plain_token(row, start + i, temperature) for i, row in enumerate(rows)]]
            for number in (1, 2):
                temperature_of_paths = np.float32(1.5)
                keys = [
                    row / temperature_of_paths + noise.gumbel(range(len(row)), start + i, number)
                    for i, row in enumerate(rows)
                ]
                paths.append([int(key.argmax()) for key in keys])
            expected = {tuple(path[: n + 1]) for path in paths for n in range(4)}
            wrong += one.tokens[:4] != paths[0] or set(one.paths) != expected
        yield Check(f"paths at T={temperature} equal the oracle", wrong == 0, f"{len(trace)}")
    yield Check("some trees have more than one path", any(len(one.tokens) > 4 for one in trace))
    yield Check("at most three paths", all(len(one.tokens) <= 12 for one in trace))
    yield Check("drafts are accepted", accepted(trace) > len(trace))


@oracle_test("diffuspec")
def diffuspec() -> Iterator[Check]:
    """Candidates, trigrams, the beam search against all paths, and lengths, by hand."""
    from itertools import product

    from anydecode.decoders.speculative.diffuspec import (
        AdaptiveLength,
        Trigrams,
        best_path,
        candidates,
    )

    row = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    tokens = [token for token, _ in candidates(row, 0.8, 15, [4])]
    yield Check("the smallest set of mass 0.8, and the end-of-text token", tokens == [0, 1, 2, 4])
    yield Check("at most two candidates", [t for t, _ in candidates(row, 0.8, 2, [])] == [0, 1])

    model = Trigrams()
    model.read([1, 2, 1, 2, 3])
    flat = 1 / 5
    unigram = {2: (2 + 3 * flat) / 8, 3: (1 + 3 * flat) / 8}
    bigram = {2: (2 + 1 * unigram[2]) / 3, 3: (0 + 1 * unigram[3]) / 3}
    trigram = {2: (1 + 1 * bigram[2]) / 2, 3: bigram[3] / 2}
    for token in (2, 3):
        got = math.exp(model.log_probability(token, [2, 1], 5))
        yield Check(f"p({token} | 2 1) backs off", math.isclose(got, trigram[token]))

    random = np.random.default_rng(5)
    rows = [random.normal(size=6).astype(np.float32) for _ in range(3)]
    options = [candidates(row, 0.9, 4, ()) for row in rows]

    def score(path: tuple[tuple[int, float], ...]) -> float:
        text, total = [2, 3], 0.0
        for token, q in path:
            total += 0.5 * q + 0.5 * model.log_probability(token, text[-2:], 6)
            text.append(token)
        return total

    best = max(product(*options), key=score)
    settings = {"mass": 0.9, "max_candidates": 4, "weight": 0.5, "end_tokens": ()}
    wide = best_path(rows, model, beams=1000, **settings)  # type: ignore[arg-type]
    yield Check("a wide beam finds the best of all paths", wide == [token for token, _ in best])
    unlikely = np.where(np.arange(6) == 5, -30.0, rows[0]).astype(np.float32)
    ending = [unlikely, np.where(np.arange(6) == 5, 9.0, rows[1]).astype(np.float32), rows[2]]
    settings["end_tokens"] = (5,)
    short = best_path(ending, model, beams=3, **settings)  # type: ignore[arg-type]
    yield Check("nothing is drafted after a likely end of text", len(short) == 2)

    class FakeRound:
        def __init__(self, drafted: int, num_accepted: int) -> None:
            self.tree, self.num_accepted = [0] * drafted, num_accepted

    budget = AdaptiveLength(4, 16, 3, 0.5)
    sizes = [budget.size(None)]  # type: ignore[arg-type]
    for drafted, num_accepted in ((4, 4), (7, 7), (8, 1), (6, 0), (16, 16)):
        budget.observe(FakeRound(drafted, num_accepted))  # type: ignore[arg-type]
        sizes.append(budget.size(None))  # type: ignore[arg-type]
    # means of drafted 4, 5.5, 6.75, 6.375, 11.19; of accepted 4, 5.5, 3.25, 1.625, 8.81
    yield Check(
        "draft lengths follow the accepted lengths", sizes == [4, 7, 8, 6, 6, 11], f"{sizes}"
    )
    for temperature in (0.0, 0.8):
        trace = _all_rounds("diffuspec", temperature)
        settings = {
            "mass": 0.8, "max_candidates": 15, "beams": 3, "weight": 0.5, "end_tokens": ()
        }  # fmt: skip
        wrong = 0
        for one in trace:
            model = Trigrams()
            model.read(one.text)
            rows = marginals(one.text, len(one.tokens))
            wrong += one.tokens != best_path(rows, model, **settings)  # type: ignore[arg-type]
        yield Check(
            f"every draft at T={temperature} is the best path over the masked positions", wrong == 0
        )
        yield Check(f"drafts are accepted at T={temperature}", accepted(trace) > 0)
    yield Check("no draft contains a mask", all(MASK not in one.tokens for one in trace))
    yield Check(
        "the end-of-text token is a candidate",
        EOS in [t for t, _ in candidates(rows_with_end(), 0.5, 3, [EOS])],
    )


def rows_with_end() -> np.ndarray:
    """A row in which the end-of-text token is possible but unlikely."""
    row: np.ndarray = np.zeros(259, np.float32)
    row[7] = 9.0
    return row
