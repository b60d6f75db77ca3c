"""Oracle test of DiffuSpec: candidates, 3-gram probabilities, beam search and draft lengths from
their definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.masked_drafts import (
    PROMPTS,
    draft_logits,
    marginals,
    open_llm,
)
from anydecode.certification.rounds import Logits, TracedRound, rounds
from anydecode.models.scripted import EOS

MASS, MAX_CANDIDATES, BEAMS = 0.8, 15, 3
MIN_LENGTH, MAX_LENGTH, STEP = 4, 16, 4


@oracle_test("diffuspec")
def diffuspec() -> Iterator[Check]:
    """Every draft is the oracle's path and has the oracle's length, also where the diffusion model
    expects an end of the text."""
    lengths: set[int] = set()
    for temperature in (0.0, 0.8):
        wrong = num_accepted = 0
        for prompt in PROMPTS:
            with open_llm(confident) as llm:
                trace = rounds(llm, "diffuspec", prompt, temperature=temperature)
            wrong += _mistakes(trace)
            num_accepted += sum(len(one.accepted) for one in trace)
            lengths |= {len(one.tokens) for one in trace}
        yield Check(f"drafts at T={temperature} equal the oracle's path and length", wrong == 0)
        yield Check(f"drafts are accepted at T={temperature}", num_accepted > 0, f"{num_accepted}")
    yield Check("several draft lengths occur", len(lengths) > 2, f"{sorted(lengths)}")
    with open_llm(confident) as llm:
        trace = rounds(llm, "diffuspec:weight=0.8", PROMPTS[0])
    yield Check("weight is that of the diffusion model", _mistakes(trace, weight=0.8) == 0)
    wrong = num_ended = num_cut = 0
    for prompt in PROMPTS:
        with open_llm(ending) as llm:
            trace = rounds(llm, "diffuspec", prompt, 32, ignore_eos=False)
        wrong += _mistakes(trace, EOS, ending)
        num_ended += sum(one.tokens[-1] == EOS for one in trace)
        num_cut += sum(len(one.tokens) < MIN_LENGTH and one.tokens[-1] != EOS for one in trace)
    detail = f"{num_ended} end with it, {num_cut} before it"
    yield Check("drafts end at a likely end", wrong == 0 < min(num_ended, num_cut), detail)


def confident(path: tuple[int, ...]) -> np.ndarray:
    """Logits of a diffusion model that is so sure that 3-grams do not decide alone."""
    row: np.ndarray = 3 * draft_logits(path)
    return row


def ending(path: tuple[int, ...]) -> np.ndarray:
    """`confident`, with the end of the text among the likely tokens at every seventh position, and
    the likeliest at every fourteenth."""
    row = confident(path)
    row[EOS] = row.max() + (4.0 if path[-1] % 14 == 0 else -1.0 if path[-1] % 7 == 0 else -9.0)
    return row


def _mistakes(
    trace: list[TracedRound],
    end: int | None = None,
    logits: Logits = confident,
    weight: float = 0.5,
) -> int:
    """The number of rounds whose draft differs from the oracle's."""
    wrong, size = 0, MIN_LENGTH
    means: tuple[float, float] | None = None
    for one in trace:
        wrong += one.tokens != _path(one.text, marginals(one.text, size, logits), end, weight)
        now = len(one.tokens), len(one.accepted)
        means = now if means is None else ((means[0] + now[0]) / 2, (means[1] + now[1]) / 2)
        size = math.floor(means[0]) + (STEP if means[1] >= means[0] else 0)
        size = min(max(size, MIN_LENGTH), MAX_LENGTH)
    return wrong


def _path(text: list[int], rows: list[np.ndarray], end: int | None, weight: float) -> list[int]:
    """The best path of a beam search over the candidates of the positions, up to and including the
    first position that has the end among its candidates by mass."""
    grams = [Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for n in (1, 2, 3)]
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for row in rows:
        p = np.exp(row.astype(np.float64) - row.max())
        p /= p.sum()
        nucleus: list[int] = []
        for token in sorted(range(len(p)), key=lambda t: -p[t])[:MAX_CANDIDATES]:  # noqa: B023
            nucleus.append(token)
            if sum(p[t] for t in nucleus) > MASS:
                break
        options = nucleus if end is None or end in nucleus else [*nucleus, end]
        longer = []
        for score, path in beams:
            if path and path[-1] == end:
                longer.append((score, path))
                continue
            seen = [*text, *path]
            for t in options:
                own, text_model = math.log(p[t]), math.log(_trigram(grams, seen, t, len(p)))
                gain = weight * own + (1 - weight) * text_model
                longer.append((score + gain, (*path, t)))
        beams = sorted(longer, key=lambda one: -one[0])[:BEAMS]
        if end in nucleus:
            break
    return list(beams[0][1])


def _trigram(
    grams: list[Counter[tuple[int, ...]]], seen: list[int], token: int, size: int
) -> float:
    """Witten-Bell: p_n = (c(context, token) + types * p_{n-1}) / (c(context) + types), from the
    uniform distribution up to two tokens of context."""
    p = 1 / size
    for n in (1, 2, 3):
        context = tuple(seen[len(seen) - n + 1 :]) if n > 1 else ()
        counts = {gram[-1]: c for gram, c in grams[n - 1].items() if gram[:-1] == context}
        if counts:
            total, types = sum(counts.values()), len(counts)
            p = (counts.get(token, 0) + types * p) / (total + types)
    return p
