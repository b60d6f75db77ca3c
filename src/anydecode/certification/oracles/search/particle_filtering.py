"""Oracle test of particle-filtering (Puri et al., arXiv:2502.01618): the exact law of the answer of
two particles by enumeration of everything that can happen, the law that many particles approach,
and a replay of the default build from the texts alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text, fit
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.decoders.search.particle_filtering import ParticleFiltering
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise

PROMPT, END, LENGTH = [0, 1], 3, 3
Pair = tuple[Text, ...]


def flat_model() -> ScriptedModel:
    """Four tokens that are nearly equally probable, of which the last ends a text."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = 0.4 * np.random.default_rng([11, *seen]).normal(size=4)
        row[END] -= 1.0
        return np.asarray(row, np.float32)

    return ScriptedModel(script, vocab_size=4)


def reward_of(text: Text) -> float:
    """A fixed pseudo-random reward of a text, without its end token."""
    visible = [token for token in text if token != END]
    return float(1 / (1 + np.exp(-np.random.default_rng([11, *visible]).normal())))


def reward_texts(prompt: str, texts: list[str]) -> list[float]:
    """`reward_of` as a reward: the tokens of a text are its bytes."""
    return [reward_of(tuple(text.encode())) for text in texts]


def odds(text: Text) -> float:
    """The potential of a text at temperature 1."""
    return reward_of(text) / (1 - reward_of(text))


def has_ended(text: Text) -> bool:
    return len(text) == LENGTH or text[-1:] == (END,)


def grown(model: ScriptedModel, text: Text) -> dict[Text, float]:
    """The texts with one more token, and their probabilities; the text itself if it has ended."""
    if has_ended(text):
        return {text: 1.0}
    p = np.exp(log_softmax(logits_after(model, [*PROMPT, *text])))
    return {(*text, token): float(p[token]) for token in range(len(p))}


def two_particle_law(model: ScriptedModel, *, replaces: bool, draws: bool) -> dict[Text, float]:
    """The law of the answer of two particles with steps of one token, by enumeration."""
    law: dict[Text, float] = defaultdict(float)
    states: dict[Pair, float] = {((), ()): 1.0}
    for _ in range(LENGTH):
        following: dict[Pair, float] = defaultdict(float)
        for pair, probability in states.items():
            for after in product(*(grown(model, text).items() for text in pair)):
                mass = probability * math.prod(p for _, p in after)
                texts = tuple(text for text, _ in after)
                weights = [
                    odds(new) / (1.0 if replaces or not old else odds(old))
                    for new, old in zip(texts, pair, strict=True)
                ]
                shares = [weight / sum(weights) for weight in weights]
                if not all(map(has_ended, texts)):
                    for a, b in product(range(2), repeat=2):
                        following[texts[a], texts[b]] += mass * shares[a] * shares[b]
                elif draws:
                    for text, share in zip(texts, shares, strict=True):
                        law[text] += mass * share
                else:
                    law[max(texts, key=reward_of)] += mass
        states = following
    return dict(law)


def limit_law(model: ScriptedModel, *, replaces: bool) -> dict[Text, float]:
    """The law that many particles approach: the model's law times the potential of the whole text,
    or times the potentials after every step, in which a text that has ended counts again."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Text, float] = defaultdict(float)
        for text, probability in law.items():
            for after, p in grown(model, text).items():
                longer[after] += probability * p * (odds(after) if replaces else 1.0)
        law = longer
    weighed = {text: p * (1.0 if replaces else odds(text)) for text, p in law.items()}
    return {text: weight / sum(weighed.values()) for text, weight in weighed.items()}


def answers(llm: LLM, decoder: Any, samples: int) -> list[Text]:
    """The answers to requests with different seeds."""
    options: dict[str, Any] = {"decoder": decoder, "temperature": 1.0, "max_tokens": LENGTH}
    return [tuple(llm.generate(PROMPT, seed=seed, **options).tokens) for seed in range(samples)]


#: Tokens with line ends in many places, and one that ends a text.
PIECES = ("a", "b", "\n", "\n\n", "c\n", "\nd", "é")


def line_model(blank: float = 0.0, end: float = -2.0) -> ScriptedModel:
    """Pseudo-random logits of `PIECES` and the end token, to which `blank` is added for those with
    the end of a line, and `end` for the end token."""
    added = np.array([blank * ("\n" in piece) for piece in PIECES] + [end])

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([3, *seen[-3:]]).normal(size=len(PIECES) + 1) + added
        return np.asarray(row, np.float32)

    return ScriptedModel(script, vocab_size=len(PIECES) + 1)


def replay(model: ScriptedModel, prompt: list[int], seed: int, limit: int) -> list[int]:
    """The answer of the default build: every step is computed from the first token."""
    end, noise = len(PIECES), Noise(seed)
    texts: list[list[int]] = [[] for _ in range(8)]
    noises = [noise.with_stream(number << 16) for number in range(8)]

    def is_over(text: list[int]) -> bool:
        return len(text) == limit or text[-1:] == [end]

    def words(text: list[int]) -> str:
        return "".join(PIECES[token] for token in text if token != end)

    def next_token(text: list[int], own: Noise) -> int:
        row = logits_after(model, prompt + text)
        keys = row.astype(np.float64) + own.gumbel(range(len(row)), len(prompt) + len(text))
        return int(keys.argmax())

    for step in range(40):
        for number, text in enumerate(texts):
            before, first = len(words(text)), len(text)
            while not is_over(text):
                text.append(next_token(text, noises[number]))
                is_blank = "\n\n" in words(text)[max(0, before - 1) :]
                if step < 39 and (is_blank or len(text) - first == 1024):
                    break
        rewards = []
        for text in texts:
            rows = [log_softmax(logits_after(model, prompt + text[:i])) for i in range(len(text))]
            logs = [row[token] for row, token in zip(rows, text, strict=True)]
            rewards.append(min(1 - 1e-7, math.exp(sum(logs) / len(logs))))
        if all(map(is_over, texts)):
            break
        weights = np.array([one / (1 - one) for one in rewards])
        edges = np.cumsum(weights / weights.sum())
        places = noise.with_purpose("resample").uniform(range(8), step)
        chosen = [min(7, sum(edge <= place for edge in edges)) for place in places]
        noises = [
            noises[number] if one == number else noise.forked(1 + 8 * step + number)
            for number, one in enumerate(chosen)
        ]
        texts = [list(texts[one]) for one in chosen]
    return texts[max(range(8), key=lambda number: rewards[number])]


def _replay_checks() -> Iterator[Check]:
    """Answers of the default build: of few steps, of more than the 40 that are allowed, and of one
    that ends after 1024 tokens."""
    many, none = line_model(blank=4.0, end=-9.0), line_model(blank=-40.0, end=-40.0)
    for name, lines, seeds, limit, min_steps in (
        ("the default build", line_model(), range(16), 24, 16),
        ("more than 40 steps of the default build", many, range(2), 120, 2 * 40),
        ("a step of 1024 tokens of the default build", none, range(1, 2), 1030, 1),
    ):
        wrong = steps = 0
        with LLM(lines, tokenizer=PieceTokenizer(*PIECES), cache_positions=16384) as llm:
            for seed in seeds:
                options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": limit}
                found = llm.generate(PROMPT, decoder="particle-filtering", **options)
                wrong += found.tokens != replay(lines, PROMPT, seed, limit)
                steps += found.text.count("\n\n") + len(found.tokens) // 1024
        detail = f"{wrong} of {len(seeds)} wrong, {steps} steps"
        yield Check(f"{name}: equal to the replay", wrong == 0 and steps >= min_steps, detail)


@oracle_test("particle-filtering")
def particle_filtering() -> Iterator[Check]:
    """The laws of the answer, the replay, and plain decoding with one particle."""
    yield from _replay_checks()
    model = flat_model()
    with LLM(model, tokenizer=ShortTokenizer(), cache_positions=4096) as llm:

        def build(n: int, weights: str, answer: str) -> ParticleFiltering:
            return ParticleFiltering(n, reward_texts, step_tokens=1, weights=weights, answer=answer)

        for weights in ("increment", "replace"):
            texts = answers(llm, build(64, weights, "draw"), 100)
            result = fit(texts, limit_law(model, replaces=weights == "replace"))
            yield Check(f"law of many particles, {weights}, draw", result.passed, str(result))
        for weights, answer in product(("replace", "increment"), ("best", "draw")):
            law = two_particle_law(model, replaces=weights == "replace", draws=answer == "draw")
            result = fit(answers(llm, build(2, weights, answer), 400), law)
            yield Check(f"law of two particles, {weights}, {answer}", result.passed, str(result))
        plain = answers(llm, "autoregressive", 40)
        one = answers(llm, build(1, "replace", "best"), 40)
        yield Check("one particle is plain decoding", one == plain)


@measure("particle-filtering", "reward lost against sampling", samples=200, margin=-0.1)
def particle_gain(samples: int) -> float:
    """The mean share of one token in samples, less that in the answers of the default build with
    this reward and steps of one token."""

    def share(prompt: str, texts: list[str]) -> list[float]:
        return [text.count("\0") / max(1, len(text)) for text in texts]

    decoder = ParticleFiltering(reward=share, step_tokens=1)
    with LLM(flat_model(), tokenizer=ShortTokenizer(), cache_positions=4096) as llm:
        means = [
            np.mean(share("", [bytes(text).replace(b"\3", b"").decode() for text in texts]))
            for texts in (answers(llm, one, samples) for one in ("autoregressive", decoder))
        ]
    return float(means[0] - means[1])
