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

LENGTH = 24


def equals_stepwise(
    key: str,
    block: int,
    extra: str = "",
    width: int = 1,
    ahead: int = 0,
    model_block: int | None = None,
) -> Iterator[Check]:
    """Text and number of passes of `key`.

    Args:
        key: The method.
        block: Positions per block; 0: the whole canvas.
        extra: Further parameters.
        width: How many drafts compete for each step.
        ahead: How many blocks after the current one are drafted.
        model_block: The size of the model's blocks, if it has any.
    """
    script = steady()
    with bidirectional(script, block_size=model_block) as llm:
        for temperature in (0.0, 0.8):
            options = {"temperature": temperature, "seed": 5}
            for prompt in (PROMPT, (80, 81), (9,) * 7):
                slow = steps(llm, f"llada:block={block}", LENGTH, prompt=prompt, **options)
                for drafts in (1, 3, 8):
                    decoder = f"{key}:drafts={drafts},block={block}{extra}"
                    actual = steps(llm, decoder, LENGTH, prompt=prompt, **options)
                    name = f"{decoder} equals one token per pass, T={temperature}"
                    yield Check(name, actual == slow)
        if model_block:
            return
        answer = llm.generate(
            list(PROMPT),
            decoder=f"{key}:drafts=8,block={block}{extra}",
            max_tokens=LENGTH,
            ignore_eos=True,
        )
    passes = answer.stats.passes
    yield Check("needs fewer passes", passes < LENGTH, f"{passes} instead of {LENGTH}")
    expected = _drafted(script, block or LENGTH, 8, width, ahead)
    yield Check(
        "the number of passes equals the rule's",
        passes == expected,
        f"the oracle needs {expected}",
    )


def _drafted(script: Logits, block: int, drafts: int, width: int, ahead: int) -> int:
    """Passes of the published rule: one to begin, one per round of drafts, and one after everything
    that was predicted has been filled."""
    canvas, passes, start = [*PROMPT, *[MASK] * LENGTH], 1, len(PROMPT)
    window = block * (1 + ahead)
    predicted = start + window
    while MASK in canvas:
        ranked = _ranked(script, canvas, predicted, block)
        tree = _tree(len(ranked), drafts, width)
        if any(len(node) < len(ranked) for node in tree):
            passes += 1
        node = tree[0]
        canvas[ranked[0][0]] = ranked[0][1]
        while len(node) < len(ranked):
            best = _ranked(script, canvas, predicted, block)[0]
            if best not in ranked or node | {ranked.index(best)} not in tree:
                break
            node |= {ranked.index(best)}
            canvas[best[0]] = best[1]
        predicted = start + window
        while start < len(canvas) and MASK not in canvas[start : start + block]:
            start += block
        if len(node) == len(ranked):
            passes += MASK in canvas
            predicted = start + window
    return passes


def _tree(count: int, drafts: int, width: int) -> list[frozenset[int]]:
    """The drafted sets of ranks: a trunk, and at each depth `width` alternatives for the last."""
    nodes = [frozenset({0})]
    for depth in range(2, count + 1):
        trunk = frozenset(range(depth - 1))
        nodes += [trunk | {i} for i in range(depth - 1, min(depth - 1 + width, count))]
    return nodes[:drafts]


def _ranked(script: Logits, canvas: list[int], stop: int, block: int) -> list[tuple[int, int]]:
    """Masked positions before `stop` with their tokens, in the order in which they are filled: by
    blocks, the most confident of a block first."""
    masks = [i for i, token in enumerate(canvas[:stop]) if token == MASK]
    probabilities = {i: softmax(script((*canvas, i))) for i in masks}
    masks.sort(key=lambda i: ((i - len(PROMPT)) // block, -probabilities[i].max(), i))
    return [(i, int(probabilities[i].argmax())) for i in masks]
