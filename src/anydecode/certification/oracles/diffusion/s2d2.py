"""Oracle test of S2D2: drafts, the router's choice and the verification recomputed for every
pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    expected = {"unverified", "all accepted", "rejected", "completed"}
    yield Check("all kinds of steps occur", kinds == expected, f"{sorted(kinds)}")
    yield from _autoregressive_mode()
    yield from _routers()


def _oracle(
    script: Logits, length: int, prompt: tuple[int, ...], temperature: float, num_steps: int
) -> tuple[list[int], list[list[int]], set[str]]:
    """The generated tokens, the positions that each step filled, and the kinds of steps."""
    end = len(prompt) + length
    canvas = [*prompt, *[MASK] * (-(-end // BLOCK) * BLOCK - len(prompt))]
    noise = Noise(5)
    filled: list[list[int]] = []
    kinds: set[str] = set()
    for start in range(len(prompt) // BLOCK * BLOCK, len(canvas), BLOCK):
        stop = start + BLOCK
        for _ in range(BLOCK):
            masks = [i for i in range(start, stop) if canvas[i] == MASK]
            if not masks or MASK not in canvas[:end]:
                break
            quota, attempt = BLOCK // num_steps, len(filled)
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
                    q_row = script((*canvas[:start], *before, MASK, i))
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
        def entropies(self, positions: np.ndarray) -> np.ndarray:
            return np.array([0.0, math.log(2), math.log(4)])[: len(positions)]

        def logits(self, position: int) -> np.ndarray:
            return np.zeros(4)

    expected = 1 + math.exp(-0.5) + math.exp(-1.5)
    canvas, positions = Canvas(np.array([1, 0, 0, 0]), 0), np.array([1, 2, 3])
    for router, cost, min_score, verifies in (
        ("score", 1.0, expected - 1.0 - 1e-9, True),
        ("score", 1.0, expected - 1.0 + 1e-9, False),
        ("span", 1.0, 3.0, True),
        ("span", 1.0, 4.0, False),
        ("hysteresis", expected - 1.0, 0.0, True),
        ("hysteresis", expected + 4.9, 0.0, True),
        ("hysteresis", expected + 5.1, 0.0, False),
        ("hysteresis", expected + 4.9, 0.0, False),
    ):
        denoiser = catalogue.build("s2d2", router=router, cost=cost, min_score=min_score)
        assert isinstance(denoiser, SelfVerified)
        got = denoiser.verifies(canvas, FakePredictions(), positions)  # type: ignore[arg-type]
        yield Check(f"{router} at a cost of {cost:.3g}: verifies is {verifies}", got is verifies)


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
