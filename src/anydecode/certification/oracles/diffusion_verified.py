"""Oracle tests of diffusion decoders that draft and verify: the tokens of slow decoding, in fewer
passes."""

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
    softmax,
    steady,
    steps,
)
from anydecode.models.scripted import MASK


@oracle_test("freedave")
def freedave() -> Iterator[Check]:
    """The text of one token per pass, for any number of drafts and any cache, in fewer passes."""
    yield from _equals_stepwise("freedave", block=12)


@oracle_test("ssd")
def ssd() -> Iterator[Check]:
    """The same over the whole canvas."""
    yield from _equals_stepwise("ssd", block=0)


def _equals_stepwise(key: str, block: int) -> Iterator[Check]:
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
    noticed = _notices_careless_drafts(key, block)
    yield Check("accepting drafts unverified changes the text", noticed)


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


def _notices_careless_drafts(key: str, block: int) -> bool:
    """Whether accepting every draft unverified changes the text: if not, the test could not
    fail."""
    from anydecode.decoders.diffusion.canvas import Canvas
    from anydecode.decoders.diffusion.chains import ChainDenoiser
    from anydecode.decoders.diffusion.predictions import Predictions

    class Careless(ChainDenoiser):
        def _reached(
            self,
            canvas: Canvas,
            looks: list[Predictions],
            chain: np.ndarray,
            tokens: np.ndarray,
            positions: np.ndarray,
        ) -> int:
            return min(len(chain), len(looks))

    denoiser = catalogue.build(key, drafts=8, block=block)
    careless = Careless(8, denoiser.blocks, denoiser.ranking, denoiser.cache)
    with bidirectional(CONFIDENT) as llm:
        return steps(llm, careless, 24)[0] != steps(llm, f"llada:block={block}", 24)[0]


@oracle_test("s2d2")
def s2d2() -> Iterator[Check]:
    """The verified mode equals the model's autoregressive mode; the router, and which drafts are
    accepted."""
    verified = "s2d2:router=always,complete=false,caching=causal"
    for name, script in (("random", CONFIDENT), ("steady", steady())):
        with bidirectional(script, block_size=4) as llm:
            for prompt in (PROMPT, (80, 81, 82, 83), (9,) * 7):
                slow = steps(llm, "sdar:block=1", 24, prompt=prompt)[0]
                actual = steps(llm, f"{verified},block=4", 24, prompt=prompt)[0]
                yield Check(f"equal to the autoregressive mode, {name}", actual == slow)
            plain = steps(llm, "sdar:block=4", 24)
            yield Check(
                "without verification it equals sdar", steps(llm, "s2d2:router=never", 24) == plain
            )
            careless = steps(llm, "sdar:block=1", 24)[0] != plain[0]
            yield Check("without verification the text differs", careless)
    with bidirectional(lambda path: CONFIDENT(path[-1:]), block_size=4) as llm:
        filled = steps(llm, f"{verified},block=4", 21)[1]
        yield Check(
            "all drafts of a block are accepted", [len(one) for one in filled] == [1] + [4] * 5
        )
    yield from _routers()


def _routers() -> Iterator[Check]:
    """Entropies of 0, log 2, log 4 over four tokens: drafts are accepted with probabilities 1,
    e^-1/2, e^-1."""
    from anydecode.decoders.diffusion.canvas import Canvas
    from anydecode.decoders.diffusion.s2d2 import SelfVerified

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


@oracle_test("apd")
def apd() -> Iterator[Check]:
    """The prefix on which both models agree, from their logits, for several weights."""
    from anydecode.api.llm import LLM
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    script, other = steady(), dense(seed=8, spread=3.0)
    draft = ScriptedModel(lambda path: other(path[-1:]) + script((len(path),)))
    target = ScriptedModel(script, causal=False)

    def oracle(weight: float) -> list[list[int]]:
        canvas, filled = [*PROMPT, *[MASK] * 16], []
        while MASK in canvas:
            window = [i for i, token in enumerate(canvas) if token == MASK][:8]
            found = {i: softmax(script((*canvas, i))) for i in window}
            filled_now = [window[0]]
            canvas[window[0]] = int(found[window[0]].argmax())
            for i in window[1:]:
                path = canvas[:i]
                p = softmax(other(tuple(path[-1:])) + script((len(path),)))
                joint = weight * np.log(found[i] + 1e-300) + (1 - weight) * np.log(p + 1e-300)
                if joint.argmax() != found[i].argmax():
                    break
                canvas[i] = int(found[i].argmax())
                filled_now.append(i)
            filled.append(filled_now)
        return filled

    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        num_passes = []
        for weight in (1.0, 0.7, 0.3, 0.0):
            filled = steps(llm, f"apd:weight={weight},window=8", 16)[1]
            num_passes.append(len(filled))
            name = f"weight {weight}: {[len(one) for one in filled]}"
            yield Check(name, filled == oracle(weight))
    yield Check(
        "a smaller weight needs more passes",
        num_passes[0] == 2 and num_passes == sorted(num_passes),
    )


@measure("s2d2", "tokens that differ from the autoregressive mode, verified", samples=8, margin=0.0)
def s2d2_loss(samples: int) -> float:
    """Measured on scripted block-diffusion models."""
    wrong = total = 0
    for seed in range(samples):
        with bidirectional(dense(seed, 6.0), block_size=4) as llm:
            slow = steps(llm, "sdar:block=1", 16)[0]
            decoder = "s2d2:router=always,complete=false,caching=causal,block=4"
            actual = steps(llm, decoder, 16)[0]
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
