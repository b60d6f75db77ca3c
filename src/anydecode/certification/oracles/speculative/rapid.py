"""Oracle test of rapid (RAPID, arXiv:2502.20330): the retrieved chunks, and the drafts of a model
that reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    PROMPT,
    TARGET_SCRIPT,
    VOCABULARY,
    fit,
    small_llm,
)
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.reading_drafts import (
    LONG_PROMPT,
    PROMPTS,
    TARGET,
    context_logits,
)
from anydecode.certification.rounds import accepted, plain_token, rounds, scripted
from anydecode.decoders.speculative.rapid import retrieve_chunks

#: The shift of the target, and the temperature at which it is tested.
ETA, TEMPERATURE = 10.0, 0.8


@oracle_test("rapid")
def rapid() -> Iterator[Check]:
    """The chunks with the largest BM25 scores are retrieved, in order; the draft model reads
    nothing else. With `eta`, samples follow the paper's shifted target."""
    yield from penalty_checks("rapid")
    text = [1, 1, 2, 2, 7, 8, 9, 2, 1, 2, 1, 2, 9, 9, 1, 1, 3, 9, 8, 7]
    yield Check(
        "retrieval by hand",
        retrieve_chunks(text, 4, 2, 4) == [*text[4:8], *text[12:16], *text[16:]],
    )
    yield Check("a short prompt is used whole", retrieve_chunks(text, 4, 9, 4) == text)
    for key, prompts, size, chunk, count, query in (
        ("rapid", (LONG_PROMPT,), 10, 64, 8, 128),
        ("rapid:size=4,chunk=4,count=2,query=5", PROMPTS, 4, 4, 2, 5),
    ):
        yield from _compare_drafts(key, prompts, size, chunk, count, query)
    yield from _shifted_target()


def _compare_drafts(
    key: str, prompts: tuple[str, ...], size: int, chunk: int, count: int, query: int
) -> Iterator[Check]:
    for temperature in (0.0, 0.8):
        wrong, total = 0, 0
        with scripted(TARGET, context_logits) as llm:
            for prompt in prompts:
                trace = rounds(llm, key, prompt, 30, temperature=temperature)
                total += accepted(trace)
                read = _similar_chunks(list(prompt.encode()), chunk, count, query)
                for one in trace:
                    generated = one.text[len(prompt) :]
                    short = [*read, *generated]
                    drafts: list[int] = []
                    for position in range(size):
                        row = context_logits((*short, *drafts))
                        drafts.append(plain_token(row, len(one.text) + position, temperature))
                    wrong += one.tokens != drafts
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(f"{key} at T={temperature}: drafts are accepted", total > 0, f"{total}")


def _similar_chunks(prompt: list[int], chunk: int, count: int, query: int) -> list[int]:
    """The chunks with the largest BM25 scores for the query, as rows of a matrix of counts."""
    body, question = prompt[:-query], prompt[-query:]
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    if not chunks:
        return question
    counts = np.array([[part.count(word) for word in question] for part in chunks], float)
    found = (counts > 0).sum(axis=0)
    rarity = np.log(1 + (len(chunks) - found + 0.5) / (found + 0.5))
    lengths = np.array([[len(part)] for part in chunks])
    saturated = counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * lengths / lengths.mean()))
    scores = (saturated * rarity).sum(axis=1)
    best = np.argsort(-scores.round(9), kind="stable")[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question


def _shifted_target() -> Iterator[Check]:
    """The first two tokens of samples under the paper's rule, from logits alone."""
    with small_llm() as llm:
        answer = llm.generate(
            PROMPT,
            decoder=f"rapid:eta={ETA}",
            n=2000,
            seed=17,
            max_tokens=6,
            temperature=TEMPERATURE,
            trace=True,
        )
    texts = [tuple(one.tokens[:2]) for one in answer.samples]
    num_accepted = sum(len(event["accepted"]) for event in answer.trace or ())
    by_formula: dict[tuple[int, ...], float] = {}
    by_target: dict[tuple[int, ...], float] = {}
    for first in range(VOCABULARY):
        for second in range(VOCABULARY):
            seen = (*PROMPT, first)
            by_formula[first, second] = _outcome(PROMPT)[first] * _outcome(seen)[second]
            by_target[first, second] = (
                _softmax(TARGET_SCRIPT(tuple(PROMPT)))[first]
                * _softmax(TARGET_SCRIPT(seen))[second]
            )
    found, other = fit(texts, by_formula), fit(texts, by_target)
    yield Check("samples with eta follow the formula", found.passed, str(found))
    yield Check("which is not the target", not other.passed, str(other))
    yield Check("drafts are accepted with eta", num_accepted > 0, f"{num_accepted}")


def _softmax(logits: np.ndarray, extra: np.ndarray | float = 0.0) -> np.ndarray:
    weights = np.exp(logits.astype(float) / TEMPERATURE + extra)
    result: np.ndarray = weights / weights.sum()
    return result


def _outcome(seen: Seq[int]) -> np.ndarray:
    """The distribution of a drafted token: accepted drafts, and what follows rejections."""
    logits = TARGET_SCRIPT(tuple(seen))
    p, q = _softmax(logits), _softmax(DRAFT_SCRIPT(tuple(seen)))
    moved = _softmax(logits, ETA * (q - p))
    mixed = np.array([m if m >= moved.max() / 10 else old for m, old in zip(moved, p, strict=True)])
    mixed /= mixed.sum()
    accepted = np.minimum(q, mixed)
    residual = np.array([max(a - m, a - d, 0) for a, m, d in zip(p, mixed, q, strict=True)])
    result: np.ndarray = accepted + (1 - accepted.sum()) * residual / residual.sum()
    return result
