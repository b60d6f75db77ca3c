"""Which masks a pass fills, against the published rules written down naively."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.denoising import (
    PROMPT,
    TASKS,
    Logits,
    Moment,
    Rule,
    accuracy_lost,
    bidirectional,
    dense,
    naive,
    nats,
    share_of_passes,
    softmax,
    steps,
)
from anydecode.models.scripted import EOS, MASK

#: Confidences of all sizes.
SURE = dense(spread=9.0)


def _same(name: str, decoder: str, rule: Rule, block: int = 12, script: Logits = SURE) -> Check:
    """Text and positions per pass over 24 masks in blocks of `block`."""
    with bidirectional(script) as llm:
        return Check(name, steps(llm, decoder, 24) == naive(script, 24, block, rule))


def _at_least(least: float) -> Rule:
    return lambda m: [i for i in m.found if m.top(i) >= least] or m.order()[:1]


def _ending(seed: int = 4) -> Logits:
    """The same, but an end of text is likely wherever the position is even."""
    inner = dense(seed, spread=9.0)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = inner(path).copy()
        row[EOS] = 24.0 if path[-1] % 2 == 0 and path[-1] > 6 else -30.0
        return row

    return logits


def _steady() -> Logits:
    """Logits of the position, which other tokens move a little."""
    fixed, moving = dense(seed=2, spread=3.0), dense(seed=4, spread=0.7)
    return lambda path: fixed(path[-1:]) + moving(path)


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

    def rule(m: Moment) -> list[int]:
        if m.block_step == 0:
            m.memory.clear()
        for i, p in list(m.found.items()):
            credit = m.memory.setdefault(i, np.zeros(len(p)))
            credit *= 0.8
            credit[p.argmax()] += p.max() ** 0.2
            with np.errstate(divide="ignore"):
                fused = np.log(p) + 3.0 * np.log1p(credit)
            weights = np.exp(fused - fused.max())
            m.found[i] = weights / weights.sum()
        return _at_least(0.9)(m)  # type: ignore[return-value]

    decoder = "creditdecoding:weight=3,block=12"
    yield _same("credits are fused as published", decoder, rule)
    plain = _same("", "creditdecoding:weight=0,block=12", _at_least(0.9)).passed
    yield Check("without weight it is a threshold", plain)
    yield Check(
        "and credits change what is filled",
        not _same("", decoder, _at_least(0.9)).passed,
    )


@mechanism("adablock")
def adablock() -> Iterator[Check]:
    """Blocks end at the surest delimiter that is sure enough, else after a fixed number."""
    inner = dense(seed=9, spread=9.0)

    def script(path: tuple[int, ...]) -> np.ndarray:
        row = inner(path).copy()
        if path[-1] % 5 == 3:
            row[ord("\n")] = 27.0
        return row

    def oracle(least: float) -> tuple[list[int], list[list[int]], list[int]]:
        canvas, filled, ends = [*PROMPT, *[MASK] * 24], [], []
        start = len(PROMPT)
        while start < len(canvas):
            stop = 0
            while not stop or any(canvas[i] == MASK for i in range(start, stop)):
                found = {
                    i: softmax(script((*canvas, i)))
                    for i in range(start, len(canvas))
                    if canvas[i] == MASK
                }
                if not stop:
                    window = range(start, min(start + 6, len(canvas)))
                    marks = [i for i in window if found[i].argmax() == ord("\n")]
                    best = max(marks, key=lambda i: found[i].max(), default=-1)
                    sure = best >= 0 and found[best].max() >= least
                    stop = best + 1 if sure else min(start + 4, len(canvas))
                    ends.append(stop)
                block = {i: p for i, p in found.items() if i < stop}
                chosen = [i for i, p in block.items() if p.max() >= 0.8]
                chosen = chosen or [max(block, key=lambda i: block[i].max())]
                for i in chosen:
                    canvas[i] = int(found[i].argmax())
                filled.append(chosen)
            start = next((i for i, t in enumerate(canvas) if t == MASK), len(canvas))
        return canvas[len(PROMPT) :], filled, ends

    with bidirectional(script) as llm:
        for least in (0.2, 0.6, 1.1):
            decoder = _built("adablock", block=4, threshold=0.8, delimiter_threshold=least)
            text, filled, ends = oracle(least)
            yield Check(f"blocks end at {ends}", steps(llm, decoder, 24) == (text, filled))
    fixed = oracle(1.1)[2]
    yield Check("delimiters move the blocks", oracle(0.2)[2] != fixed)


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
    script = _ending()

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
        text, filled = steps(llm, _built("dimple", priors={2: [65, 66], 9: "x"}), 12)
        yield Check("priors stay where they are", (text[2:4], text[9]) == ([65, 66], ord("x")))
        touched = sorted(place - len(PROMPT) for one in filled for place in one)
        yield Check("and are never filled", touched == [0, 1, 4, 5, 6, 7, 8, 10, 11])


@mechanism("eoser-ass")
def eoser_ass() -> Iterator[Check]:
    """Doubling numbers, peeled blocks, and factors on ends of text."""
    with bidirectional(dense()) as llm:
        for length, blocks, expected in (
            (16, 1, [1, 2, 4, 9]),
            (24, 1, [1, 2, 4, 17]),
            (32, 3, [1, 2, 4, 8, 17]),
            (1, 1, [1]),
        ):
            decoder = f"eoser-ass:blocks={blocks}"
            filled = steps(llm, decoder, length)[1]
            yield Check(f"{length} masks in {expected}", [len(one) for one in filled] == expected)
        filled = steps(llm, "eoser-ass:blocks=3", 32)[1]
        behind = [min(one) - len(PROMPT) for one in filled[-2:]]
        yield Check("the peeled blocks stand at the end", behind == [7, 15])
    script = _ending()

    def rule(m: Moment) -> list[int]:
        step = m.block_step
        factor = 0.1 + 0.9 * min(1.0, (2 ** (step + 1) - 1) / 2**4)
        order = m.order(lambda p: float(p.max()) * (factor if p.argmax() == EOS else 1.0))
        return order[: 2**step] if step < 3 else order

    with bidirectional(script) as llm:
        found = steps(llm, "eoser-ass:least=0.1", 16, ignore_eos=False)
    expected = naive(script, 16, 16, rule)
    yield Check("ends of text are held back", found[1] == expected[1][: len(found[1])])


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
        decoder = _built("bacd-tccf", coarse=8, fine=2, marker="#")
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

    steady = _steady()
    for dynamic in (True, False):
        for warm_up in (0, 5):
            decoder = f"ccd:dynamic={str(dynamic).lower()},warm_up={warm_up}"
            yield _same(decoder, decoder, agreement(dynamic, warm_up), 24, steady)
        for depth in (2, 3):
            decoder = f"ccd:rule=averaged,dynamic={str(dynamic).lower()},depth={depth}"
            yield _same(decoder, decoder, averaged(dynamic, depth), 24, steady)
    with bidirectional(steady) as llm:
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
        decoder = _built("learn2pd", filter=str(path), threshold=0.7, foresee_end=False)
        with bidirectional(SURE) as llm:
            found = steps(llm, decoder, 24)
            yield Check("fills what the filter says", found == naive(SURE, 24, 8, rule))
            single = len(naive(SURE, 24, 8, lambda m: m.order()[:1])[1])
            yield Check("which saves passes", len(found[1]) < single, f"{len(found[1])}")
        with bidirectional(_ending()) as llm:
            decoder = _built("learn2pd", filter=str(path), threshold=0.7)
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


@mechanism("freedave")
def freedave() -> Iterator[Check]:
    """The text of one token per pass, whatever is drafted and cached, in fewer passes."""
    yield from _equals_stepwise("freedave", block=12)


@mechanism("ssd")
def ssd() -> Iterator[Check]:
    """The same over the whole canvas."""
    yield from _equals_stepwise("ssd", block=0)


def _equals_stepwise(key: str, block: int) -> Iterator[Check]:
    steady = _steady()
    with bidirectional(steady) as llm:
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
        expected = _drafted(steady, block or 24, 8)
        yield Check("as many as the rule says", passes == expected, f"the oracle needs {expected}")
    other = steps_of_another(key, block)
    yield Check("drafts that are kept unverified would be seen", other)


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


def steps_of_another(key: str, block: int) -> bool:
    """Whether keeping every draft unseen would give another text: the proof is not empty."""
    from anydecode.decoders.diffusion.chains import ChainDenoiser

    class Careless(ChainDenoiser):
        def _reached(self, canvas, looks, chain, tokens, places):  # type: ignore[no-untyped-def]
            return min(len(chain), len(looks))

    made = _built(key, drafts=8, block=block)
    careless = Careless(8, made.blocks, made.ranking, made.cache)  # type: ignore[attr-defined]
    with bidirectional(SURE) as llm:
        return steps(llm, careless, 24)[0] != steps(llm, f"llada:block={block}", 24)[0]


@mechanism("lrd")
def lrd() -> Iterator[Check]:
    """Mixtures by hand, refinement until beliefs settle, and the mask of least entropy next."""
    from anydecode.decoders.diffusion.lrd import LatentDenoiser, divergence

    made = _built("lrd", mixture=0.2, nucleus=0.7)
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


@mechanism("s2d2")
def s2d2() -> Iterator[Check]:
    """The verified mode is the model's autoregressive mode; the router and what is accepted."""
    verified = "s2d2:router=always,complete=false,caching=causal"
    for name, script in (("random", SURE), ("steady", _steady())):
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
        def entropies(self, places: np.ndarray) -> np.ndarray:
            return np.array([0.0, math.log(2), math.log(4)])[: len(places)]

        def logits(self, place: int) -> np.ndarray:
            return np.zeros(4)

    expected = 1 + math.exp(-0.5) + math.exp(-1.5)
    canvas, places = Canvas(np.array([1, 0, 0, 0]), 0), np.array([1, 2, 3])
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
        made = _built("s2d2", router=router, cost=cost, least=least)
        assert isinstance(made, SelfVerified)
        got = made.verifies(canvas, Look(), places)  # type: ignore[arg-type]
        yield Check(f"{router} at a cost of {cost:.3g}: {verifies}", got is verifies)


@mechanism("apd")
def apd() -> Iterator[Check]:
    """The agreed prefix, from both models' logits, for several weights."""
    from anydecode.engine.llm import LLM
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    steady, other = _steady(), dense(seed=8, spread=3.0)
    draft = ScriptedModel(lambda path: other(path[-1:]) + steady((len(path),)))
    target = ScriptedModel(steady, causal=False)

    def oracle(weight: float) -> list[list[int]]:
        canvas, filled = [*PROMPT, *[MASK] * 16], []
        while MASK in canvas:
            window = [i for i, token in enumerate(canvas) if token == MASK][:8]
            found = {i: softmax(steady((*canvas, i))) for i in window}
            said = [window[0]]
            canvas[window[0]] = int(found[window[0]].argmax())
            for i in window[1:]:
                path = canvas[:i]
                p = softmax(other(tuple(path[-1:])) + steady((len(path),)))
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


@mechanism("wedlm")
def wedlm() -> Iterator[Check]:
    """Committed text, then what the window has, then its masks; distance-adjusted entropy."""
    from anydecode.engine.llm import LLM
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    inner = dense(spread=6.0)

    def oracle(entropy: float) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * 20], []
        while MASK in canvas:
            first = canvas.index(MASK)
            places = range(first, min(first + 6, len(canvas)))
            written = [i for i in places if canvas[i] != MASK]
            masks = [i for i in places if canvas[i] == MASK]
            found = {}
            for number, i in enumerate(masks, 1):
                seen = [*canvas[:first], *[canvas[w] for w in written], *[MASK] * number]
                found[i] = softmax(np.roll(inner(tuple(seen)), i - len(seen) + 1))
            cost = {i: nats(p) + 0.02 * (i - first) for i, p in found.items()}
            chosen = [i for i in masks if cost[i] < entropy] or [min(masks, key=lambda i: cost[i])]
            for i in chosen:
                canvas[i] = int(found[i].argmax())
            filled.append(chosen)
        return canvas[len(PROMPT) :], filled

    model = ScriptedModel(inner, vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        for entropy in (0.1, 0.8, 2.0):
            expected = oracle(entropy)
            found = steps(llm, f"wedlm:window=6,entropy={entropy}", 20)
            yield Check(f"below {entropy} nats, {len(expected[1])} passes", found == expected)


@mechanism("window-diffusion")
def window_diffusion() -> Iterator[Check]:
    """Rows see the window and nothing behind it; refreshes come in cycles; rows are counted."""

    def oracle(window: int, active: int, cycle: int) -> tuple[list[int], list[list[int]], int]:
        canvas, filled, rows = [*PROMPT, *[MASK] * 24], [], 0
        written: dict[int, int] = {}
        since = end = -1
        step = 0
        while MASK in canvas:
            masks = [i for i, token in enumerate(canvas) if token == MASK]
            stop = masks[:active][-1] + 1
            if since < 0 or step >= since + cycle or stop > end:
                since, end = step, masks[:window][-1] + 1
                rows += end
            else:
                fresh = {i for i, at in written.items() if at >= since}
                rows += len(fresh | set(range(masks[0], stop)))
            found = {i: softmax(SURE((*canvas[:end], i))) for i in masks[:active]}
            chosen = [i for i, p in found.items() if p.max() >= 0.8]
            chosen = chosen or [max(found, key=lambda i: found[i].max())]
            for i in chosen:
                canvas[i], written[i] = int(found[i].argmax()), step
            filled.append(chosen)
            step += 1
        return canvas[len(PROMPT) :], filled, rows

    with bidirectional(SURE) as llm:
        for window, active, cycle in ((12, 4, 3), (8, 8, 100), (24, 2, 5)):
            text, filled, rows = oracle(window, active, cycle)
            decoder = _built(
                "window-diffusion", window=window, active=active, cycle=cycle, threshold=0.8
            )
            answer = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True, trace=True
            )
            places = [sorted(record["filled"]) for record in answer.trace]
            name = f"window {window}, active {active}, cycle {cycle}"
            yield Check(f"{name}: text and places", (answer.tokens, places) == (text, filled))
            computed = answer.trace[-1]["meter"]["rows"]
            yield Check(f"{name}: {rows} rows", computed == rows, f"{computed}")


@mechanism("dream-coder")
def dream_coder() -> Iterator[Check]:
    """Dream's order; regions that end early shrink, an expansion grows them."""
    with bidirectional(SURE) as llm:
        plain = steps(llm, "dream", 12)
        yield Check("without infilling it is dream", steps(llm, "dream-coder", 12) == plain)

    def ending(path: tuple[int, ...]) -> np.ndarray:
        *seen, position = path
        row = np.zeros(259, np.float32)
        first = seen.index(ord("<")) + 1
        row[(*b"ab", EOS)[min(position - first, 2)]] = 9.0 - 0.1 * position
        return row

    def growing(path: tuple[int, ...]) -> np.ndarray:
        *seen, position = path
        row = np.zeros(259, np.float32)
        region = seen.index(ord(">")) - seen.index(ord("<")) - 1
        row[1 if region < 3 else ord("a") + position] = 9.0 - 0.1 * position
        return row

    for name, script, masks, expected in (
        ("shrinks", ending, 6, b"<ab>x"),
        ("shrinks to what is needed", ending, 2, b"<ab>x"),
        ("grows, two masks at once", growing, 1, b"<cdef>x"),
    ):
        prompt = [ord("p"), ord("<"), *[MASK] * masks, ord(">"), ord("x")]
        with bidirectional(script) as llm:
            decoder = "dream-coder:expand=1"
            found = llm.generate(prompt, decoder=decoder, max_tokens=12).tokens
        yield Check(f"a region {name}", bytes([ord("<"), *found]) == expected, f"{found}")


def _built(key: str, **parameters: object) -> object:
    from anydecode import catalogue

    return catalogue.build(key, **parameters)


#: The tasks with one right answer, which parallel commits do not spoil.
DETERMINED = ("copy", "reverse", "sort")


def _register(
    key: str, decoder: str, loss: float, share: float, tasks: tuple[str, ...] = TASKS
) -> None:
    """What the shipped model loses and saves with this method: margins fixed beforehand."""

    def lost(samples: int) -> float:
        return accuracy_lost(decoder, samples, tasks)

    def passes(samples: int) -> float:
        return share_of_passes(decoder, samples, tasks)

    samples = 16 * len(tasks)
    where = "determined tasks" if tasks == DETERMINED else "all tasks"
    name = f"accuracy lost against one token per pass, {where}"
    measure(key, name, samples=samples, margin=loss)(lost)
    measure(key, "passes against one token per pass", samples=samples, margin=share)(passes)


#: By key: how it is asked, the accuracy it may lose, and the share of the passes it may need.
MEASURES: dict[str, tuple[str, float, float]] = {
    "localleap": ("localleap", 0.05, 0.5),
    "creditdecoding": ("creditdecoding", 0.05, 0.5),
    "adablock": ("adablock", 0.05, 0.5),
    "cd4lm": ("cd4lm", 0.05, 0.5),
    "dimple": ("dimple", 0.05, 0.5),
    "bacd-tccf": ("bacd-tccf:low=0.9,high=0.95", 0.05, 0.5),
    "learn2pd": ("learn2pd", 0.05, 0.5),
    "ete": ("ete", 0.05, 0.5),
    "apd": ("apd:window=24,weight=0.5", 0.1, 0.5),
    "freedave": ("freedave:block=24", 0.0, 0.7),
    "ssd": ("ssd:drafts=8", 0.0, 0.7),
}
#: The same where tokens that depend on each other are known to suffer.
ON_DETERMINED: dict[str, tuple[str, float, float]] = {
    "prophet": ("prophet:early=16,middle=14,late=12", 0.08, 0.95),
    "ccd": ("ccd:rule=averaged", 0.08, 0.7),
    "lrd": ("lrd:mixture=0.02", 0.12, 0.5),
    "window-diffusion": ("window-diffusion:window=24,active=8,threshold=0.9", 0.08, 0.5),
    "dream-coder": ("dream-coder:steps=16", 0.08, 0.7),
    "dparallel": ("dparallel", 0.08, 0.5),
}

for _key, _measured in MEASURES.items():
    _register(_key, *_measured)
for _key, _measured in ON_DETERMINED.items():
    _register(_key, *_measured, DETERMINED)


@measure("eoser-ass", "passes against one token per pass", samples=64, margin=0.25)
def eoser_passes(samples: int) -> float:
    """floor(log2 24) = 4 passes instead of up to 24."""
    return share_of_passes("eoser-ass", samples)


@measure("eoser-ass", "accuracy lost on the determined tasks", samples=63, margin=0.1)
def eoser_loss(samples: int) -> float:
    """The last pass fills half the canvas at once, which only determined tasks survive."""
    return accuracy_lost("eoser-ass", samples, DETERMINED)


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
    return answer.stats.passes / samples


@measure("wedlm", "tokens that change when the cache is computed anew", samples=64, margin=0.0)
def wedlm_loss(samples: int) -> float:
    """Under restarts before one pass in four: the cache is exact."""
    kept, anew = (_causal_steps("wedlm:entropy=2", samples, restarts=r)[0] for r in (False, True))
    return sum(a != b for a, b in zip(kept, anew, strict=True)) / samples


@measure("wedlm", "passes per token, where the model is sure", samples=64, margin=0.2)
def wedlm_passes(samples: int) -> float:
    """A window of 16 per pass."""
    return len(_causal_steps("wedlm", samples, spread=60.0)[1]) / samples


def _causal_steps(
    decoder: str, count: int, *, spread: float = 6.0, restarts: bool = False
) -> tuple[list[int], list[list[int]]]:
    from anydecode.engine.llm import LLM
    from anydecode.evaluation.certify import _Restarts
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    model = ScriptedModel(dense(spread=spread), vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        if not restarts:
            return steps(llm, decoder, count)
        with _Restarts(llm.engine, seed=4):
            return steps(llm, decoder, count)
