"""Which masks a pass fills, against the published rules written down naively."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from anydecode import catalogue
from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.denoising import (
    PROMPT,
    SURE,
    Logits,
    Moment,
    Rule,
    bidirectional,
    ending,
    margin,
    naive,
    nats,
    softmax,
    steady,
    steps,
)
from anydecode.models.scripted import EOS, MASK


def _same(name: str, decoder: str, rule: Rule, block: int = 12, script: Logits = SURE) -> Check:
    """Text and positions per pass over 24 masks in blocks of `block`."""
    with bidirectional(script) as llm:
        return Check(name, steps(llm, decoder, 24) == naive(script, 24, block, rule))


def _at_least(least: float) -> Rule:
    return lambda m: [i for i in m.found if m.top(i) >= least] or m.order()[:1]


@mechanism("localleap")
def localleap() -> Iterator[Check]:
    """Anchors, their neighbours, and the best one anyhow."""

    def rule(m: Moment) -> list[int]:
        anchors = [i for i in m.found if m.top(i) >= 0.8]
        near = {i for i in m.found for a in anchors if abs(i - a) <= 3}
        return [i for i in m.found if m.top(i) >= (0.5 if i in near else 0.8)] or m.order()[:1]

    decoder = "localleap:threshold=0.8,relaxed=0.5,radius=3,block=12"
    yield _same("fills anchors and their neighbours", decoder, rule)
    told = _same("", "localleap:threshold=0.8,relaxed=0.8,block=12", rule).passed
    yield Check("and a rule without neighbours differs", not told)


@mechanism("eb-sampler")
def eb_sampler() -> Iterator[Check]:
    """The longest run of the best whose entropies, all but the largest, stay within the bound."""

    def rule_of(score: Callable[[np.ndarray], float], gamma: float) -> Rule:
        def rule(m: Moment) -> list[int]:
            order = m.order(score)
            fits = 1
            for count in range(2, len(order) + 1):
                unknown = sorted(nats(m.found[i]) for i in order[:count])[:-1]
                fits = count if sum(unknown) <= gamma else fits
            return order[:fits]

        return rule

    scores: dict[str, Callable[[np.ndarray], float]] = {
        "entropy": lambda p: -nats(p),
        "confidence": np.max,
        "margin": margin,
    }
    for name, score in scores.items():
        decoder = f"eb-sampler:gamma=0.5,remasking={name},block=12"
        yield _same(f"fills the longest run by {name}", decoder, rule_of(score, 0.5))
    other = _same("", "eb-sampler:gamma=1.5,block=12", rule_of(np.max, 0.5)).passed
    yield Check("and another bound differs", not other)
    yield _same(
        "with no room it is one token a pass",
        "eb-sampler:gamma=0,block=12",
        lambda m: m.order()[:1],
    )


@mechanism("prophet")
def prophet() -> Iterator[Check]:
    """One token a pass until the mean gap of the answer is wide, then all."""
    gaps = (9.0, 6.0, 3.0)

    def rule_over(start: int, count: int) -> Rule:
        def rule(m: Moment) -> list[int]:
            answer = range(len(PROMPT) + start, len(PROMPT) + start + count)
            found = [np.sort(softmax(SURE((*m.canvas, i))))[-2:] for i in answer]
            gap = float(np.mean([math.log(first / second) for second, first in found]))
            progress = 1 - len(m.found) / m.block_masks
            third = 0 if progress < 0.33 else 1 if progress < 0.67 else 2
            return list(m.found) if gap >= gaps[third] else m.order()[:1]

        return rule

    with bidirectional(SURE) as llm:
        for start, count in ((0, 16), (4, 3), (12, 4)):
            asked = "early=9,middle=6,late=3,block=16"
            found = steps(llm, f"prophet:{asked},start={start},count={count}", 16)
            expected = naive(SURE, 16, 16, rule_over(start, count))
            yield Check(f"fills everything at {len(found[1])} of 16 passes", found == expected)
        never = steps(llm, "prophet:early=1e9,middle=1e9,late=1e9,block=16", 16)
        stepwise = steps(llm, "llada:block=16", 16)
        yield Check("with no gap wide enough it is one token a pass", never == stepwise)


@mechanism("creditdecoding")
def creditdecoding() -> Iterator[Check]:
    """Credits decay, grow by the favourite's probability, and are fused with the logits."""

    def rule(m: Moment) -> Seq[int]:
        credits: dict[int, np.ndarray] = m.memory.setdefault("credits", {})
        if m.block_step == 0:
            credits.clear()
        for i, p in list(m.found.items()):
            credit = credits.setdefault(i, np.zeros(len(p)))
            credit *= 0.8
            credit[p.argmax()] += p.max() ** 0.2
            with np.errstate(divide="ignore"):
                fused = np.log(p) + 3.0 * np.log1p(credit)
            weights = np.exp(fused - fused.max())
            m.found[i] = weights / weights.sum()
        return _at_least(0.9)(m)

    decoder = "creditdecoding:weight=3,block=12"
    yield _same("credits are fused as published", decoder, rule)
    plain = _same("", "creditdecoding:weight=0,block=12", _at_least(0.9)).passed
    yield Check("without weight it is a threshold", plain)
    yield Check(
        "and credits change what is filled",
        not _same("", decoder, _at_least(0.9)).passed,
    )


@mechanism("dparallel")
def dparallel() -> Iterator[Check]:
    """Every mask of little entropy."""

    def rule(m: Moment) -> list[int]:
        return [i for i, p in m.found.items() if nats(p) <= 0.9] or m.order(lambda p: -nats(p))[:1]

    yield _same("fills what has little entropy", "dparallel:entropy=0.9,block=12", rule)


@mechanism("cd4lm")
def cd4lm() -> Iterator[Check]:
    """At most four at a time, and ends of text last until half the canvas is full."""

    def capped(m: Moment) -> list[int]:
        return [i for i in m.order() if m.top(i) >= 0.5][:3] or m.order()[:1]

    decoder = "cd4lm:threshold=0.5,most=3,block=12"
    yield _same("fills at most three", decoder, capped)
    script = ending()

    def held(m: Moment) -> list[int]:
        early = len(m.found) > m.block_masks / 2
        rank = {
            i: -math.inf if early and p.argmax() == EOS else float(p.max())
            for i, p in m.found.items()
        }
        order = sorted(rank, key=lambda i: (-rank[i], i))
        return [i for i in order if rank[i] >= 0.5][:3] or order[:1]

    with bidirectional(script) as llm:
        text, filled = steps(llm, decoder.replace("12", "16"), 16, ignore_eos=False)
    said, expected = naive(script, 16, 16, held)
    yield Check("holds ends of text back", filled == expected[: len(filled)])
    yield Check("and says what stands before the first", text == said[: len(text)])
    free = naive(script, 16, 16, capped)[1]
    yield Check("which it would have written sooner", free[: len(filled)] != filled)


@mechanism("dimple")
def dimple() -> Iterator[Check]:
    """Everything sure, else the schedule's number; priors stand from the start."""

    def rule(count: int) -> Rule:
        def choose(m: Moment) -> list[int]:
            sure = [i for i in m.found if m.top(i) > 0.7]
            if sure:
                return sure
            masks, r = len(m.found), len(m.found) / m.block_masks
            grid = [1 - step / count for step in range(1, count)]
            quotas = [int(masks * (1 - s / r) + 1e-9) for s in grid if s < r]
            return m.order()[: next((q for q in quotas if q >= 1), masks)]

        return choose

    for count in (24, 8, 3):
        decoder = f"dimple:threshold=0.7,steps={count}"
        yield _same(f"a grid of {count}", decoder, rule(count), block=24)
    with bidirectional(SURE) as llm:
        text, filled = steps(llm, catalogue.build("dimple", priors={2: [65, 66], 9: "x"}), 12)
        yield Check("priors stay where they are", (text[2:4], text[9]) == ([65, 66], ord("x")))
        touched = sorted(position - len(PROMPT) for one in filled for position in one)
        yield Check("and are never filled", touched == [0, 1, 4, 5, 6, 7, 8, 10, 11])


@mechanism("bacd-tccf")
def bacd_tccf() -> Iterator[Check]:
    """The threshold is the block's mean confidence within bounds; blocks shrink at the marker."""

    def rule(m: Moment) -> list[int]:
        said: list[float] = m.memory.setdefault("said", [])
        if m.block_step == 0:
            said.clear()
        level = float(np.mean(said)) if said else max(m.top(i) for i in m.found)
        chosen = [i for i in m.found if m.top(i) >= min(max(level, 0.3), 0.8)] or m.order()[:1]
        said += [m.top(i) for i in chosen]
        return chosen

    yield _same("the threshold follows the block", "bacd-tccf:low=0.3,high=0.8,coarse=12", rule)

    def script(path: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(259, np.float32)
        row[(ord("#") if path[-1] == 9 else ord("a"))] = 9.0
        row[EOS] = -30.0
        return row

    with bidirectional(script) as llm:
        decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#")
        filled = steps(llm, decoder, 14)[1]
    yield Check("blocks are smaller behind the marker", [len(f) for f in filled] == [8, 2, 2, 2])


@mechanism("ccd")
def ccd() -> Iterator[Check]:
    """Both rules, with fixed and dynamic budgets."""

    def agreement(dynamic: bool, warm_up: int) -> Rule:
        def rule(m: Moment) -> list[int]:
            before, kept, reach = m.memory.get("ccd", ({}, set(), 1))
            order = m.order(lambda p: -nats(p))
            tokens = {i: int(p.argmax()) for i, p in m.found.items()}
            chosen = order[:1]
            if m.block_step >= warm_up:
                agreed = [i for i in order[:reach] if i in kept and before[i] == tokens[i]]
                if order[0] in kept and agreed:
                    chosen = agreed if dynamic else agreed[:1]
                reach = min(reach + 1, 5)
            rest = [i for i in order if i not in chosen]
            m.memory["ccd"] = (tokens, set(rest[:reach]), reach)
            return chosen

        return rule

    def averaged(dynamic: bool, depth: int) -> Rule:
        def rule(m: Moment) -> list[int]:
            history = m.memory.setdefault("history", [])
            history.append({i: m.found[i] for i in m.order()[:4]})
            last = history[-depth:]
            steady = [i for i in m.found if len(last) == depth and all(i in h for h in last)]
            if not steady:
                return m.order(lambda p: -nats(p))[:1]
            ranked = sorted(steady, key=lambda i: (nats(np.mean([h[i] for h in last], axis=0)), i))
            return ranked if dynamic else ranked[:1]

        return rule

    script = steady()
    for dynamic in (True, False):
        for warm_up in (0, 5):
            decoder = f"ccd:dynamic={str(dynamic).lower()},warm_up={warm_up}"
            yield _same(decoder, decoder, agreement(dynamic, warm_up), 24, script)
        for depth in (2, 3):
            decoder = f"ccd:rule=averaged,dynamic={str(dynamic).lower()},depth={depth}"
            yield _same(decoder, decoder, averaged(dynamic, depth), 24, script)
    with bidirectional(script) as llm:
        few = len(steps(llm, "ccd:warm_up=0", 24)[1])
        yield Check("a dynamic budget saves passes", few < 24, f"{few} of 24")


@mechanism("learn2pd")
def learn2pd() -> Iterator[Check]:
    """The filter's own arithmetic decides, over the confidences of the block."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(3)
    hidden, output = random.normal(size=(5, 8)), random.normal(size=(8, 5))
    hidden_bias, output_bias = random.normal(size=5), random.normal(size=8)

    def rule(m: Moment) -> list[int]:
        start = m.memory.setdefault("start", len(PROMPT))
        while max(m.found) >= start + 8:
            start = m.memory["start"] = start + 8
        c = np.array([m.top(i) if i in m.found else 1.0 for i in range(start, start + 8)])
        logits = output @ np.maximum(hidden @ c + hidden_bias, 0) + output_bias
        return [i for i in m.found if 1 / (1 + math.exp(-logits[i - start])) > 0.7] or m.order()[:1]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "filter.safetensors"
        tensors = {"hidden.weight": hidden, "hidden.bias": hidden_bias}
        tensors |= {"output.weight": output, "output.bias": output_bias}
        save_file({name: value.astype(np.float32) for name, value in tensors.items()}, path)
        decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7, foresee_end=False)
        with bidirectional(SURE) as llm:
            found = steps(llm, decoder, 24)
            yield Check("fills what the filter says", found == naive(SURE, 24, 8, rule))
            single = len(naive(SURE, 24, 8, lambda m: m.order()[:1])[1])
            yield Check("which saves passes", len(found[1]) < single, f"{len(found[1])}")
        with bidirectional(ending()) as llm:
            decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7)
            answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=40, trace=True)
            lengths = [len(record["canvas"]) for record in answer.trace]
            yield Check("the canvas is cut where the end is foreseen", min(lengths) < 40)
            yield Check("and the text ends there", answer.finish_reason == "stop")


@mechanism("ete")
def ete() -> Iterator[Check]:
    """What is sure across blocks; else the pivot whose token makes most others sure."""

    def oracle(candidates: int, reward: float) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * 24], []
        while MASK in canvas:
            first = canvas.index(MASK)
            edge = 3 + ((first - 3) // 8 + 1) * 8
            found = {
                i: softmax(SURE((*canvas, i)))
                for i in range(first, min(edge + 8, len(canvas)))
                if canvas[i] == MASK
            }
            sure = [i for i, p in found.items() if p.max() >= 0.9]
            if len(sure) >= 2 or len(sure) == len(found):
                for i in sure:
                    canvas[i] = int(found[i].argmax())
                filled.append(sure)
                continue
            open_ = [i for i in found if i < edge and i not in sure]
            open_ = open_ or [i for i in found if i not in sure]
            pivot = max(open_, key=lambda i: (nats(found[i]), -i))
            options = []
            for token in np.argsort(-found[pivot], kind="stable")[:candidates]:
                trial = list(canvas)
                for i in sure:
                    trial[i] = int(found[i].argmax())
                trial[pivot] = int(token)
                after = {i: softmax(SURE((*trial, i))) for i in found if trial[i] == MASK}
                more = {i: int(p.argmax()) for i, p in after.items() if p.max() >= 0.9}
                value = math.log(found[pivot][token]) + reward * len(more)
                options.append((value, trial, more))
            _, canvas, more = max(options, key=lambda one: one[0])
            for i, token in more.items():
                canvas[i] = token
            filled.append(sorted([*sure, pivot, *more]))
        return canvas[len(PROMPT) :], filled

    with bidirectional(SURE) as llm:
        for candidates, reward in ((3, 1.0), (2, 5.0), (1, 1.0)):
            decoder = f"ete:candidates={candidates},reward={reward},block=8"
            found = steps(llm, decoder, 24)
            yield Check(decoder, found == oracle(candidates, reward), f"{len(found[1])} steps")


@mechanism("lrd")
def lrd() -> Iterator[Check]:
    """Mixtures by hand, refinement until beliefs settle, and the mask of least entropy next."""
    from anydecode.decoders.diffusion.lrd import LatentDenoiser, divergence

    made = catalogue.build("lrd", mixture=0.2, nucleus=0.7)
    assert isinstance(made, LatentDenoiser)
    tokens, weights, mix = made.soft(np.array([0.1, 0.5, 0.3, 0.1]))
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.1))
    yield Check("the nucleus", tokens.tolist() == [1, 2])
    yield Check("its weights", bool(np.allclose(weights, [0.625, 0.375])))
    yield Check("the mixture", math.isclose(mix, 0.2 * (1 - entropy / math.log(4))))
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.75, 0.0])
    yield Check("divergence is KL(before || now)", math.isclose(divergence(p, q), by_hand))

    def rule(m: Moment) -> list[int]:
        return m.order(lambda p: -nats(p))[:1]

    with bidirectional(SURE) as llm:
        for settled, refinements in (("0.1", 1), ("-1", 20)):
            text, filled = steps(llm, f"lrd:mixture=0,settled={settled},block=12", 24)
            written = [one for one in filled if one]
            expected = naive(SURE, 24, 12, rule)
            yield Check("without mixing it fills by entropy", (text, written) == expected)
            empty = len(filled) - len(written)
            yield Check(f"after {refinements} passes a block", empty == 2 * refinements)
    with bidirectional(lambda path: SURE(path[-1:])) as llm:
        filled = steps(llm, "lrd:mixture=0,block=12", 24)[1]
        yield Check("settled beliefs fill the block", [len(f) for f in filled] == [0, 1, 11] * 2)
        moved = steps(llm, "lrd:mixture=0.5,block=12", 24)[1]
        yield Check("which mixtures do not change where tokens are not seen", moved == filled)
    with bidirectional(SURE) as llm:
        plain, soft = (steps(llm, f"lrd:mixture={mix},block=12", 24)[0] for mix in (0, 0.5))
        yield Check("the model reads the mixtures", plain != soft)
