"""Oracle tests of acceptance rules: all outcomes enumerated, cases computed by hand, and samples of
drafts with a known distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    PROMPT,
    SAMPLING_OPTIONS,
    TARGET_SCRIPT,
    VOCABULARY,
    Script,
    bigram_logits,
    expected,
    fit,
    sampled,
    small_llm,
)
from anydecode.decoders.framework.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.framework.rejection import (
    RejectionSampling,
    exclude_token,
    rejection_steps,
)
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.rules import (
    lenient_sampling,
    top_m_acceptance,
    typical_acceptance,
)
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: An acceptance ladder: from p, q, the kind and the siblings to acceptance probabilities and
#: residuals.
Ladder = Callable[[np.ndarray, np.ndarray, str, list[int]], Iterator[tuple[float, np.ndarray]]]


def draws(q: np.ndarray, kind: str, width: int) -> Iterator[tuple[float, list[int]]]:
    """Every way in which `width` siblings can be drawn from `q`, with its probability."""
    if kind == "point":
        yield 1.0, [int(token) for token in np.argsort(-q, kind="stable")[:width]]
        return
    for tokens in product(range(len(q)), repeat=width):
        left: np.ndarray | None = q
        probability = 1.0
        for token in tokens:
            probability *= 0.0 if left is None else float(left[token])
            if kind == "wor" and left is not None and probability:
                left = exclude_token(left, token)
        if probability > 0:
            yield probability, list(tokens)


def outcome(
    p: np.ndarray, q: np.ndarray, kind: str, width: int, rungs: Ladder = rejection_steps
) -> np.ndarray:
    """The distribution of the token that a rule emits, summed over all draws and accept decisions:
    float64 `[vocab_size]`."""
    distribution = np.zeros(len(p))
    for probability, tokens in draws(q, kind, width):
        rest = p
        for token, (acceptance, after) in zip(tokens, rungs(p, q, kind, tokens), strict=True):
            distribution[token] += probability * acceptance
            probability *= 1 - acceptance
            rest = after
        distribution += probability * rest
    return distribution


def cases(count: int = 12, size: int = 5) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of distributions: random ones, some with zeros, and some that are equal."""
    random = np.random.default_rng(8)
    for number in range(count):
        p, q = random.dirichlet(np.full(size, 0.7), 2)
        if number % 3 == 1:
            p[number % size] = 0
            q[(number + 1) % size] = 0
        yield p / p.sum(), (p if number % 4 == 3 else q) / (p if number % 4 == 3 else q).sum()


class TableTrees(Drafter):
    """Drafter of trees with two levels of `width` siblings under every node, drawn from a table as
    `kind` says."""

    def __init__(self, kind: str, width: int = 2, script: Script = DRAFT_SCRIPT) -> None:
        self.kind = kind
        self.width = width
        self.script = script

    def open(self, sequence: Sequence) -> DraftSession:
        return _TableSession(self, sequence)


class _TableSession(DraftSession):
    def __init__(self, drafter: TableTrees, sequence: Sequence) -> None:
        self.drafter = drafter
        self.sequence = sequence

    def propose(self, size: int) -> Proposal:
        tree = TokenTree(kind=self.drafter.kind)
        level: list[tuple[int, list[int], Sampler]] = [(ROOT, [], self.sequence.sampler.fork())]
        for _ in range(2):
            grown = []
            for node, path, sampler in level:
                seen = (*self.sequence.all_tokens, *path)
                q = sampler.distribution(self.drafter.script(seen)).dense(VOCABULARY)
                tree.probabilities[node] = q
                for token in self._siblings(q, len(seen)):
                    branch = sampler.fork()
                    branch.advance(token)
                    grown.append((tree.add(token, node), [*path, token], branch))
            level = grown
        return tree
        yield

    def _siblings(self, q: np.ndarray, position: int) -> list[int]:
        noise = self.sequence.noise.with_purpose("draft")
        support, width = np.flatnonzero(q), self.drafter.width
        if self.drafter.kind == "point":
            return [int(t) for t in support[np.argsort(-q[support], kind="stable")][:width]]
        weights = np.log(q[support])
        if self.drafter.kind == "wor":
            keys = weights + noise.gumbel(support, position)
            return [int(token) for token in support[np.argsort(-keys)][:width]]
        keys = [weights + noise.gumbel(support, position, attempt) for attempt in range(width)]
        return [int(support[key.argmax()]) for key in keys]


@oracle_test("rejection-sampling")
def rejection() -> Iterator[Check]:
    """Rejection sampling: all outcomes enumerated, a chain by hand, and trees of all three kinds
    through the engine."""
    for kind, width in product(("wor", "iid", "point"), (1, 2, 3)):
        off = max(float(abs(outcome(p, q, kind, width) - p).sum()) for p, q in cases())
        yield Check(f"{width} siblings, {kind}: the outcomes sum to p", off < 1e-12, f"{off:.1e}")
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    (acceptance, rest), *_ = rejection_steps(p, q, "wor", [1])
    yield Check(
        "accepts with p / q, then samples from p - q", _near(acceptance, 0.5) and rest[0] == 1
    )
    (one, _), (two, rest) = rejection_steps(p, q, "wor", [1, 0])
    yield Check("the second sibling is compared with q exclude_token the first", _near(two, 1.0))
    (one, _), (two, rest) = rejection_steps(p, q, "point", [0, 1])
    by_hand = _near(one, 0.5) and _near(two, 0.6) and rest[2] == 1
    yield Check("siblings drawn as point masses are accepted with the residual of p", by_hand)
    for kind in ("wor", "iid", "point"):
        with small_llm() as llm:
            decoder = Speculative(TableTrees(kind), acceptance=RejectionSampling())
            result = fit(
                sampled(llm, decoder, SAMPLING_OPTIONS["a grammar"]),
                expected(SAMPLING_OPTIONS["a grammar"]),
            )
        yield Check(f"trees of siblings, {kind}, a grammar", result.passed, str(result))


@oracle_test("lenient-sampling")
def lenient() -> Iterator[Check]:
    """Lenience raises the acceptance probability as the formula says, and bounds every token by p /
    lenience."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    acceptances = [
        next(rejection_steps(p, q, "wor", [1], lenience))[0] for lenience in (1.0, 0.8, 0.5)
    ]
    yield Check("accepts with p / (lenience q)", np.allclose(acceptances, [0.5, 0.625, 1.0]))
    for lenience in (0.9, 0.5, 0.2):
        above = max(
            float((outcome(p, q, "wor", 1, _lenient(lenience)) - p / lenience).max())
            for p, q in cases()
        )
        yield Check(f"lenience {lenience}: no token above p / lenience", above < 1e-12)


@measure("lenient-sampling", "share above p / lenience", samples=500, margin=0.06)
def lenient_loss(samples: int) -> float:
    """By how much the frequency of any first token exceeds p / lenience."""
    with small_llm() as llm:
        texts = sampled(llm, lenient_sampling(lenience=0.5), {}, samples)
    shares = np.bincount([text[0] for text in texts], minlength=VOCABULARY) / samples
    p = np.zeros(VOCABULARY)
    for text, probability in expected({}).items():
        p[text[0]] += probability
    return float((shares - p / 0.5).max())


@oracle_test("typical-acceptance")
def typical() -> Iterator[Check]:
    """The bound by hand at low and high entropy, and drafts that are accepted."""
    p = np.array([0.7, 0.2, 0.1])  # entropy 0.8018, exp(-entropy) 0.4485
    for name, rule, accepted in (
        ("delta exp(-H) = 0.224", TypicalAcceptance(0.3, 0.5), [True, False, False]),
        ("delta exp(-H) = 0.135", TypicalAcceptance(0.3, 0.3), [True, True, False]),
        ("epsilon = 0.15", TypicalAcceptance(0.15, 0.9), [True, True, False]),
    ):
        yield Check(f"accepts what is above {name}", rule.passes(p, [0, 1, 2], 1) == accepted)
    forbidden = TypicalAcceptance().passes(np.array([1.0, 0.0]), [1], 1)
    yield Check("never accepts a forbidden token", forbidden == [False])
    yield from _keeps_more("typical acceptance", typical_acceptance(), temperature=0.9)


@measure("typical-acceptance", "log-likelihood lost per token", samples=60, margin=0.3)
def typical_loss(samples: int) -> float:
    """Nats per token by which the text of plain sampling is more probable under the target."""
    return _likelihood(None, samples) - _likelihood(typical_acceptance(), samples)


@oracle_test("top-m-acceptance")
def top_m() -> Iterator[Check]:
    """Ranks, the gap and the minimum block by hand, and drafts that are accepted."""
    p = np.array([0.25, 0.4, 0.1, 0.25])
    ranked = TopMAcceptance(2).passes(p, [0, 1, 2, 3], 1)
    yield Check("ranks; ties go to the lower id", ranked == [True, True, False, False])
    yield Check("the gap", TopMAcceptance(3, gap=0.4).passes(p, [0, 1], 1) == [False, True])
    yield Check("the gap is log p", TopMAcceptance(3, gap=0.5).passes(p, [0, 1], 1) == [True, True])
    block = [TopMAcceptance(1, block=3).passes(p, [2], depth) for depth in (1, 2, 3)]
    yield Check(
        "the first `block` - 1 drafts are accepted unconditionally",
        block == [[True], [True], [False]],
    )
    yield from _keeps_more("top-2 acceptance", top_m_acceptance(), temperature=0.0)


@measure(
    "top-m-acceptance", "share of tokens beyond the two most probable", samples=240, margin=0.0
)
def top_m_loss(samples: int) -> float:
    """Measured at temperature 0, over `samples` tokens."""
    with _close_llm() as llm:
        tokens = llm.generate(PROMPT, decoder=top_m_acceptance(), max_tokens=samples).tokens
    text, beyond = list(PROMPT), 0
    for token in tokens:
        logits = TARGET_SCRIPT(tuple(text))
        beyond += int((logits > logits[token]).sum() >= 2)
        text.append(token)
    return beyond / samples


def _keeps_more(name: str, decoder: Speculative, temperature: float) -> Iterator[Check]:
    options: dict[str, Any] = {"max_tokens": 120, "temperature": temperature, "seed": 5}
    with _close_llm() as llm:
        exact = llm.generate(PROMPT, decoder="speculative-sampling", **options).stats
        lossy = llm.generate(PROMPT, decoder=decoder, **options).stats
    detail = f"{lossy.tokens_per_pass:.2f} against {exact.tokens_per_pass:.2f} tokens per pass"
    yield Check(f"{name} accepts more drafts", lossy.passes < exact.passes, detail)


def _close_llm() -> LLM:
    """A target, and a draft model that mostly agrees with it."""
    noise = bigram_logits(VOCABULARY, 6, spread=0.5)
    draft = ScriptedModel(lambda seen: TARGET_SCRIPT(seen) + noise(seen), vocab_size=VOCABULARY)
    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    return LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096)


def _likelihood(decoder: Speculative | None, samples: int) -> float:
    """Mean log-probability under the target of sampled tokens, over `samples` texts of eight."""
    chosen: dict[str, Any] = {} if decoder is None else {"decoder": decoder}
    with _close_llm() as llm:
        answer = llm.generate(PROMPT, n=samples, temperature=1.0, seed=2, max_tokens=8, **chosen)
    total = 0.0
    for sample in answer.samples:
        text = list(PROMPT)
        for token in sample.tokens:
            logits = TARGET_SCRIPT(tuple(text)).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
            text.append(token)
    return total / (8 * samples)


def _lenient(lenience: float) -> Ladder:
    return lambda p, q, kind, tokens: rejection_steps(p, q, kind, tokens, lenience)


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-12
