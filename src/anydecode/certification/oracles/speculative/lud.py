"""Oracle test of lud (arXiv:2405.15208): the unit that every pass generates, from the logits of the
text and of the placeholders behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.speculative.mars import likelihood_lost, logits
from anydecode.certification.oracles.speculative.mask_groups import PROMPTS
from anydecode.certification.rounds import plain_token, rounds, scripted
from anydecode.models.scripted import MASK

LENGTH = 40


@oracle_test("lud")
def lud() -> Iterator[Check]:
    """The units equal those of a decoder in a few lines, which generates the same text:
    placeholders are in no text, and units end before a repeated token, or not."""
    for key, num_masks, bound, repeats in (
        ("lud", 3, 0.9, False),
        ("lud:masks=2,threshold=0.6", 2, 0.6, False),
        ("lud:threshold=0", 3, 0.0, False),
        ("lud:threshold=0.5,repeats=true", 3, 0.5, True),
    ):
        for temperature in (0.0, 0.8):
            found, expected = list[list[int]](), list[list[int]]()
            with scripted(logits) as llm:
                for prompt in PROMPTS:
                    trace = rounds(llm, key, prompt, LENGTH, temperature=temperature)
                    found += [one.generated for one in trace]
                    start = llm.encode(prompt)
                    expected += units(start, num_masks, bound, repeats, temperature)
            about = f"{key}, T={temperature}"
            yield Check(f"{about}: units equal the oracle's", found == expected)
            counts = {len(unit) for unit in found}
            yield Check(f"{about}: units have one token or several", len(counts) > 1, f"{counts}")


def units(
    prompt: list[int], num_masks: int, bound: float, repeats: bool, temperature: float
) -> list[list[int]]:
    """The units of a text of `LENGTH` tokens."""
    text, found = list(prompt), list[list[int]]()
    while len(text) < len(prompt) + LENGTH:
        row = logits(tuple(text))
        unit = [plain_token(row, len(text), temperature)]
        room = len(prompt) + LENGTH - len(text)
        for number in range(1, min(num_masks + 1, room)):
            row = logits((*text, *[MASK] * number)).astype(np.float64)
            row[MASK] = -np.inf
            token = plain_token(row.astype(np.float32), len(text) + number, temperature)
            share = 1 / np.exp(row - row[token]).sum()
            if share < bound or (token == unit[-1] and not repeats):
                break
            unit.append(token)
        text += unit
        found.append(unit)
    return found


@measure("lud", "log-likelihood lost per token", samples=60, margin=0.3)
def loss(samples: int) -> float:
    """See `likelihood_lost`."""
    return likelihood_lost("lud", samples)
