"""Oracle test of rapid (RAPID, arXiv:2502.20330): the retrieved chunks, and the drafts of a model
that reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.reading_drafts import (
    LONG_PROMPT,
    PROMPTS,
    TARGET,
    context_logits,
)
from anydecode.certification.rounds import accepted, plain_token, rounds, scripted
from anydecode.decoders.speculative.rapid import retrieve_chunks


@oracle_test("rapid")
def rapid() -> Iterator[Check]:
    """Chunks similar to the query are retrieved, in order; the draft model reads nothing else."""
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
    """The chunks with the largest cosine similarity to the query, as rows of a matrix of token
    counts."""
    body, question = prompt[:-query], prompt[-query:]
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    if not chunks:
        return question
    words = sorted(set(body))
    counts = np.array([[part.count(word) for word in words] for part in chunks], float)
    rarity = np.log((1 + len(chunks)) / (0.5 + (counts > 0).sum(axis=0)))
    query_counts = rarity * [question.count(word) for word in words]
    cosine = (counts * rarity) @ query_counts / np.linalg.norm(counts * rarity, axis=1)
    best = np.argsort(-cosine.round(9), kind="stable")[:count]
    return [token for position in sorted(best) for token in chunks[position]] + question
