"""Oracle test of S2D2: drafts, the router's choice and the verification recomputed for every
pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    Logits,
    bidirectional,
    dense,
    entropy_nats,
    softmax,
    steady,
    steps,
)
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.s2d2 import SelfVerified
from anydecode.models.scripted import MASK
from anydecode.sampling.noise import Noise

BLOCK, THRESHOLD, COST = 4, 0.85, 1.0
#: The build that reproduces the model's autoregressive mode.
VERIFIED = "s2d2:router=always,complete=false,caching=causal,block=4"


@oracle_test("s2d2")
def s2d2() -> Iterator[Check]:
    """Text and steps of the default build equal an oracle's; the verified mode equals the model's
    autoregressive mode; the other routers by hand."""
    kinds: set[str] = set()
    for name, script in (("varied", dense(spread=6.0)), ("steady", steady())):
        for temperature in (0.0, 0.8):
            for decoder, num_steps in (("s2d2", BLOCK), ("s2d2:steps=2", 2)):
                wrong = 0
                for prompt in (PROMPT, (80, 81, 82, 83), (9,) * 6):
                    options = {"prompt": prompt, "temperature": temperature, "seed": 5}
                    with bidirectional(script, block_size=BLOCK) as llm:
                        actual = steps(llm, decoder, 24, **options)
                    text, filled, seen = _oracle(script, 24, prompt, temperature, num_steps)
                    wrong += actual != (text, filled)
                    kinds |= seen
                yield Check(f"{decoder} equals the oracle, {name}, T={temperature}", wrong == 0)
    for temperature in (0.0, 0.8):
        for prompt in (PROMPT, (80, 81, 82, 83), (9,) * 6):
            options = {"prompt": prompt, "temperature": temperature, "seed": 5}
            script = dense(spread=6.0)
            with bidirectional(script, block_size=BLOCK, shift=1) as llm:
                actual = steps(llm, "s2d2", 24, **options)
            text, filled, _ = _oracle(script, 24, prompt, temperature, BLOCK, shift=1)
            name = f"with shifted logits it equals the oracle, T={temperature}, {len(prompt)}"
            yield Check(name, actual == (text, filled))
    expected = {"unverified", "all accepted", "rejected", "completed"}
    yield Check("all kinds of steps occur", kinds == expected, f"{sorted(kinds)}")
    yield from _autoregressive_mode()
    yield from _routers()


def _oracle(
    script: Logits,
    length: int,
    prompt: tuple[int, ...],
    temperature: float,
    num_steps: int,
    shift: int = 0,
) -> tuple[list[int], list[list[int]], set[str]]:
    """The generated tokens, the positions that each step filled, and the kinds of steps."""
    end = len(prompt) + length
    canvas = [*prompt, *[MASK] * (-(-end // BLOCK) * BLOCK - len(prompt))]
    noise = Noise(5)
    filled: list[list[int]] = []
    kinds: set[str] = set()
    for start in range(len(prompt) // BLOCK * BLOCK, len(canvas), BLOCK):
        stop = start + BLOCK
        for _ in range(BLOCK + shift):
            masks = [i for i in range(start, stop) if canvas[i] == MASK]
            if not masks or MASK not in canvas[:end]:
                break
            quota, attempt = BLOCK // num_steps, len(filled)
            if shift and masks[0] == start:  # the block before predicts it
                row = script((*canvas[:start], start))
                canvas[start] = _sampled(row, temperature, noise, start, attempt)
                filled.append([start])
                continue
            rows = {i: script((*canvas[:stop], i)) for i in masks}
            drafts = {i: _sampled(rows[i], temperature, noise, i, attempt) for i in masks}
            p = {i: softmax(rows[i] / np.float32(temperature or 1)) for i in masks}
            order = sorted(masks, key=lambda i: (-p[i][drafts[i]], i))  # noqa: B023
            run = [i for i in masks if i - masks[0] == masks.index(i)]
            if _score(p, run) < COST:
                confident = [i for i in masks if p[i][drafts[i]] > THRESHOLD]
                chosen = confident if len(confident) >= quota else order[:quota]
                tokens = {i: drafts[i] for i in chosen}
                kinds.add("unverified")
            else:
                tokens, is_accepted = {}, True
                for i in run:
                    before = [drafts.get(j, canvas[j]) for j in range(start, i)]
                    q_row = script((*canvas[:start], *before, *[MASK] * (not shift), i))
                    tokens[i], is_accepted = _verified(
                        rows[i], q_row, drafts[i], temperature, noise, i, attempt
                    )
                    if not is_accepted:
                        break
                kinds.add("all accepted" if is_accepted else "rejected")
                missing = max(0, quota - len(tokens))
                for i in [i for i in order if i not in tokens][:missing]:
                    tokens[i] = drafts[i]
                    kinds.add("completed")
            for i, token in tokens.items():
                canvas[i] = token
            filled.append(sorted(tokens))
    return canvas[len(prompt) : end], filled, kinds


def _score(p: dict[int, np.ndarray], run: list[int]) -> float:
    """The expected number of accepted drafts: the sum of products of exp(-H / log V)."""
    agree = [math.exp(-entropy_nats(p[i]) / math.log(len(p[i]))) for i in run]
    return sum(math.prod(agree[: n + 1]) for n in range(len(run)))


def _sampled(row: np.ndarray, temperature: float, noise: Noise, position: int, attempt: int) -> int:
    scores = row.astype(np.float64)
    scores[MASK] = -np.inf
    if temperature:
        scores = scores / temperature + noise.gumbel(range(len(row)), position, attempt)
    return int(scores.argmax())


def _verified(
    p_row: np.ndarray,
    q_row: np.ndarray,
    draft: int,
    temperature: float,
    noise: Noise,
    position: int,
    attempt: int,
) -> tuple[int, bool]:
    """The draft and True with probability min(1, q / p); else a token sampled from the normalized
    positive part of q - p, and False."""
    if temperature:
        p, q = (softmax(row / np.float32(temperature)) for row in (p_row, q_row))
    else:
        p, q = (np.eye(len(row))[softmax(row).argmax()] for row in (p_row, q_row))
    if noise.with_purpose("coin").coin(position, attempt) < min(1.0, q[draft] / p[draft]):
        return draft, True
    rest = np.maximum(q - p, 0)
    support = np.flatnonzero(rest)
    drawn = noise.with_purpose("residual").gumbel(support, position, attempt)
    return int(support[(np.log(rest[support] / rest.sum()) + drawn).argmax()]), False


def _autoregressive_mode() -> Iterator[Check]:
    """Verifying always, without completion and with causal caching, gives the text of one token per
    pass, in fewer passes."""
    for name, script in (("random", CONFIDENT), ("steady", steady())):
        with bidirectional(script, block_size=BLOCK) as llm:
            for prompt in (PROMPT, (80, 81, 82, 83), (9,) * 7):
                slow = steps(llm, "sdar:block=1", 24, prompt=prompt)[0]
                actual = steps(llm, VERIFIED, 24, prompt=prompt)[0]
                yield Check(f"equal to the autoregressive mode, {name}", actual == slow)
    with bidirectional(lambda path: CONFIDENT(path[-1:]), block_size=BLOCK) as llm:
        filled = steps(llm, VERIFIED, 21)[1]
    all_kept = [len(one) for one in filled] == [1] + [4] * 5
    yield Check("all drafts of a block are accepted", all_kept)


def _routers() -> Iterator[Check]:
    """Entropies of 0, log 2, log 4 over four tokens: drafts are accepted with probabilities 1,
    e^-1/2, e^-1."""

    class FakePredictions:
        def margins(self, positions: np.ndarray) -> np.ndarray:
            return np.array([0.9, 0.06, 0.04])[: len(positions)]

        def confidence(self, positions: np.ndarray) -> np.ndarray:
            return np.array([0.9, 0.86, 0.5])[: len(positions)]

        def entropies(self, positions: np.ndarray) -> np.ndarray:
            return np.array([0.0, math.log(2), math.log(4)])[: len(positions)]

        def logits(self, position: int) -> np.ndarray:
            return np.zeros(4)

    expected = 1 + math.exp(-0.5) + math.exp(-1.5)
    positions = np.array([1, 2, 3])
    fake: Any = FakePredictions()
    for router, cost, min_score, is_on, verifies in (
        ("score", 1.0, expected - 1.0 - 1e-9, False, True),
        ("score", 1.0, expected - 1.0 + 1e-9, False, False),
        ("span", 1.0, 3.0, False, True),
        ("span", 1.0, 4.0, False, False),
        ("hysteresis", expected - 1.0 - 1e-9, 0.0, False, True),
        ("hysteresis", expected + 4.9, 0.0, True, True),
        ("hysteresis", expected + 5.1, 0.0, True, False),
        ("hysteresis", expected + 4.9, 0.0, False, False),
    ):
        canvas = Canvas(np.array([1, 0, 0, 0]), 0)
        denoiser = _built(router=router, cost=cost, min_score=min_score)
        denoiser._record(canvas, 0, is_on, 0)
        got = denoiser.verifies(canvas, fake, positions, positions, 0)
        yield Check(f"{router} at a cost of {cost:.3g}: verifies is {verifies}", got is verifies)
    hard = _built(estimate="hard").acceptance(fake, positions)
    yield Check("hard estimates are margins above 0.05", hard.tolist() == [1, 1, 0])
    for cost, verifies in ((expected / 2 - 1e-9, True), (expected / 2 + 1e-9, False)):
        denoiser = _built(cost=cost, dynamic=True)  # two masks are above the threshold
        got = denoiser.verifies(Canvas(np.array([1, 0, 0, 0]), 0), fake, positions, positions, 0)
        yield Check(f"a dynamic cost of {cost:.3g}: verifies is {verifies}", got is verifies)
    yield _bandit()


def _built(**parameters: Any) -> SelfVerified:
    denoiser = catalogue.build("s2d2", **parameters)
    assert isinstance(denoiser, SelfVerified)
    return denoiser


def _bandit() -> Check:
    """Sixty decisions over two contexts, against the formula."""
    denoiser, canvas = _built(router="bandit"), Canvas(np.array([1, 0, 0, 0]), 0)
    seen: list[tuple[int, bool, float]] = []
    same = True
    for number in range(60):
        context, bounds = number % 2, []
        for action in (False, True):
            rewards = [r for c, a, r in seen if (c, a) == (context, action)]
            bonus = math.sqrt(math.log(len(seen) + 1) / len(rewards)) if rewards else math.inf
            bounds.append(sum(rewards) / max(1, len(rewards)) + bonus)
        expected = bounds[1] >= bounds[0]
        actual = denoiser._bandit_verifies(canvas, context)
        same &= actual == expected
        tokens = (3 if context else 1) if actual else 1
        denoiser._record(canvas, context, actual, tokens)
        seen.append((context, actual, tokens / (2 if actual else 1)))
    learnt = [sum(a for c, a, _ in seen if c == context) for context in (0, 1)]
    name = "the bandit follows the upper confidence bounds"
    return Check(name, same and learnt[1] > learnt[0], f"verified {learnt} of 30 each")


@measure("s2d2", "tokens that differ from the autoregressive mode, verified", samples=8, margin=0.0)
def s2d2_loss(samples: int) -> float:
    """Measured on scripted block-diffusion models."""
    wrong = total = 0
    for seed in range(samples):
        with bidirectional(dense(seed, 6.0), block_size=4) as llm:
            slow = steps(llm, "sdar:block=1", 16)[0]
            actual = steps(llm, VERIFIED, 16)[0]
        wrong += sum(a != b for a, b in zip(actual, slow, strict=True))
        total += len(slow)
    return wrong / total


@measure(
    "s2d2",
    "passes relative to the autoregressive mode, if all drafts are accepted",
    samples=24,
    margin=0.6,
)
def s2d2_passes(samples: int) -> float:
    """One pass that drafts and one that verifies, for a block of four."""
    decoder = "s2d2:router=always,caching=causal,block=4"
    with bidirectional(lambda path: CONFIDENT(path[-1:]), block_size=4) as llm:
        answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=samples, ignore_eos=True)
    passes: int = answer.stats.passes
    return passes / samples
