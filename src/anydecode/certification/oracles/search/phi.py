"""Oracle test of phi (Xu et al., arXiv:2503.13288): the whole search replayed on texts alone, every
step and rest from the first token, with clusters computed word by word."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

PROMPT, LIMIT = [0, 1], 24
PIECES = ("red ", "green ", "blue ", "\n", "grey\n", "red-green ", "x ")
END = len(PIECES)
Point = dict[str, float]


def color_model(seed: int = 3) -> ScriptedModel:
    """Pseudo-random logits of `PIECES` and the end token."""

    @cache
    def row_after(last: tuple[int, ...]) -> np.ndarray:
        row = 1.2 * np.random.default_rng([seed, *last]).normal(size=END + 1)
        row[END] -= 2.0
        return np.asarray(row, np.float32)

    return ScriptedModel(lambda seen: row_after(tuple(seen[-3:])), vocab_size=END + 1)


def color_llm(seed: int = 3) -> LLM:
    return LLM(color_model(seed), tokenizer=PieceTokenizer(*PIECES), cache_positions=8192)


def written(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens if token != END)


def logprob(model: ScriptedModel, text: list[int], first: int) -> float:
    """The mean log-probability of the tokens from `first` on."""
    logs = [log_softmax(logits_after(model, PROMPT + text[:i])) for i in range(first, len(text))]
    return float(np.mean([row[token] for row, token in zip(logs, text[first:], strict=True)]))


def grown(
    model: ScriptedModel, text: list[int], noise: Noise, heat: float, *, one_step: bool
) -> list[int]:
    """The text with one step more, or to its end."""
    new = list(text)
    while len(new) < LIMIT and new[-1:] != [END]:
        row = logits_after(model, PROMPT + new).astype(np.float64) / heat
        new.append(int((row + noise.gumbel(range(END + 1), len(PROMPT) + len(new))).argmax()))
        if one_step and "\n" in written(new[len(text) :]):
            break
    return new


def points_of(texts: list[str]) -> list[Point]:
    """TF-IDF vectors of length 1."""
    counts = [Counter(re.findall(r"\w\w+", text.lower())) for text in texts]
    found = []
    for one in counts:
        point = {}
        for word, count in one.items():
            holders = sum(word in other for other in counts)
            point[word] = count * (1 + math.log((1 + len(texts)) / (1 + holders)))
        length = math.sqrt(sum(value * value for value in point.values()))
        found.append({word: value / length for word, value in point.items()})
    return found


def distance(a: Point, b: Point) -> float:
    """The squared distance."""
    words = sorted({*a, *b})
    return round(sum((a.get(word, 0.0) - b.get(word, 0.0)) ** 2 for word in words), 12)


def clusters(points: list[Point], k: int, uniform: list[float]) -> list[int]:
    """Lloyd's algorithm from k-means++."""
    centres = [points[int(uniform[0] * len(points))]]
    for u in uniform[1:]:
        near = [min(distance(point, centre) for centre in centres) for point in points]
        if sum(near) == 0:
            break
        mark, total = u * sum(near), 0.0
        for point, d in zip(points, near, strict=True):
            total += d
            if total > mark:
                centres.append(point)
                break
    labels: list[int] = []
    while True:
        found = [
            min(range(len(centres)), key=lambda i: (distance(point, centres[i]), i))
            for point in points
        ]
        if found == labels:
            return labels
        labels = found
        for i in range(len(centres)):
            members = [point for point, label in zip(points, labels, strict=True) if label == i]
            if members:
                words = {word for point in members for word in point}
                centres[i] = {
                    w: sum(point.get(w, 0.0) for point in members) / len(members) for w in words
                }


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp((value - max(values)) / 0.1) for value in values]
    return [weight / sum(weights) for weight in weights]


def replay(
    model: ScriptedModel,
    seed: int,
    *,
    width: int = 4,
    k: int = 4,
    rounds: int = 8,
    min_rounds: int = 4,
    sigma: float = 1.0,
    share: float = 0.7,
    heat: float = 0.6,
) -> tuple[list[int], int]:
    """The answer, and the number of rounds."""
    base, extra = Noise(seed), Noise(seed).with_purpose("resample")

    def drawn(weights: list[float], count: int, number: int, purpose: int) -> list[int]:
        gumbel = extra.gumbel(range(len(weights)), number, purpose)
        keys = [math.log(max(w, 1e-300)) + g for w, g in zip(weights, gumbel, strict=True)]
        return sorted(range(len(keys)), key=lambda i: -keys[i])[:count]

    def labels_of(texts: list[str], count: int, number: int) -> list[int] | None:
        points = points_of(texts) if any(re.findall(r"\w\w+", text) for text in texts) else []
        if len(points) < count:
            return None
        return clusters(points, count, extra.uniform(range(count), number, 2).tolist())

    texts: list[list[int]] = [[] for _ in range(width)]
    values = [0.0] * width
    per_round = width * k
    done = 0
    while True:
        steps, means = [], []
        for i in range(per_round):
            old = texts[i // k]
            noise = base.forked(1 + 2 * per_round * done + i)
            new = grown(model, old, noise, heat, one_step=True)
            steps.append(new)
            means.append(logprob(model, new, len(old)) if new != old else values[i // k])
        bound = float(np.mean(means)) - sigma * float(np.std(means))
        kept = [i for i in range(per_round) if means[i] > bound]
        pruned = [i for i in range(per_round) if means[i] <= bound]
        if len(kept) < width:
            refill = drawn(softmax([means[i] for i in pruned]), width - len(kept), done, 0)
            kept = sorted(kept + [pruned[i] for i in refill])
        rests, found = [], []
        for place, i in enumerate(kept):
            noise = base.forked(1 + per_round * (2 * done + 1) + place)
            whole = grown(model, steps[i], noise, 1.0, one_step=False)
            rests.append(written(whole[len(steps[i]) :]))
            has_rest = len(whole) > len(steps[i])
            found.append((logprob(model, whole, len(steps[i])) if has_rest else means[i], has_rest))
        gains = [value - values[i // k] for (value, _), i in zip(found, kept, strict=True)]
        pool = [n for n, (gain, (_, has)) in enumerate(zip(gains, found, strict=True))
                if has and gain > 0]  # fmt: skip
        common = 0.0
        if len(pool) < width:
            chosen = drawn(softmax(gains), width, done, 1)
        else:
            weights = softmax([gains[n] for n in pool])
            labels = labels_of([rests[n] for n in pool], 3, done)
            if labels is not None:
                size = [labels.count(label) / len(labels) for label in labels]
                common = max(size)
                total = sum(map(math.exp, size))
                weights = [w / 2 + math.exp(s) / total / 2
                           for w, s in zip(weights, size, strict=True)]  # fmt: skip
            chosen = [pool[n] for n in drawn(weights, width, done, 1)]
        numbers = [kept[n] for n in chosen]
        last = {written(steps[i][len(texts[i // k]) :]) for i in numbers}
        texts, values = [steps[i] for i in numbers], [found[n][0] for n in chosen]
        done += 1
        if (
            (done >= min_rounds and (common > share or len(last) == 1))
            or done == rounds
            or all(len(text) == LIMIT or text[-1:] == [END] for text in texts)
        ):
            break
    wholes, gains, members = [], [], []
    for i, text in enumerate(texts):
        noise = base.forked(1 + 2 * per_round * rounds + i)
        whole = grown(model, text, noise, 1.0, one_step=False)
        wholes.append(whole)
        gains.append(
            logprob(model, whole, len(text)) - values[i] if len(whole) > len(text) else 0.0
        )
        if len(whole) > len(text) and gains[i] > 0:
            members.append(i)
    labels = labels_of([written(wholes[i][len(texts[i]) :]) for i in members], 2, done)
    if labels is not None:
        top = max(sorted(set(labels)), key=labels.count)
        members = [i for i, label in zip(members, labels, strict=True) if label == top]
    members = members or list(range(width))
    [answer] = drawn(softmax([gains[i] for i in members]), 1, done, 1)
    return wholes[members[answer]], done


@oracle_test("phi")
def phi() -> Iterator[Check]:
    """The replays."""
    settings: dict[str, dict[str, Any]] = {
        "phi": {},
        "phi:sigma=0,share=0.3": {"sigma": 0.0, "share": 0.3},
        "phi:width=3,k=2,rounds=2": {"width": 3, "k": 2, "rounds": 2},
        "phi:min_rounds=1,share=0.4,temperature=1": {"min_rounds": 1, "share": 0.4, "heat": 1.0},
        # Many last texts, so that some are in the smaller cluster.
        "phi:width=12,k=1,rounds=1": {"width": 12, "k": 1, "rounds": 1},
    }
    model = color_model()
    for decoder, values in settings.items():
        wrong, rounds = 0, []
        with color_llm() as llm:
            for seed in range(5):
                found = llm.generate(PROMPT, decoder=decoder, seed=seed, max_tokens=LIMIT)
                expected, done = replay(model, seed, **values)
                wrong += found.tokens != expected
                rounds.append(done)
        detail = f"{wrong} of 5 wrong, {min(rounds)} to {max(rounds)} rounds"
        yield Check(f"{decoder} equals its replay", wrong == 0, detail)


@measure("phi", "mean log-probability lost against sampling", samples=24, margin=-0.05)
def phi_gain(samples: int) -> float:
    """Per token, in nats: of samples at the temperature of the steps, less that of the texts."""
    means = []
    for decoder in ("autoregressive", "phi"):
        total = 0.0
        with color_llm() as llm:
            for seed in range(samples):
                text = llm.generate(
                    PROMPT, decoder=decoder, seed=seed, temperature=0.6, max_tokens=LIMIT
                ).tokens
                total += logprob(color_model(), text, 0)
        means.append(total / samples)
    return means[0] - means[1]
