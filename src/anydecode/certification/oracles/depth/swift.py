"""Oracle test of SWIFT: the search and the draft trees are replayed with a forward pass without
sublayers, from the sets that the method tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import VOCABULARY
from anydecode.certification.oracles.depth.skipped_parts import (
    PartialForward,
    RecordedPass,
    copied,
    record_passes,
)
from anydecode.certification.oracles.speculative.penalised_drafts import (
    penalty_checks,
    same_layers,
)
from anydecode.certification.oracles.speculative.rejection_rules import (
    network_script,
    rejection_checks,
)
from anydecode.certification.rounds import TracedRound, accepted, rounds
from anydecode.certification.tiny import tiny_model, tiny_network
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer
from anydecode.sampling.noise import Noise

PROMPTS = ("the cat sat on the mat", "abcabc")
LAYERS, LENGTH, WINDOW, BUDGET, EVERY = 6, 90, 32, 3, 25
SUBLAYERS = [(kind, layer) for kind in ("attention", "mlp") for layer in range(1, LAYERS - 1)]
Skipped = frozenset[tuple[str, int]]
ALL_SETS: list[Skipped] = [frozenset(one) for one in combinations(SUBLAYERS, BUDGET)]


@oracle_test("swift")
def swift() -> Iterator[Check]:
    """Each round scores a set on the first 32 tokens; the best one drafts a chain with siblings.
    Samples under the rejection rule follow the target, through trees of several levels."""
    yield from penalty_checks("swift:threshold=0,size=4", same_layers)
    for temperature in (0.0, 0.8):
        model = tiny_model(layers=LAYERS, residual=0.25)
        replay = _Replay(model.network, temperature)
        traces: list[TracedRound] = []
        with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
            for prompt in PROMPTS:
                passes = record_passes(model)
                trace = rounds(llm, "swift", prompt, LENGTH, temperature=temperature)
                replay.read(trace, passes)
                traces += trace
        where = f"T={temperature}"
        for name, wrong in replay.wrong.items():
            yield Check(f"{name}, {where}", wrong == 0, f"{wrong} wrong")
        detail = f"{len(replay.tried)} sets scored, {replay.num_modelled} chosen by the model"
        is_searched = len(replay.tried) > EVERY and replay.num_modelled > 0 and replay.num_found > 1
        yield Check(f"several sets are found, {where}", is_searched, detail)
        widths = sorted(replay.widths)
        yield Check(f"levels have several widths, {where}", len(widths) > 1, f"{widths}")
        depths = sorted({len(path) for one in traces for path in one.paths})
        yield Check(f"trees have several levels, {where}", max(depths) > 1, f"{depths}")
        count = accepted(traces)
        yield Check(f"drafts are accepted, {where}", count > 10, f"{count}")
    options: dict[str, Any] = {"layers": LAYERS, "residual": 0.3, "vocabulary": VOCABULARY}

    def open_llm() -> LLM:
        return LLM(tiny_model(**options), tokenizer=ByteTokenizer(), cache_positions=8192)

    script = network_script(tiny_network(**options))
    yield from rejection_checks("swift", open_llm, script=script, kind="wor", threshold=0.0)


class _Replay:
    """The search over several texts."""

    def __init__(self, network: Network, temperature: float) -> None:
        self.network, self.temperature = network, temperature
        odd = range(1, LAYERS - 1, 2)
        self.best: Skipped = frozenset((kind, one) for kind in ("attention", "mlp") for one in odd)
        self.num_found = self.num_modelled = 0
        self.tried: list[tuple[Skipped, float]] = []
        self.widths: set[int] = set()
        self.wrong = {
            "sets have three sublayers and are new": 0,
            "every 25th set has the largest upper bound": 0,
            "drafts leave out the best set": 0,
            "trees equal the oracle's": 0,
            "every round scores a set": 0,
        }

    def read(self, trace: list[TracedRound], passes: list[RecordedPass]) -> None:
        """Replay one text."""
        prompt = trace[0].text
        forward, num_read = PartialForward(self.network), 0
        start: PartialForward | None = None
        scores: dict[Skipped, float] = {}
        skipping = [one for one in passes if one.variant is not None]
        generated = len(prompt) + LENGTH
        for one in trace:
            for token in one.text[num_read:-1]:
                if num_read == len(prompt):
                    start = copied(forward)
                forward.step(token)
                num_read += 1
            if one is not trace[0] and len(one.text) > len(prompt) + WINDOW + 1:
                assert start is not None
                expected = list(range(len(prompt), len(prompt) + WINDOW))
                if not skipping or skipping[0].positions != expected:
                    self.wrong["every round scores a set"] += 1
                    return
                self._score(_skipped(skipping.pop(0)), start, one.text[len(prompt) :], scores)
            size = 0 if one is trace[0] else min(25, generated - len(one.text) - 1)
            paths, depth = self._tree(copied(forward), one.text, size)
            self.wrong["trees equal the oracle's"] += one.paths != paths
            drafts, skipping = skipping[:depth], skipping[depth:]
            positions = [[len(one.text) - 1 + i] for i in range(depth)]
            is_best = all(_skipped(other) == self.best for other in drafts)
            is_chain = [other.positions for other in drafts] == positions
            self.wrong["drafts leave out the best set"] += not (is_best and is_chain)
        self.wrong["every round scores a set"] += len(skipping)

    def _score(
        self,
        skipped: Skipped,
        start: PartialForward,
        text: list[int],
        scores: dict[Skipped, float],
    ) -> None:
        """Score a set, and keep it if it is better than the best one on this text."""
        forward, matches = copied(start), 0
        for token, following in zip(text[:WINDOW], text[1 : WINDOW + 1], strict=True):
            logits = forward.step_without(token, *_parts(skipped))
            matches += int(logits.argmax()) == following
        score = matches / WINDOW
        if self.num_found and self.best not in scores:  # of the text before
            self.wrong["every round scores a set"] += skipped != self.best
            scores[skipped] = score
            return
        is_new = skipped in ALL_SETS and skipped not in scores
        self.wrong["sets have three sublayers and are new"] += not is_new
        if (len(self.tried) + 1) % EVERY == 0:
            self.num_modelled += 1
            others = [one for one in ALL_SETS if one not in scores]
            bounds = dict(zip(others, self._upper_bounds(others), strict=True))
            is_largest = is_new and bounds[skipped] > max(bounds.values()) - 1e-6
            self.wrong["every 25th set has the largest upper bound"] += not is_largest
        self.tried.append((skipped, score))
        if score > (scores[self.best] if self.num_found else 0):
            self.best, self.num_found = skipped, self.num_found + 1
        scores[skipped] = score

    def _upper_bounds(self, sets: list[Skipped]) -> np.ndarray:
        """Mean and 2.5 deviations of a Gaussian process over all scores."""
        values = np.array([score for _, score in self.tried])
        centre, spread = values.mean(), values.std()
        y = (values - centre) / spread
        known = [one for one, _ in self.tried]
        best_fit, result = -np.inf, y
        for length in (0.25, 0.5, 1, 2, 4, 8, 16):
            covariance = _kernel(known, known, length) + 0.01 * np.eye(len(known))
            inverse = np.linalg.inv(covariance)
            fit = -0.5 * y @ inverse @ y - 0.5 * np.linalg.slogdet(covariance)[1]
            if fit > best_fit:
                across = _kernel(sets, known, length)
                variance = 1 - np.einsum("cn,nm,cm->c", across, inverse, across)
                bounds = across @ inverse @ y + 2.5 * np.sqrt(np.maximum(variance, 0))
                best_fit, result = fit, centre + spread * bounds
        return result

    def _tree(
        self, forward: PartialForward, text: list[int], size: int
    ) -> tuple[list[tuple[int, ...]], int]:
        """The drafted paths, and the depth of the draft."""
        paths: list[tuple[int, ...]] = []
        spine: tuple[int, ...] = ()
        while len(spine) < size:
            logits = forward.step_without((*text, *spine)[-1], *_parts(self.best))
            keys = logits.copy()
            if self.temperature:
                noise = Noise(5).gumbel(range(len(keys)), len(text) + len(spine))
                keys = logits / self.temperature + noise
                keys[np.argsort(-logits, kind="stable")[64:]] = -np.inf
            ranked = np.argsort(-keys, kind="stable")
            share = float(np.exp(logits[ranked[0]] - np.logaddexp.reduce(logits)))
            counts = (1, 3, 5, 10) if self.temperature else (3, 5, 8, 10)
            level = 0 if share > 0.95 else 1 if share > 0.8 else 2 if share > 0.5 else 3
            paths += [(*spine, int(token)) for token in ranked[: counts[level]]]
            self.widths.add(counts[level])
            spine = (*spine, int(ranked[0]))
            if share < 0.8:
                break
        return paths, len(spine)


def _skipped(one: RecordedPass) -> Skipped:
    parts = one.variant
    return frozenset(
        [("attention", layer) for layer in parts.mixers] + [("mlp", layer) for layer in parts.mlps]
    )


def _parts(skipped: Skipped) -> tuple[set[int], set[int]]:
    attention = {layer for kind, layer in skipped if kind == "attention"}
    return attention, {layer for kind, layer in skipped if kind == "mlp"}


def _kernel(sets: list[Skipped], others: list[Skipped], length: float) -> np.ndarray:
    """Matern 5/2 over the distance of the sets' vectors of zeros and ones."""
    distance = np.array([[len(one ^ other) ** 0.5 for other in others] for one in sets]) / length
    root = 5**0.5 * distance
    kernel: np.ndarray = (1 + root + root**2 / 3) * np.exp(-root)
    return kernel
