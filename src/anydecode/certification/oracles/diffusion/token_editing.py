"""Oracle test of token-editing (LLaDA2.1, arXiv:2602.08676): which masks and tokens each step
changes, when a block ends, the cache of finished blocks; and passes on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    Logits,
    bidirectional,
    dense,
    naive,
    passes_ratio,
    softmax,
)
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.certification.oracles.diffusion.rankings import order
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.token_editing import token_editing
from anydecode.models.scripted import MASK
from anydecode.sampling.noise import Noise

#: The masks that a step fills, and the tokens that it replaces.
Change = tuple[list[int], list[int]]


def drifting(spread: float) -> Logits:
    """Logits of which a part depends on how many tokens are masked: what was likely may change."""
    fixed, moving = dense(seed=2, spread=spread), dense(seed=4, spread=spread)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        return fixed(path[-1:]) + moving((path.count(MASK), path[-1]))

    return logits


def edited(
    script: Logits,
    length: int,
    block: int,
    threshold: float,
    edit: float,
    max_post_steps: int = 16,
    prompt: Seq[int] = PROMPT,
    temperature: float = 0.0,
    seed: int = 0,
    revisit: int = 0,
) -> tuple[list[int], list[Change]]:
    """A naive implementation: the tokens, and what each step changes. Rows see up to the end of
    their own block; the `revisit` blocks before the open one are edited with it."""
    first, total = len(prompt), -(-(len(prompt) + length) // block) * block
    canvas = [*prompt, *[MASK] * (total - first)]
    changes: list[Change] = []
    for start in range(first // block * block, total, block):
        cells = range(max(start - revisit * block, first), start + block)
        post_steps = 0
        while first + length > start:
            seen = {i: tuple(canvas[: (i // block + 1) * block]) for i in cells}
            rows = {i: script((*seen[i], i)).astype(np.float64) for i in cells}
            tokens, sure = {}, {}
            for i, row in rows.items():
                row[MASK] = -np.inf
                scaled = row / (temperature or 1.0)
                noise = np.zeros(len(row))
                if temperature:
                    noise = Noise(seed).gumbel(range(len(row)), i, len(changes))
                tokens[i] = int((scaled + noise).argmax())
                p = softmax(script((*seen[i], i)) / np.float32(temperature or 1.0))
                sure[i] = float(p[tokens[i]])
            masks = [i for i in cells if canvas[i] == MASK]
            filled = [i for i in masks if sure[i] > threshold]
            if masks and not filled:
                filled = [max(masks, key=lambda i: (sure[i], -i))]  # noqa: B023
            replaced = [
                i for i in cells if i not in masks and tokens[i] != canvas[i] and sure[i] > edit
            ]
            for i in (*filled, *replaced):
                canvas[i] = tokens[i]
            changes.append((filled, replaced))
            post_steps += not masks
            is_full = len(filled) == len(masks)
            if is_full and (not (masks or replaced) or post_steps >= max_post_steps):
                break
    return canvas[first : first + length], changes


def changes_of(decoder: str, script: Logits, length: int, block: int, **options: Any) -> Any:
    """The same of the engine."""
    prompt = list(options.pop("prompt", PROMPT))
    options = {"ignore_eos": True, "max_tokens": length, "trace": True, **options}
    with bidirectional(script, block_size=block) as llm:
        answer = llm.generate(prompt, decoder=decoder, **options)
    steps = [(sorted(entry["filled"]), sorted(entry["edited"])) for entry in answer.trace]
    return answer.tokens, steps


@oracle_test("token-editing")
def token_editing_test() -> Iterator[Check]:
    """Both thresholds, blocks that the prompt begins, the limit of steps, and sampling."""
    script, num_edits = drifting(6.0), 0
    for threshold, edit, limit in (
        (0.7, 0.5, 16),
        (0.5, 0.0, 16),
        (0.5, 0.0, 2),
        (0.5, 0.0, 0),
        (0.9, 1.0, 16),
    ):
        for prompt in (PROMPT, tuple(range(30, 36))):
            decoder = f"token-editing:threshold={threshold},edit={edit},max_post_steps={limit}"
            expected = edited(script, 20, 6, threshold, edit, limit, prompt)
            actual = changes_of(decoder, script, 20, 6, prompt=prompt)
            yield Check(f"{decoder} equals the oracle", actual == expected)
            num_edits += sum(len(replaced) for _, replaced in expected[1])
    yield Check("tokens are edited", num_edits > 20, f"{num_edits} edits")
    flicker = dense(spread=9.0)  # everything changes with every token
    expected = edited(flicker, 12, 6, 0.5, 0.0)
    actual = changes_of("token-editing:threshold=0.5,edit=0", flicker, 12, 6)
    yield Check("a block that never settles ends", actual == expected, f"{len(actual[1])} steps")
    expected = edited(script, 20, 6, 0.7, 0.5, temperature=0.8, seed=3)
    decoder = "token-editing:threshold=0.7,edit=0.5"
    actual = changes_of(decoder, script, 20, 6, temperature=0.8, seed=3)
    yield Check("sampled: tempered confidences of the sampled tokens", actual == expected)
    yield from revisited_blocks()
    for default in (drifting(12.0), drifting(9.0)):
        expected = edited(default, 70, 32, 0.95, 0.9)
        actual = changes_of("token-editing", default, 70, 32)
        yield Check("the default parameters are those of the released code", actual == expected)
    rule = naive(
        CONFIDENT,
        18,
        6,
        lambda s: (
            [i for i in s.probabilities if s.confidence(i) > 0.6] or order(s, "confidence")[:1]
        ),
        aligned=True,
    )
    tokens, steps = changes_of("token-editing:threshold=0.6,edit=1", CONFIDENT, 18, 6)
    same = (tokens, [filled for filled, _ in steps if filled]) == rule
    yield Check("without edits it is a threshold with at least one mask", same)


def whole_text(spread: float) -> Logits:
    """Logits that depend on every token that is seen: tokens of a finished block become others when
    one of a block before them is edited."""
    fixed, moving = dense(seed=2, spread=spread), dense(seed=4, spread=spread / 2)
    return lambda path: fixed(path[-1:]) + moving((sum(path[:-1]) % 5, path[-1]))


def revisited_blocks() -> Iterator[Check]:
    """Multi-block editing: finished blocks are edited with the open one."""
    num_late = 0
    for name, script in (("drifting", drifting(6.0)), ("whole text", whole_text(6.0))):
        for revisit, temperature in ((1, 0.0), (1, 0.8), (2, 0.0), (9, 0.8)):
            decoder = f"token-editing:threshold=0.7,edit=0.5,revisit={revisit}"
            options: dict[str, Any] = {"temperature": temperature, "seed": 3}
            expected = edited(script, 23, 6, 0.7, 0.5, revisit=revisit, **options)
            actual = changes_of(decoder, script, 23, 6, **options)
            name_ = f"{decoder}, {name}, T={temperature}: equal to the oracle"
            yield Check(name_, actual == expected)
            filled = [min(positions, default=0) // 6 for positions, _ in expected[1]]
            opened = np.maximum.accumulate(filled)
            num_late += sum(
                i // 6 < block
                for block, (_, replaced) in zip(opened, expected[1], strict=True)
                for i in replaced
            )
    yield Check("finished blocks are edited", num_late > 3, f"{num_late} edits")


@measure(
    "token-editing",
    "tokens that differ from full passes over the same blocks",
    samples=24,
    margin=0,
)
def token_editing_cache_loss(samples: int) -> float:
    """The cache of finished blocks is exact: sampled, on a transformer with random weights."""
    uncached = token_editing()
    uncached.cache = NoCache()
    return cache_loss("token-editing", uncached, samples)


@measure("token-editing", "passes relative to one token per pass", samples=64, margin=0.8)
def token_editing_passes(samples: int) -> float:
    """On the shipped block-diffusion model, which was not trained to edit and does not; with the
    pass that ends each block."""
    return passes_ratio(
        "token-editing:edit=1", samples, stepwise="sdar:remasking=static", model="tiny-blocks"
    )
