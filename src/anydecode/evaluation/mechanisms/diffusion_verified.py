"""Diffusion decoders that draft and verify: they say what the slow way says, in fewer passes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.denoising import (
    PROMPT,
    SURE,
    Logits,
    bidirectional,
    dense,
    softmax,
    steady,
    steps,
)
from anydecode.models.scripted import MASK


@mechanism("freedave")
def freedave() -> Iterator[Check]:
    """The text of one token per pass, whatever is drafted and cached, in fewer passes."""
    yield from _equals_stepwise("freedave", block=12)


@mechanism("ssd")
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
                    found = steps(llm, decoder, 24, prompt=prompt, **options)
                    name = f"{decoder} says what one token per pass does, T={temperature}"
                    yield Check(name, found == slow)
        passes = llm.generate(
            list(PROMPT), decoder=f"{key}:drafts=8,block={block}", max_tokens=24, ignore_eos=True
        ).stats.passes
        yield Check("and needs fewer passes", passes < 24, f"{passes} instead of 24")
        expected = _drafted(script, block or 24, 8)
        yield Check("as many as the rule says", passes == expected, f"the oracle needs {expected}")
    noticed = _notices_careless_drafts(key, block)
    yield Check("drafts that are kept unverified would be seen", noticed)


def _drafted(script: Logits, block: int, drafts: int) -> int:
    """Passes of the published rule: one to begin each block, one per round of drafts."""
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
    """Masks of a block with their tokens, the surest first."""
    found = {
        i: softmax(script((*canvas, i)))
        for i in range(start, min(start + block, len(canvas)))
        if canvas[i] == MASK
    }
    order = sorted(found, key=lambda i: (-found[i].max(), i))
    return [(i, int(found[i].argmax())) for i in order]


def _notices_careless_drafts(key: str, block: int) -> bool:
    """Whether keeping every draft unseen would give another text: the proof is not empty."""
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

    made = catalogue.build(key, drafts=8, block=block)
    careless = Careless(8, made.blocks, made.ranking, made.cache)
    with bidirectional(SURE) as llm:
        return steps(llm, careless, 24)[0] != steps(llm, f"llada:block={block}", 24)[0]


@mechanism("s2d2")
def s2d2() -> Iterator[Check]:
    """The verified mode is the model's autoregressive mode; the router and what is accepted."""
    verified = "s2d2:router=always,complete=false,caching=causal"
    for name, script in (("random", SURE), ("steady", steady())):
        with bidirectional(script, block_size=4) as llm:
            for prompt in (PROMPT, (80, 81, 82, 83), (9,) * 7):
                slow = steps(llm, "sdar:block=1", 24, prompt=prompt)[0]
                found = steps(llm, f"{verified},block=4", 24, prompt=prompt)[0]
                yield Check(f"says what the autoregressive mode does, {name}", found == slow)
            plain = steps(llm, "sdar:block=4", 24)
            yield Check("unverified it is sdar", steps(llm, "s2d2:router=never", 24) == plain)
            careless = steps(llm, "sdar:block=1", 24)[0] != plain[0]
            yield Check("which says something else", careless)
    with bidirectional(lambda path: SURE(path[-1:]), block_size=4) as llm:
        filled = steps(llm, f"{verified},block=4", 21)[1]
        yield Check("all drafts of a block stand", [len(one) for one in filled] == [1] + [4] * 5)
    yield from _routers()


def _routers() -> Iterator[Check]:
    """Entropies of 0, log 2, log 4 over four tokens: drafts stand with chances 1, e^-1/2, e^-1."""
    from anydecode.decoders.diffusion.canvas import Canvas
    from anydecode.decoders.diffusion.s2d2 import SelfVerified

    class Look:
        def entropies(self, positions: np.ndarray) -> np.ndarray:
            return np.array([0.0, math.log(2), math.log(4)])[: len(positions)]

        def logits(self, position: int) -> np.ndarray:
            return np.zeros(4)

    expected = 1 + math.exp(-0.5) + math.exp(-1.5)
    canvas, positions = Canvas(np.array([1, 0, 0, 0]), 0), np.array([1, 2, 3])
    for router, cost, least, verifies in (
        ("score", 1.0, expected - 1.0 - 1e-9, True),
        ("score", 1.0, expected - 1.0 + 1e-9, False),
        ("span", 1.0, 3.0, True),
        ("span", 1.0, 4.0, False),
        ("hysteresis", expected - 1.0, 0.0, True),
        ("hysteresis", expected + 4.9, 0.0, True),
        ("hysteresis", expected + 5.1, 0.0, False),
        ("hysteresis", expected + 4.9, 0.0, False),
    ):
        made = catalogue.build("s2d2", router=router, cost=cost, least=least)
        assert isinstance(made, SelfVerified)
        got = made.verifies(canvas, Look(), positions)  # type: ignore[arg-type]
        yield Check(f"{router} at a cost of {cost:.3g}: {verifies}", got is verifies)


@mechanism("apd")
def apd() -> Iterator[Check]:
    """The agreed prefix, from both models' logits, for several weights."""
    from anydecode.engine.llm import LLM
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    script, other = steady(), dense(seed=8, spread=3.0)
    draft = ScriptedModel(lambda path: other(path[-1:]) + script((len(path),)))
    target = ScriptedModel(script, causal=False)

    def oracle(weight: float) -> list[list[int]]:
        canvas, filled = [*PROMPT, *[MASK] * 16], []
        while MASK in canvas:
            window = [i for i, token in enumerate(canvas) if token == MASK][:8]
            found = {i: softmax(script((*canvas, i))) for i in window}
            said = [window[0]]
            canvas[window[0]] = int(found[window[0]].argmax())
            for i in window[1:]:
                path = canvas[:i]
                p = softmax(other(tuple(path[-1:])) + script((len(path),)))
                joint = weight * np.log(found[i] + 1e-300) + (1 - weight) * np.log(p + 1e-300)
                if joint.argmax() != found[i].argmax():
                    break
                canvas[i] = int(found[i].argmax())
                said.append(i)
            filled.append(said)
        return filled

    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096) as llm:
        told = []
        for weight in (1.0, 0.7, 0.3, 0.0):
            filled = steps(llm, f"apd:weight={weight},window=8", 16)[1]
            told.append(len(filled))
            name = f"weight {weight}: {[len(one) for one in filled]}"
            yield Check(name, filled == oracle(weight))
    yield Check("the weight trades passes", told[0] == 2 and told == sorted(told))


@measure("s2d2", "tokens unlike the autoregressive mode's, verified", samples=8, margin=0.0)
def s2d2_loss(samples: int) -> float:
    """On scripted block-diffusion models."""
    wrong = total = 0
    for seed in range(samples):
        with bidirectional(dense(seed, 6.0), block_size=4) as llm:
            slow = steps(llm, "sdar:block=1", 16)[0]
            decoder = "s2d2:router=always,complete=false,caching=causal,block=4"
            found = steps(llm, decoder, 16)[0]
        wrong += sum(a != b for a, b in zip(found, slow, strict=True))
        total += len(slow)
    return wrong / total


@measure(
    "s2d2", "passes against the autoregressive mode's, where drafts hold", samples=24, margin=0.6
)
def s2d2_passes(samples: int) -> float:
    """A pass that drafts and one that verifies, for a block of four."""
    decoder = "s2d2:router=always,caching=causal,block=4"
    with bidirectional(lambda path: SURE(path[-1:]), block_size=4) as llm:
        answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=samples, ignore_eos=True)
    passes: int = answer.stats.passes
    return passes / samples
