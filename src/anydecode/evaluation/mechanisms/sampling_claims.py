"""What the papers of the sampling rules claim, measured; and their rules on numbers worked by hand.

Each claim stands beside what the rule is meant to better, which must not pass: top-p that drifts,
greedy decoding that walks in circles, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.samplers import softmax
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.top_w import Geometry, TopW, best_set


def logs(*chances: float) -> np.ndarray:
    """Logits float32 of probabilities."""
    row: np.ndarray = np.log(np.array(chances)).astype(np.float32)
    return row


def drawn_from(row: np.ndarray, prompt: tuple[int, ...] = (), **options: Any) -> np.ndarray:
    """The probabilities `[vocab_size]` that a request with these options draws from."""
    sampler = SamplingParams(**options).sampler(prompt, len(row))
    return sampler.distribution(row.astype(np.float32)).dense(len(row))


def by_hand(name: str, found: np.ndarray, *expected: float) -> Check:
    """Whether probabilities are those worked out by hand."""
    return Check(name, bool(np.abs(found - np.array(expected)).max() < 1e-6), str(found.round(4)))


def noisy(seed: int, flat: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A true distribution over some of 600 tokens, and logits of the same smoothed: a tenth of the
    mass lies on tokens that are never right. `flat`: hundreds of tokens are right."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(600)
    support = rng.permutation(600)[: 400 if flat else 6]
    truth[support] = rng.dirichlet(np.full(len(support), 5.0))
    return truth, np.log(0.9 * truth + 0.1 / 600)


def wrong_mass(samples: int, **options: Any) -> float:
    """The mean probability of tokens that are never right."""
    rows = [noisy(seed) for seed in range(samples)]
    return float(np.mean([drawn_from(row, **options)[truth == 0].sum() for truth, row in rows]))


@mechanism("min-p")
def min_p() -> Iterator[Check]:
    """p = 0.4: the bound is 0.4 * 0.5 = 0.2."""
    row = logs(0.5, 0.25, 0.15, 0.1)
    yield by_hand("keeps what is above 0.2", drawn_from(row, min_p=0.4), 2 / 3, 1 / 3, 0, 0)
    flat = drawn_from(logs(0.26, 0.25, 0.25, 0.24), min_p=0.4)
    yield by_hand("keeps all of a flat row", flat, 0.26, 0.25, 0.25, 0.24)
    hot = wrong_mass(20, temperature=2.0, top_p=0.9)
    yield Check("top-p lets the tail in when it is hot", hot > 0.3, f"{hot:.2f} of the mass")


@measure("min-p", "mass on wrong tokens at temperature 2", samples=60, margin=0.02)
def min_p_claim(samples: int) -> float:
    """Coherence at high temperature: the bound follows the best token."""
    return wrong_mass(samples, temperature=2.0, min_p=0.2)


@mechanism("typical")
def typical() -> Iterator[Check]:
    """Entropy of (0.6, 0.2, 0.1, 0.1) is 1.089 nats; surprises are 0.511, 1.609, 2.303, 2.303."""
    row = logs(0.6, 0.2, 0.1, 0.1)
    yield by_hand(
        "the second token is the most typical", drawn_from(row, typical_p=0.15), 0, 1, 0, 0
    )
    yield by_hand("then the first", drawn_from(row, typical_p=0.7), 0.75, 0.25, 0, 0)


@measure("typical", "distance from the entropy, against plain sampling", samples=80, margin=0.7)
def typical_claim(samples: int) -> float:
    """Tokens carry about as much information as is expected of them."""
    return typicality(samples, typical_p=0.5)


def typicality(samples: int, **options: Any) -> float:
    """Mean |surprise - entropy| under a rule, over the same without it."""
    with_rule, without = 0.0, 0.0
    for seed in range(samples):
        row = np.random.default_rng(seed).normal(0, 1.5, 60)
        p = softmax(row)
        off = np.abs(-np.log(p) + (p * np.log(p)).sum())
        with_rule += float((drawn_from(row, **options) * off).sum())
        without += float((p * off).sum())
    return with_rule / without


@mechanism("eta")
def eta() -> Iterator[Check]:
    """Bounds min(e, sqrt(e) exp(-H)): for (0.7, 0.2, 0.08, 0.02) H = 0.852, exp(-H) = 0.427."""
    row = logs(0.7, 0.2, 0.08, 0.02)
    kept = drawn_from(row, eta=0.04)
    yield by_hand("0.04 bounds itself", kept, 0.7 / 0.98, 0.2 / 0.98, 0.08 / 0.98, 0)
    kept = drawn_from(row, eta=0.36)
    yield by_hand("0.36 becomes 0.256", kept, 1, 0, 0, 0)
    flat = np.linspace(0, 0.2, 100)
    yield Check("a flat row stays whole", bool((drawn_from(flat, eta=0.05) > 0).all()))
    yield Check("epsilon alone would cut it", bool((drawn_from(flat, epsilon=0.05) > 0).sum() == 1))
    for name, options in (("top-p", {"top_p": 0.9}), ("epsilon", {"epsilon": 4e-3})):
        off = desmoothing(10, **options)
        yield Check(f"{name} is further from the truth", off > 0.7, f"{off:.2f}")


@measure("eta", "distance from the truth, against the smoothed model", samples=30, margin=0.6)
def eta_claim(samples: int) -> float:
    """Truncation takes back what smoothing did, in flat rows and in sharp ones."""
    return desmoothing(samples, eta=4e-4)


def desmoothing(samples: int, **options: Any) -> float:
    """Total variation from the truth under a rule, over that of the model itself."""
    ratios = []
    for seed in range(samples):
        for flat in (False, True):
            truth, row = noisy(seed, flat)
            off = np.abs(drawn_from(row, **options) - truth).sum()
            ratios.append(off / np.abs(softmax(row) - truth).sum())
    return float(np.mean(ratios))


@mechanism("top-n-sigma")
def top_n_sigma() -> Iterator[Check]:
    """Logits 0, 1, 2, 3, 10: mean 3.2, deviation 3.544."""
    row = np.array([0.0, 1, 2, 3, 10])
    yield by_hand("one deviation keeps one", drawn_from(row, top_n_sigma=1.9), 0, 0, 0, 0, 1)
    kept = np.flatnonzero(drawn_from(row, top_n_sigma=2.0, temperature=3.0))
    yield Check("two keep two, at any temperature", kept.tolist() == [3, 4], str(kept))
    moved = changed_sets(40, min_p=0.05)
    yield Check("min-p's set moves with the temperature", moved > 0.5, f"in {moved:.2f} of rows")


@measure("top-n-sigma", "kept sets that move with the temperature", samples=80, margin=0.0)
def top_n_sigma_claim(samples: int) -> float:
    """The same tokens are kept at every temperature."""
    return changed_sets(samples, top_n_sigma=1.0)


def changed_sets(samples: int, **options: Any) -> float:
    """The share of rows whose kept set differs between temperatures."""
    changed = 0
    for seed in range(samples):
        row = np.random.default_rng(seed).normal(0, 1.5, 200)
        sets = {
            tuple(np.flatnonzero(drawn_from(row, temperature=heat, **options)))
            for heat in (0.7, 1.0, 2.0, 5.0)
        }
        changed += len(sets) > 1
    return changed / samples


@mechanism("xtc")
def xtc() -> Iterator[Check]:
    """(0.4, 0.3, 0.2, 0.1) with threshold 0.15: three are above it, and the third stays."""
    row = logs(0.4, 0.3, 0.2, 0.1)
    always = drawn_from(row, xtc_probability=1.0, xtc_threshold=0.15)
    yield by_hand("the likely ones are dropped", always, 0, 0, 2 / 3, 1 / 3)
    half = drawn_from(row, xtc_probability=0.5, xtc_threshold=0.15)
    yield by_hand("every other time", half, 0.2, 0.15, 0.1 + 1 / 3, 0.05 + 1 / 6)
    alone = drawn_from(row, xtc_probability=1.0, xtc_threshold=0.35)
    yield by_hand("a single likely one stays", alone, 0.4, 0.3, 0.2, 0.1)


@measure("xtc", "rows left without a viable token", samples=100, margin=0.0)
def xtc_claim(samples: int) -> float:
    """Likely tokens go, but one that is likely enough always stays."""
    lost, cut = 0, 0
    for seed in range(samples):
        p = softmax(np.random.default_rng(seed).normal(0, 1.5, 30))
        kept = drawn_from(np.log(p), xtc_probability=1.0) > 0
        cut += not kept.all()
        lost += not kept[p >= 0.1].any() and bool((p >= 0.1).any())
    return lost / samples if cut else math.inf


ZIPF_LENGTH = 2000


def zipf_model() -> ScriptedModel:
    """Zipf's law over 200 tokens, its exponent falling from 1.4 to 1.05 over the text."""
    ranks = np.log(np.arange(1, 201))

    def script(seen: tuple[int, ...]) -> np.ndarray:
        order = np.random.default_rng(len(seen)).permutation(200)
        row: np.ndarray = -ranks[order] * (1.4 - 0.35 * len(seen) / ZIPF_LENGTH)
        return row

    return ScriptedModel(script, 200)


def surprises(length: int, **options: Any) -> np.ndarray:
    """Bits of each token of a text that the engine draws from `zipf_model`."""
    model = zipf_model()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        told = {"max_tokens": length, "seed": 5, "ignore_eos": True, "temperature": 1.0}
        said = llm.generate([1], logprobs=0, **told, **options).logprobs
    return np.array([-token.logprob / math.log(2) for token in said])


@mechanism("mirostat")
def mirostat() -> Iterator[Check]:
    """Version 2 with tau 1 and eta 0.5: mu is 2, then follows what was said."""
    row = logs(0.5, 0.25, 0.15, 0.1)  # 1, 2, 2.74 and 3.32 bits
    sampler = SamplingParams(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5).sampler([], 4)
    yield by_hand("mu is 2 bits", sampler.distribution(row).dense(4), 2 / 3, 1 / 3, 0, 0)
    sampler.advance(1)
    yield by_hand("then 1.5", sampler.distribution(row).dense(4), 1, 0, 0, 0)
    sampler.advance(0)
    yield by_hand("and 1.5 still", sampler.distribution(row).dense(4), 1, 0, 0, 0)
    p = np.arange(1, 51) ** -1.3
    first = SamplingParams(mirostat=1, mirostat_tau=2.0).sampler([], 50)
    count = round((0.3 * 2**4 / (1 - 50**-0.3)) ** (1 / 1.3))
    kept = len(first.distribution(np.log(p / p.sum()).astype(np.float32)))
    yield Check("version 1 keeps k of Zipf's law", kept == count, f"{kept} of 50")
    bits = surprises(800, top_p=0.6)
    drift = float(bits[600:].mean() - bits[:200].mean())
    yield Check("top-p drifts on the same rows", drift > 0.25, f"by {drift:.2f} bits in 800 tokens")


@measure("mirostat", "mean surprise off the target", samples=ZIPF_LENGTH, margin=0.05)
def mirostat_claim(samples: int) -> float:
    """Relative to a target of 3 bits, over 2,000 tokens; the worse of both versions and of the last
    quarter alone."""
    off = []
    for version in (1, 2):
        bits = surprises(samples, mirostat=version, mirostat_tau=3.0)
        off += [abs(bits.mean() - 3) / 3, abs(bits[-samples // 4 :].mean() - 3) / 3]
    return float(max(off))


def circular() -> ScriptedModel:
    """A model whose greedy text goes round in a circle of five tokens, with other tokens close."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        last = seen[-1]
        row = np.random.default_rng(last).normal(0, 0.6, 40)
        row[(last + 1) % 5] += 4.0
        return row

    return ScriptedModel(script, 40)


def repetition(model: ScriptedModel, length: int, **options: Any) -> float:
    """The share of 4-grams that have stood before."""
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        said = llm.generate([7, 0], max_tokens=length, ignore_eos=True, **options).tokens
    grams = [tuple(said[i : i + 4]) for i in range(len(said) - 3)]
    return 1 - len(set(grams)) / len(grams)


@mechanism("dry")
def dry() -> Iterator[Check]:
    """After 1 2 3 9 1 2: 3 would go on with a repetition of two, and loses 0.8 * 1.75^0."""
    row = np.zeros(10)
    told = {"dry_multiplier": 0.8, "dry_allowed": 2}
    p = drawn_from(row, (1, 2, 3, 9, 1, 2), **told)
    lower = math.exp(-0.8)
    yield Check("3 is lowered by e^-0.8", abs(p[3] / p[0] - lower) < 1e-6, f"{p[3] / p[0]:.4f}")
    yield Check("nothing else is", bool((np.delete(p, 3) == p[0]).all()))
    p = drawn_from(row, (4, 1, 2, 3, 9, 4, 1, 2), **told)
    lower = math.exp(-0.8 * 1.75)
    yield Check("three cost 1.75 times that", abs(p[3] / p[0] - lower) < 1e-6)
    plain = repetition(circular(), 80)
    yield Check("greedy decoding walks in circles", plain > 0.9, f"{plain:.2f} of 4-grams repeat")


@measure("dry", "4-grams that repeat", samples=120, margin=0.5)
def dry_claim(samples: int) -> float:
    """Loops are broken."""
    return repetition(circular(), samples, dry_multiplier=0.8)


@mechanism("momentum")
def momentum() -> Iterator[Check]:
    """After 7 1 2 7 1: 2 would close a circle of three (7 1 2), 7 of one; alpha 0.2."""
    row = logs(0.2, 0.05, 0.5, 0.01, 0.01, 0.01, 0.01, 0.21)
    told: dict[str, Any] = {"momentum_alpha": 0.2, "momentum_k": 3, "temperature": 0.0}
    sampler = SamplingParams(**told).sampler((7, 1, 2, 7, 1), 8)
    token = int(sampler.distribution(row).tokens[0])  # type: ignore[index]
    yield Check("0.2 beats 0.5 - 0.6 and 0.21 - 0.2", token == 0, f"token {token}")
    gentle = SamplingParams(**{**told, "momentum_alpha": 0.05}).sampler((7, 1, 2, 7, 1), 8)
    token = int(gentle.distribution(row).tokens[0])  # type: ignore[index]
    yield Check("0.5 - 0.15 wins at alpha 0.05", token == 2, f"token {token}")
    with LLM(circular(), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        answer = llm.generate([7, 0], max_tokens=40, ignore_eos=True, decoder="momentum")
    yield Check("one pass per token", answer.stats.passes == 40)


@measure("momentum", "4-grams that repeat", samples=80, margin=0.25)
def momentum_claim(samples: int) -> float:
    """Loops are broken without a look at any hidden state."""
    return repetition(circular(), samples, momentum_alpha=0.2)


class Knowing(ScriptedModel):
    """Early layers say what is common (token 1); the last one nearly knows the fact: token 2 for
    even texts, 3 for odd ones. Token 0 is a word that every layer likes a little."""

    def __init__(self) -> None:
        super().__init__(lambda seen: self.last(seen), 8)

    @staticmethod
    def last(seen: tuple[int, ...]) -> np.ndarray:
        row = logs(0.05, 0.47, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
        row[2 + len(seen) % 2] = np.log(0.42)
        return row

    def _answer(self, number: int, layer: int) -> np.ndarray:
        if layer == self.spec.num_layers:
            return super()._path_logits(number, layer)
        return logs(0.04, 0.8, 0.02, 0.02, 0.03, 0.03, 0.03, 0.03)


def facts_missed(count: int, **options: Any) -> float:
    """The share of tokens that are not the fact."""
    with LLM(Knowing(), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        said = llm.generate([5], max_tokens=count, ignore_eos=True, **options).tokens
    missed = sum(token != 2 + (1 + position) % 2 for position, token in enumerate(said))
    return float(missed / count)


@mechanism("dola")
def dola() -> Iterator[Check]:
    """ln(0.42 / 0.02) beats ln(0.47 / 0.8); what is below a tenth of the best may not be said."""
    sampler = SamplingParams(dola_layers=(0, 2)).sampler([], 4, num_layers=4)
    last, near, far = (
        logs(0.5, 0.3, 0.15, 0.05),
        logs(0.5, 0.28, 0.17, 0.05),
        logs(0.7, 0.1, 0.1, 0.1),
    )
    row = sampler.combine(last, [], {0: far, 2: near})
    ratio = np.array([0.5, 0.3, 0.15]) / np.array([0.7, 0.1, 0.1])
    expected = [*(ratio / (ratio.sum() + 0.5)), 0.5 / (ratio.sum() + 0.5)]
    found = sampler.distribution(row).dense(4)
    yield by_hand("the layer that differs most is contrasted", found, *expected)
    row = sampler.combine(logs(0.6, 0.3, 0.06, 0.04), [], {0: far, 2: near})
    kept = np.flatnonzero(sampler.distribution(row).dense(4)).tolist()
    yield Check("a tenth of the best is the bound", kept == [0, 1, 2], str(kept))
    missed = facts_missed(20)
    yield Check("greedy decoding says what is common", missed == 1.0, f"{missed:.2f} missed")


@measure("dola", "facts missed", samples=40, margin=0.0)
def dola_claim(samples: int) -> float:
    """What only the last layer knows is said."""
    return facts_missed(samples, decoder="dola:layers=high")


def objective(p: np.ndarray, distance: np.ndarray, kept: np.ndarray, rule: TopW) -> float:
    """What top-w minimises: transport to the kept set (bounded by the nearest token) + entropy -
    log mass, by the rule's weights."""
    mass = float(p[kept].sum())
    q = p[kept] / mass
    moved = float((p * distance[:, kept].min(1)).sum())
    entropy = -float((q * np.log(q)).sum())
    cost = rule.distance_weight * moved + rule.entropy_weight * entropy
    return cost - rule.mass_weight * math.log(mass)


@mechanism("top-w")
def top_w() -> Iterator[Check]:
    """The best set against every set there is; and the token that the paper names, which is not
    the best where the mass weighs less than the entropy."""
    rng = np.random.default_rng(5)
    subsets = [[i for i in range(7) if bits >> i & 1] for bits in range(1, 128)]
    for weight in (-1.2, -0.4, 0.0, 0.6):
        right, named = 0, 0
        for _ in range(25):
            p, potential = rng.dirichlet(np.ones(7)), rng.normal(size=7)

            def value(
                chosen: list[int],
                p: np.ndarray = p,
                potential: np.ndarray = potential,
                weight: float = weight,
            ) -> float:
                mass = float(p[chosen].sum())
                return float((p * potential)[chosen].sum()) / mass + weight * math.log(mass)

            best = max(map(value, subsets))
            right += value(best_set(p, potential, weight).tolist()) > best - 1e-9
            named += value([int(potential.argmax())]) > best - 1e-9
        yield Check(f"weight {weight}: the best of all sets", right == 25, f"{right} of 25")
        if weight < 0:
            named_text = f"argmax of the potential is best in {named} of 25"
            yield Check(f"weight {weight}: the paper's token is not always", named < 25, named_text)


def top_w_gain(samples: int, rule: LogitsProcessor | None = None) -> float:
    """The mean of the objective minus that of the nucleus it begins with (or of `top_p` 0.9)."""
    rng = np.random.default_rng(1)
    centres = np.repeat(rng.normal(size=(8, 12)), 5, axis=0)
    geometry = Geometry.of((centres + 0.2 * rng.normal(size=(40, 12))).astype(np.float32))
    change = 0.0
    reference = TopW(geometry)
    for _ in range(samples):
        row = rng.normal(0, 1.5, 40).astype(np.float32)
        p = softmax(row)
        distance = 1 - geometry.cosines(np.arange(40)).astype(np.float64)
        after = [TopW(geometry)] if rule is None else [rule]
        kept = Sampler(1.0, post_temperature=after).distribution(row).tokens
        start = np.sort(np.argsort(-p)[: int(np.searchsorted(np.cumsum(-np.sort(-p)), 0.999)) + 1])
        whole = np.arange(40) if kept is None else kept
        change += objective(p, distance, whole, reference) - objective(
            p, distance, start, reference
        )
    return change / samples


@measure("top-w", "objective against the nucleus it begins with", samples=40, margin=-0.05)
def top_w_claim(samples: int) -> float:
    """Distance, entropy and mass together become better."""
    return top_w_gain(samples)
