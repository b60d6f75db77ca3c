"""Oracle test of adaptive parallel decoding: the prefix on which both samples agree, recomputed for
every pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    PROMPT,
    DigestCache,
    DigestModel,
    Logits,
    dense,
    softmax,
    steady,
    steps,
)
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

LENGTH = 24
DIFFUSION, OTHER = steady(), dense(seed=8, spread=3.0)


def autoregressive(path: tuple[int, ...]) -> np.ndarray:
    """Logits of the draft model: those of the diffusion model's position, with an error that
    depends on the token before it."""
    row: np.ndarray = OTHER(path[-1:]) + DIFFUSION((len(path),))
    return row


@oracle_test("apd")
def apd() -> Iterator[Check]:
    """With the same noise for both, a token is kept while the product of both models' distributions
    gives it too."""
    target = ScriptedModel(DIFFUSION, causal=False)
    draft = ScriptedModel(autoregressive)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        for temperature in (0.0, 0.8, 1.5):
            num_steps = []
            for decoder, weight, window in (
                ("apd:weight=1.0", 1.0, 100),
                ("apd", 0.7, 100),
                ("apd:weight=0.3,window=8", 0.3, 8),
                ("apd:weight=0.0", 0.0, 100),
            ):
                actual = steps(llm, decoder, LENGTH, temperature=temperature, seed=5)
                expected = _oracle(weight, window, temperature)
                counts = [len(one) for one in actual[1]]
                name = f"{decoder}, T={temperature}: text and steps equal the oracle's"
                yield Check(name, actual == expected, f"{counts}")
                num_steps.append(len(counts))
            name = f"a smaller weight needs more passes, T={temperature}"
            yield Check(name, num_steps == sorted(num_steps) and num_steps[0] == 1, f"{num_steps}")
    yield from cached_windows()


def cached_windows() -> Iterator[Check]:
    """Rows of tokens that left the window are those of the pass that computed them last. The
    model's rows depend on what they attended to, so that other rows are detected."""
    target, draft = DigestModel(DIFFUSION), ScriptedModel(autoregressive)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        for window, recent in ((100, 16), (6, 1), (6, 3), (9, 100)):
            decoder = f"apd:weight=0.9,window={window},recent={recent}"
            for temperature in (0.0, 0.8):
                rows: list[int] = []
                options: dict[str, Any] = {"temperature": temperature, "seed": 5}
                actual = steps(llm, decoder, LENGTH, **options)
                expected = _oracle(0.9, window, temperature, recent, rows)
                name = f"{decoder}, T={temperature}: text and steps equal the oracle's"
                yield Check(name, actual == expected, f"{len(actual[1])} passes")
                answer = llm.generate(
                    list(PROMPT), decoder=decoder, max_tokens=LENGTH, ignore_eos=True, trace=True,
                    **options,
                )  # fmt: skip
                computed = (answer.trace or [])[-1]["meter"]["rows"]
                name = f"{decoder}, T={temperature}: {sum(rows)} rows"
                yield Check(name, computed == sum(rows), f"{computed}")


def _oracle(
    weight: float,
    window: int,
    temperature: float,
    recent: int | None = None,
    num_rows: list[int] | None = None,
) -> tuple[list[int], list[list[int]]]:
    """The generated tokens, and the positions that each pass filled. With `recent`, the model is a
    `DigestModel` with a cache, and `num_rows` gets the number of rows of each pass."""
    canvas = [*PROMPT, *[MASK] * LENGTH]
    filled: list[list[int]] = []
    cache, start = DigestCache(DIFFUSION), 0
    while MASK in canvas:
        masks = [i for i, token in enumerate(canvas) if token == MASK][:window]
        if recent is None:
            logits = {i: DIFFUSION((*canvas, i)) for i in masks}
        else:
            stop = masks[-1] + 1
            cache.tokens = {i: t for i, t in cache.tokens.items() if i < start}
            cache.digests = {i: d for i, d in cache.digests.items() if i < start}
            logits = cache.forward(canvas, range(start, stop), keep=True)
            assert num_rows is not None
            num_rows.append(stop - start)
            start = max(0, masks[0] - recent + 1)
        rows = {i: np.log(softmax(logits[i]) + 1e-300) for i in masks}
        noise = {
            i: Noise(5).gumbel(range(len(rows[i])), i, len(filled)) * bool(temperature)
            for i in masks
        }
        scale = temperature or 1.0
        chosen: list[int] = []
        for i in masks:
            token = int((rows[i] / scale + noise[i]).argmax())
            if chosen:
                p = np.log(softmax(autoregressive(tuple(canvas[:i]))) + 1e-300)
                product = weight * rows[i] + (1 - weight) * p
                if int((product / scale + noise[i]).argmax()) != token:
                    break
            canvas[i] = token
            chosen.append(i)
        filled.append(chosen)
    return canvas[len(PROMPT) :], filled


def _four(probabilities: tuple[float, ...]) -> Logits:
    """Logits of four tokens, whatever came before."""
    row = np.full(259, -60.0, np.float32)
    row[:4] = np.log(probabilities)
    return lambda path: row


@measure("apd", "chi-square of the second token, per degree", samples=600, margin=5.42)
def apd_distribution(samples: int) -> float:
    """At temperature 1 and with known distributions p of the diffusion model and m of the product,
    both samples give v with probability 1 / sum_u max(p_u / p_v, m_u / m_v), since they share their
    noise; a rejected token is drawn again from p. With 3 degrees of freedom, chi-square exceeds
    16.27 (5.42 per degree) once in 1,000 times."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.1, 0.3, 0.2])
    m = p**0.7 * q**0.3
    m /= m.sum()
    both = 1 / np.maximum(p[None] / p[:, None], m[None] / m[:, None]).sum(1)
    expected = (both + (1 - both.sum()) * p) * samples
    counts = np.zeros(4)
    target = ScriptedModel(_four(tuple(p)), causal=False)
    draft = ScriptedModel(_four(tuple(q)))
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        for seed in range(samples):
            answer = llm.generate(
                list(PROMPT), decoder="apd", max_tokens=2, temperature=1.0, seed=seed,
                ignore_eos=True,
            )  # fmt: skip
            counts[answer.tokens[1]] += 1
    return float(((counts - expected) ** 2 / expected).sum() / 3)


register_losses("apd", "apd", accuracy=0.1, passes=0.5)
