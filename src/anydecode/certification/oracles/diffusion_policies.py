"""Oracle tests of unmasking rules: the positions that a pass fills, against naive implementations
of the published rules."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    Logits,
    StepState,
    UnmaskingRule,
    bidirectional,
    ending,
    entropy_nats,
    margin,
    naive,
    softmax,
    steady,
    steps,
)
from anydecode.models.scripted import EOS, MASK


def _same(
    name: str, decoder: str, rule: UnmaskingRule, block: int = 12, script: Logits = CONFIDENT
) -> Check:
    """Compares text and positions per pass over 24 masks in blocks of `block`."""
    with bidirectional(script) as llm:
        return Check(name, steps(llm, decoder, 24) == naive(script, 24, block, rule))


def _threshold_rule(threshold: float) -> UnmaskingRule:
    return lambda state: (
        [i for i in state.probabilities if state.max_probability(i) >= threshold]
        or state.order()[:1]
    )


@oracle_test("localleap")
def localleap() -> Iterator[Check]:
    """Anchors, their neighbours, and otherwise the best position."""

    def rule(state: StepState) -> list[int]:
        anchors = [i for i in state.probabilities if state.max_probability(i) >= 0.8]
        near = {i for i in state.probabilities for a in anchors if abs(i - a) <= 3}
        return [
            i
            for i in state.probabilities
            if state.max_probability(i) >= (0.5 if i in near else 0.8)
        ] or state.order()[:1]

    decoder = "localleap:threshold=0.8,relaxed=0.5,radius=3,block=12"
    yield _same("fills anchors and their neighbours", decoder, rule)
    is_same = _same("", "localleap:threshold=0.8,relaxed=0.8,block=12", rule).passed
    yield Check("a rule without neighbours differs", not is_same)


@oracle_test("eb-sampler")
def eb_sampler() -> Iterator[Check]:
    """The longest prefix of the ranking whose entropies, without the largest, sum to at most the
    bound."""

    def rule_of(score: Callable[[np.ndarray], float], gamma: float) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            order = state.order(score)
            fits = 1
            for count in range(2, len(order) + 1):
                unknown = sorted(entropy_nats(state.probabilities[i]) for i in order[:count])[:-1]
                fits = count if sum(unknown) <= gamma else fits
            return order[:fits]

        return rule

    scores: dict[str, Callable[[np.ndarray], float]] = {
        "entropy": lambda p: -entropy_nats(p),
        "confidence": np.max,
        "margin": margin,
    }
    for name, score in scores.items():
        decoder = f"eb-sampler:gamma=0.5,remasking={name},block=12"
        yield _same(f"fills the longest prefix ranked by {name}", decoder, rule_of(score, 0.5))
    other = _same("", "eb-sampler:gamma=1.5,block=12", rule_of(np.max, 0.5)).passed
    yield Check("another bound differs", not other)
    yield _same(
        "a bound of 0 fills one token per pass",
        "eb-sampler:gamma=0,block=12",
        lambda state: state.order()[:1],
    )


@oracle_test("prophet")
def prophet() -> Iterator[Check]:
    """One token per pass until the mean logit gap of the answer is large, then all."""
    gaps = (9.0, 6.0, 3.0)

    def rule_over(start: int, count: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            answer = range(len(PROMPT) + start, len(PROMPT) + start + count)
            top_two = [np.sort(softmax(CONFIDENT((*state.canvas, i))))[-2:] for i in answer]
            gap = float(np.mean([math.log(first / second) for second, first in top_two]))
            progress = 1 - len(state.probabilities) / state.block_masks
            third = 0 if progress < 0.33 else 1 if progress < 0.67 else 2
            return list(state.probabilities) if gap >= gaps[third] else state.order()[:1]

        return rule

    with bidirectional(CONFIDENT) as llm:
        for start, count in ((0, 16), (4, 3), (12, 4)):
            parameters = "early=9,middle=6,late=3,block=16"
            actual = steps(llm, f"prophet:{parameters},start={start},count={count}", 16)
            expected = naive(CONFIDENT, 16, 16, rule_over(start, count))
            yield Check(f"fills the rest at pass {len(actual[1])} of 16", actual == expected)
        never = steps(llm, "prophet:early=1e9,middle=1e9,late=1e9,block=16", 16)
        stepwise = steps(llm, "llada:block=16", 16)
        yield Check("if no gap is large enough, one token per pass", never == stepwise)


@oracle_test("creditdecoding")
def creditdecoding() -> Iterator[Check]:
    """Credits decay, grow by the top token's probability, and are added to the logits."""

    def rule(state: StepState) -> Seq[int]:
        credits: dict[int, np.ndarray] = state.memory.setdefault("credits", {})
        if state.block_step == 0:
            credits.clear()
        for i, p in list(state.probabilities.items()):
            credit = credits.setdefault(i, np.zeros(len(p)))
            credit *= 0.8
            credit[p.argmax()] += p.max() ** 0.2
            with np.errstate(divide="ignore"):
                fused = np.log(p) + 3.0 * np.log1p(credit)
            weights = np.exp(fused - fused.max())
            state.probabilities[i] = weights / weights.sum()
        return _threshold_rule(0.9)(state)

    decoder = "creditdecoding:weight=3,block=12"
    yield _same("credits are combined as published", decoder, rule)
    plain = _same("", "creditdecoding:weight=0,block=12", _threshold_rule(0.9)).passed
    yield Check("with weight 0 it is a threshold", plain)
    yield Check(
        "credits change what is filled",
        not _same("", decoder, _threshold_rule(0.9)).passed,
    )


@oracle_test("dparallel")
def dparallel() -> Iterator[Check]:
    """Every position of low entropy."""

    def rule(state: StepState) -> list[int]:
        low = [i for i, p in state.probabilities.items() if entropy_nats(p) <= 0.9]
        return low or state.order(lambda p: -entropy_nats(p))[:1]

    yield _same("fills positions of low entropy", "dparallel:entropy=0.9,block=12", rule)


@oracle_test("cd4lm")
def cd4lm() -> Iterator[Check]:
    """At most three at a time; end-of-text tokens are delayed until half the canvas is full."""

    def capped(state: StepState) -> list[int]:
        confident = [i for i in state.order() if state.max_probability(i) >= 0.5]
        return confident[:3] or state.order()[:1]

    decoder = "cd4lm:threshold=0.5,max_per_step=3,block=12"
    yield _same("fills at most three", decoder, capped)
    script = ending()

    def delayed(state: StepState) -> list[int]:
        early = len(state.probabilities) > state.block_masks / 2
        rank = {
            i: -math.inf if early and p.argmax() == EOS else float(p.max())
            for i, p in state.probabilities.items()
        }
        order = sorted(rank, key=lambda i: (-rank[i], i))
        return [i for i in order if rank[i] >= 0.5][:3] or order[:1]

    with bidirectional(script) as llm:
        text, filled = steps(llm, decoder.replace("12", "16"), 16, ignore_eos=False)
    tokens, expected = naive(script, 16, 16, delayed)
    yield Check("end-of-text tokens are delayed", filled == expected[: len(filled)])
    yield Check("returns the text before the first end of text", text == tokens[: len(text)])
    free = naive(script, 16, 16, capped)[1]
    yield Check("without the delay the end comes sooner", free[: len(filled)] != filled)


@oracle_test("dimple")
def dimple() -> Iterator[Check]:
    """All confident positions, else the schedule's number; given tokens are there from the
    start."""

    def rule(count: int) -> UnmaskingRule:
        def choose(state: StepState) -> list[int]:
            confident = [i for i in state.probabilities if state.max_probability(i) > 0.7]
            if confident:
                return confident
            masks, r = len(state.probabilities), len(state.probabilities) / state.block_masks
            grid = [1 - step / count for step in range(1, count)]
            quotas = [int(masks * (1 - s / r) + 1e-9) for s in grid if s < r]
            return state.order()[: next((q for q in quotas if q >= 1), masks)]

        return choose

    for count in (24, 8, 3):
        decoder = f"dimple:threshold=0.7,steps={count}"
        yield _same(f"a time grid of {count}", decoder, rule(count), block=24)
    with bidirectional(CONFIDENT) as llm:
        text, filled = steps(llm, catalogue.build("dimple", priors={2: [65, 66], 9: "x"}), 12)
        yield Check("given tokens stay in place", (text[2:4], text[9]) == ([65, 66], ord("x")))
        touched = sorted(position - len(PROMPT) for one in filled for position in one)
        yield Check("given tokens are never filled", touched == [0, 1, 4, 5, 6, 7, 8, 10, 11])


@oracle_test("bacd-tccf")
def bacd_tccf() -> Iterator[Check]:
    """The threshold is the block's mean confidence within bounds; blocks shrink after the
    marker."""

    def rule(state: StepState) -> list[int]:
        confidences: list[float] = state.memory.setdefault("confidences", [])
        if state.block_step == 0:
            confidences.clear()
        level = (
            float(np.mean(confidences))
            if confidences
            else max(state.max_probability(i) for i in state.probabilities)
        )
        chosen = [
            i for i in state.probabilities if state.max_probability(i) >= min(max(level, 0.3), 0.8)
        ] or state.order()[:1]
        confidences += [state.max_probability(i) for i in chosen]
        return chosen

    yield _same(
        "the threshold follows the block's confidence", "bacd-tccf:low=0.3,high=0.8,coarse=12", rule
    )

    def script(path: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(259, np.float32)
        row[(ord("#") if path[-1] == 9 else ord("a"))] = 9.0
        row[EOS] = -30.0
        return row

    with bidirectional(script) as llm:
        decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#")
        filled = steps(llm, decoder, 14)[1]
    yield Check("blocks are smaller after the marker", [len(f) for f in filled] == [8, 2, 2, 2])


@oracle_test("ccd")
def ccd() -> Iterator[Check]:
    """Both rules, with fixed and dynamic budgets."""

    def agreement(dynamic: bool, warm_up: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            before, candidates, reach = state.memory.get("ccd", ({}, set(), 1))
            order = state.order(lambda p: -entropy_nats(p))
            tokens = {i: int(p.argmax()) for i, p in state.probabilities.items()}
            chosen = order[:1]
            if state.block_step >= warm_up:
                agreed = [i for i in order[:reach] if i in candidates and before[i] == tokens[i]]
                if order[0] in candidates and agreed:
                    chosen = agreed if dynamic else agreed[:1]
                reach = min(reach + 1, 5)
            rest = [i for i in order if i not in chosen]
            state.memory["ccd"] = (tokens, set(rest[:reach]), reach)
            return chosen

        return rule

    def averaged(dynamic: bool, depth: int) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            history = state.memory.setdefault("history", [])
            history.append({i: state.probabilities[i] for i in state.order()[:4]})
            last = history[-depth:]
            stable = [
                i for i in state.probabilities if len(last) == depth and all(i in h for h in last)
            ]
            if not stable:
                return state.order(lambda p: -entropy_nats(p))[:1]
            ranked = sorted(
                stable, key=lambda i: (entropy_nats(np.mean([h[i] for h in last], axis=0)), i)
            )
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


@oracle_test("learn2pd")
def learn2pd() -> Iterator[Check]:
    """The filter network's output decides, computed by hand from the confidences of the block."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(3)
    hidden, output = random.normal(size=(5, 8)), random.normal(size=(8, 5))
    hidden_bias, output_bias = random.normal(size=5), random.normal(size=8)

    def rule(state: StepState) -> list[int]:
        start = state.memory.setdefault("start", len(PROMPT))
        while max(state.probabilities) >= start + 8:
            start = state.memory["start"] = start + 8
        c = np.array(
            [
                state.max_probability(i) if i in state.probabilities else 1.0
                for i in range(start, start + 8)
            ]
        )
        logits = output @ np.maximum(hidden @ c + hidden_bias, 0) + output_bias
        return [
            i for i in state.probabilities if 1 / (1 + math.exp(-logits[i - start])) > 0.7
        ] or state.order()[:1]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "filter.safetensors"
        tensors = {"hidden.weight": hidden, "hidden.bias": hidden_bias}
        tensors |= {"output.weight": output, "output.bias": output_bias}
        save_file({name: value.astype(np.float32) for name, value in tensors.items()}, path)
        decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7, foresee_end=False)
        with bidirectional(CONFIDENT) as llm:
            actual = steps(llm, decoder, 24)
            yield Check(
                "fills the positions that the filter selects",
                actual == naive(CONFIDENT, 24, 8, rule),
            )
            one_by_one = len(naive(CONFIDENT, 24, 8, lambda state: state.order()[:1])[1])
            yield Check("the filter saves passes", len(actual[1]) < one_by_one, f"{len(actual[1])}")
        with bidirectional(ending()) as llm:
            decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7)
            answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=40, trace=True)
            lengths = [len(record["canvas"]) for record in answer.trace or ()]
            yield Check("the canvas is cut at the predicted end", min(lengths) < 40)
            yield Check("the text ends at the predicted end", answer.finish_reason == "stop")


@oracle_test("ete")
def ete() -> Iterator[Check]:
    """The confident positions across blocks; otherwise the pivot token that makes most other
    positions confident."""

    def oracle(candidates: int, reward: float) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * 24], []
        while MASK in canvas:
            first = canvas.index(MASK)
            edge = 3 + ((first - 3) // 8 + 1) * 8
            probabilities = {
                i: softmax(CONFIDENT((*canvas, i)))
                for i in range(first, min(edge + 8, len(canvas)))
                if canvas[i] == MASK
            }
            confident = [i for i, p in probabilities.items() if p.max() >= 0.9]
            if len(confident) >= 2 or len(confident) == len(probabilities):
                for i in confident:
                    canvas[i] = int(probabilities[i].argmax())
                filled.append(confident)
                continue
            open_ = [i for i in probabilities if i < edge and i not in confident]
            open_ = open_ or [i for i in probabilities if i not in confident]
            pivot = max(open_, key=lambda i: (entropy_nats(probabilities[i]), -i))
            options = []
            for token in np.argsort(-probabilities[pivot], kind="stable")[:candidates]:
                trial = list(canvas)
                for i in confident:
                    trial[i] = int(probabilities[i].argmax())
                trial[pivot] = int(token)
                after = {
                    i: softmax(CONFIDENT((*trial, i))) for i in probabilities if trial[i] == MASK
                }
                more = {i: int(p.argmax()) for i, p in after.items() if p.max() >= 0.9}
                value = math.log(probabilities[pivot][token]) + reward * len(more)
                options.append((value, trial, more))
            _, canvas, more = max(options, key=lambda one: one[0])
            for i, token in more.items():
                canvas[i] = token
            filled.append(sorted([*confident, pivot, *more]))
        return canvas[len(PROMPT) :], filled

    with bidirectional(CONFIDENT) as llm:
        for candidates, reward in ((3, 1.0), (2, 5.0), (1, 1.0)):
            decoder = f"ete:candidates={candidates},reward={reward},block=8"
            probabilities = steps(llm, decoder, 24)
            yield Check(
                decoder,
                probabilities == oracle(candidates, reward),
                f"{len(probabilities[1])} steps",
            )


@oracle_test("lrd")
def lrd() -> Iterator[Check]:
    """Mixtures by hand, refinement until the distributions converge, then the position of lowest
    entropy."""
    from anydecode.decoders.diffusion.lrd import LatentDenoiser, divergence

    denoiser = catalogue.build("lrd", mixture=0.2, nucleus=0.7)
    assert isinstance(denoiser, LatentDenoiser)
    tokens, weights, mix = denoiser.soft(np.array([0.1, 0.5, 0.3, 0.1]))
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.1))
    yield Check("the nucleus", tokens.tolist() == [1, 2])
    yield Check("the nucleus weights", bool(np.allclose(weights, [0.625, 0.375])))
    yield Check("the mixture weight", math.isclose(mix, 0.2 * (1 - entropy / math.log(4))))
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.75, 0.0])
    yield Check("divergence is KL(before || now)", math.isclose(divergence(p, q), by_hand))

    def rule(state: StepState) -> list[int]:
        return state.order(lambda p: -entropy_nats(p))[:1]

    with bidirectional(CONFIDENT) as llm:
        for settled, refinements in (("0.1", 1), ("-1", 20)):
            text, filled = steps(llm, f"lrd:mixture=0,settled={settled},block=12", 24)
            nonempty = [one for one in filled if one]
            expected = naive(CONFIDENT, 24, 12, rule)
            yield Check(
                "without mixing, positions are filled by entropy", (text, nonempty) == expected
            )
            empty = len(filled) - len(nonempty)
            yield Check(
                f"after {refinements} refinement passes per block", empty == 2 * refinements
            )
    with bidirectional(lambda path: CONFIDENT(path[-1:])) as llm:
        filled = steps(llm, "lrd:mixture=0,block=12", 24)[1]
        yield Check(
            "converged distributions fill the block", [len(f) for f in filled] == [0, 1, 11] * 2
        )
        moved = steps(llm, "lrd:mixture=0.5,block=12", 24)[1]
        yield Check(
            "mixtures have no effect on a model that does not attend to them", moved == filled
        )
    with bidirectional(CONFIDENT) as llm:
        plain, soft = (steps(llm, f"lrd:mixture={mix},block=12", 24)[0] for mix in (0, 0.5))
        yield Check("mixtures change the model's output", plain != soft)
