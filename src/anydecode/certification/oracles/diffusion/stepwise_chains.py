"""Drafts of a diffusion decoder that are verified against denoising one token per pass."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check
from anydecode.certification.denoising import (
    PROMPT,
    Logits,
    bidirectional,
    softmax,
    steady,
    steps,
)
from anydecode.models.scripted import MASK


def equals_stepwise(key: str, block: int) -> Iterator[Check]:
    script = steady()
    with bidirectional(script) as llm:
        for temperature in (0.0, 0.8):
            options = {"temperature": temperature, "seed": 5}
            for prompt in (PROMPT, (80, 81), (9,) * 7):
                slow = steps(llm, f"llada:block={block}", 24, prompt=prompt, **options)
                for drafts in (1, 3, 8):
                    decoder = f"{key}:drafts={drafts},block={block}"
                    actual = steps(llm, decoder, 24, prompt=prompt, **options)
                    name = f"{decoder} equals one token per pass, T={temperature}"
                    yield Check(name, actual == slow)
        passes = llm.generate(
            list(PROMPT), decoder=f"{key}:drafts=8,block={block}", max_tokens=24, ignore_eos=True
        ).stats.passes
        yield Check("needs fewer passes", passes < 24, f"{passes} instead of 24")
        expected = _drafted(script, block or 24, 8)
        yield Check(
            "the number of passes equals the rule's",
            passes == expected,
            f"the oracle needs {expected}",
        )


def _drafted(script: Logits, block: int, drafts: int) -> int:
    """Passes of the published rule: one to start each block, and one per round of drafts."""
    canvas, passes = [*PROMPT, *[MASK] * 24], 0
    for start in range(len(PROMPT), len(canvas), block):
        passes += 1
        ranked = _ranked(script, canvas, start, block)
        while len(ranked) > 1:
            passes += 1
            chain, reached = ranked[:drafts], 1
            for i, token in chain:
                canvas[i] = token
                ranked = _ranked(script, canvas, start, block)
                if reached == len(chain) or not ranked or ranked[0] != chain[reached]:
                    break
                reached += 1
        for i, token in ranked:
            canvas[i] = token
    return passes


def _ranked(script: Logits, canvas: list[int], start: int, block: int) -> list[tuple[int, int]]:
    """Masked positions of a block with their tokens, the most confident first."""
    probabilities = {
        i: softmax(script((*canvas, i)))
        for i in range(start, min(start + block, len(canvas)))
        if canvas[i] == MASK
    }
    order = sorted(probabilities, key=lambda i: (-probabilities[i].max(), i))
    return [(i, int(probabilities[i].argmax())) for i in order]
