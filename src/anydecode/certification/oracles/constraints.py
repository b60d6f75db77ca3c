"""Oracle tests of methods under constraints: proposals and weights computed by hand or by
enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.constraints.drafts import pruned
from anydecode.constraints.languages import Regex
from anydecode.decoders.constrained.asap import Asap, Node
from anydecode.decoders.constrained.awrs import Awrs, draw
from anydecode.decoders.decoder import Decoder
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise
from anydecode.scoring.tree import TokenTree

#: After "a" the model rarely generates a second "a", which the constraint needs.
_TABLE = {"": {"a": 0.6, "b": 0.4}, "a": {"a": 0.05, "b": 0.95}, "b": {"a": 0.9, "b": 0.1}}
_WORDS = Regex("aa|ba|bb")
_TRUTH = {"aa": 0.6 * 0.05, "ba": 0.4 * 0.9, "bb": 0.4 * 0.1}


def _trap_llm() -> LLM:
    """A model whose distribution over texts is given by `_TABLE`."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.full(259, -1e9)
        logits[EOS] = 0.0
        for letter, probability in _TABLE.get(bytes(seen[1:]).decode("latin-1"), {}).items():
            logits[EOS] = -1e9
            logits[ord(letter)] = np.log(probability)
        return logits

    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer(), cache_positions=1024)


def _loss(decoder: Decoder, samples: int, first: int = 0) -> float:
    """Total variation distance between the texts of `decoder` and the model's distribution given
    the constraint."""
    with _trap_llm() as llm:
        counts = Counter(
            llm.generate("?", decoder=decoder, constraint=_WORDS, temperature=1.0, seed=seed).text
            for seed in range(first, first + samples)
        )
    total = sum(_TRUTH.values())
    return sum(abs(counts[word] / samples - _TRUTH[word] / total) for word in _TRUTH) / 2


@measure(
    "asap", "distance from the conditional distribution, after learning", samples=300, margin=0.08
)
def asap_loss(samples: int) -> float:
    """Total variation distance after 60 samples of learning. Plain masking has about 0.5."""
    decoder = Asap()
    _loss(decoder, 60)
    return _loss(decoder, samples, first=1000)


@measure(
    "awrs", "distance from the conditional distribution, 12 particles", samples=150, margin=0.15
)
def awrs_loss(samples: int) -> float:
    """Total variation distance. One particle has about 0.5."""
    return _loss(Awrs(12), samples)


@oracle_test("jump-forward")
def jump_forward() -> Iterator[Check]:
    """`key=(x|y);end`: "key=" is forced, then there is a choice, then ";end" and the end of
    text."""
    constraint = Regex("key=(x|y);end")
    state = constraint.start(ByteTokenizer(), 259)
    forced = state.forced_tokens()
    yield Check("drafts the forced tokens", bytes(forced) == b"key=", repr(bytes(forced)))
    tree = pruned(forced, TokenTree.merge([list(b"x;e"), list(b"z"), list(b"y!")]), state)
    draft = bytes(tree.tokens)
    yield Check("removes forbidden tokens from a draft", draft == b"key=x;ey", repr(draft))
    with LLM(ScriptedModel(seed=2), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        plain = llm.generate("?", constraint=constraint, decoder="autoregressive")
        fast = llm.generate("?", constraint=constraint, decoder="jump-forward")
    yield Check("equal to plain decoding", fast.tokens == plain.tokens, fast.text)
    # One pass verifies "key=" and samples x or y, one verifies ";end" and the end of text.
    passes = (plain.stats.passes, fast.stats.passes)
    yield Check("one pass per choice", passes == (10, 2), f"passes {passes}")


@oracle_test("asap")
def asap() -> Iterator[Check]:
    """The paper's recursion on a trie of two levels, and its fixed point on a model with known
    probabilities."""
    root = Node(mass=0.9)
    root.children = {
        1: Node(0.6, completion_probability=0.05),
        2: Node(0.3, completion_probability=1.0),
    }
    root.update()
    yield Check(
        "expected future grammaticality (hope) of a prefix",
        abs(root.completion_probability - (0.6 * 0.05 + 0.3)) < 1e-12,
        f"{root.completion_probability}",
    )
    decoder = Asap()
    hopes = []
    with _trap_llm() as llm:
        for seed in range(40):
            llm.generate("?", decoder=decoder, constraint=_WORDS, temperature=1.0, seed=seed)
            hopes.append(next(iter(decoder.tries.values())).completion_probability)
    falls = all(after <= before + 1e-12 for before, after in zip(hopes, hopes[1:], strict=False))
    yield Check("hope never rises", falls, f"{hopes[0]:.3f} to {hopes[-1]:.3f}")
    truth = sum(_TRUTH.values())
    yield Check("hope converges to the exact value", abs(hopes[-1] - truth) < 1e-3, f"{truth:.3f}")


@oracle_test("awrs")
def awrs() -> Iterator[Check]:
    """All orders of a draw without replacement against the paper's estimator, and the sampler's
    weights against the tests it made."""
    probabilities = np.array([0.3, 0.4, 0.2, 0.1])
    for valid in ({1, 3}, {2}, {0, 1, 2, 3}):
        mean, by_token = 0.0, dict.fromkeys(valid, 0.0)
        weights = {}
        for order in permutations(range(4)):
            probability, token, weight, tests = _by_hand(probabilities, order, valid)
            mean += probability * weight
            by_token[token] += probability * weight
            weights[round(float(np.log(weight)), 9), token, tests] = True
        truth = {token: float(probabilities[token]) for token in valid}
        close = max(abs(by_token[token] - truth[token]) for token in valid) < 1e-12
        yield Check(f"weights are unbiased, {sorted(valid)} valid", close, f"mean {mean:.3f}")
        drawn = [
            draw(probabilities, np.arange(4), valid.__contains__, Noise(seed), 0)
            for seed in range(100)
        ]
        are_known = all((round(d.log_weight, 9), d.token, d.tests) in weights for d in drawn)
        yield Check(f"draws have those weights, {sorted(valid)} valid", are_known, "100 draws")


def _by_hand(
    probabilities: np.ndarray, order: tuple[int, ...], valid: set[int]
) -> tuple[float, int, float, int]:
    """The probability of an order, and the token, weight and number of tests it leads to."""
    probability, left = 1.0, 1.0
    for position in order:
        probability *= float(probabilities[position]) / left if left > 1e-12 else 1.0
        left -= float(probabilities[position])
    refused, weight = 0.0, 1.0
    for rank, position in enumerate(order):
        share = float(probabilities[position]) / (1 - refused)
        if position in valid:
            last = rank + 1 == len(order)
            if not last and order[rank + 1] not in valid:
                weight *= share
            return probability, position, weight, rank + 1 + (not last)
        weight *= 1 - share
        refused += float(probabilities[position])
    raise AssertionError("no token is valid")
