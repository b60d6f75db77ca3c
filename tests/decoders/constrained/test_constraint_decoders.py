"""Constrained decoders beyond masking, each checked against the claims of its paper, on models
small enough to enumerate every text."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from anydecode import JsonSchema, Predicate, Regex
from anydecode.api.llm import LLM
from anydecode.constraints.drafts import pruned
from anydecode.decoders.constrained.asap import Asap
from anydecode.decoders.constrained.awrs import STATE, Awrs, draw
from anydecode.decoders.constrained.jump_forward import JumpForward
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.prompt_lookup import PromptLookupDrafter
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise, stream_id
from anydecode.scoring.tree import TokenTree

A, B = ord("a"), ord("b")
#: After "a" the model rarely generates a second "a", after "b" nearly always: the paper's example.
PROBABILITIES = {
    (): {A: 0.6, B: 0.4},
    (A,): {A: 0.05, B: 0.95},
    (B,): {A: 0.9, B: 0.1},
    (A, A): {EOS: 1.0},
    (A, B): {A: 0.5, B: 0.5},
    (B, A): {EOS: 1.0},
    (B, B): {EOS: 1.0},
    (A, B, A): {EOS: 1.0},
    (A, B, B): {EOS: 1.0},
}
#: The constraint: "aa", "ba" or "bb". "a" looks as good as "b" until it turns out that it is not.
TRUE = {"aa": 0.6 * 0.05, "ba": 0.4 * 0.9, "bb": 0.4 * 0.1}
EVIDENCE = sum(TRUE.values())
WORDS = Predicate(lambda s: s in TRUE, lambda s: any(word.startswith(s) for word in TRUE))
PROMPT = "?"


def script(seen: tuple[int, ...]) -> np.ndarray:
    logits = np.full(259, -1e9)
    for token, probability in PROBABILITIES.get(seen[len(PROMPT) :], {EOS: 1.0}).items():
        logits[token] = np.log(probability)
    return logits


def small() -> LLM:
    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer(), cache_positions=2048)


def texts(decoder, count: int, first: int = 0) -> Counter[str]:
    with small() as llm:
        generated = [
            llm.generate(PROMPT, decoder=decoder, constraint=WORDS, temperature=1.0, seed=seed).text
            for seed in range(first, first + count)
        ]
        llm.engine.check_integrity()
    return Counter(generated)


def distance(found: Counter[str]) -> float:
    """Half the sum of absolute differences to the model's distribution given the constraint."""
    total = sum(found.values())
    return sum(abs(found[word] / total - TRUE[word] / EVIDENCE) for word in TRUE) / 2


def test_asap_converges_to_the_conditional_distribution_and_masking_does_not():
    decoder = Asap()
    texts(decoder, 60)
    (root,) = decoder.tries.values()
    estimates = [root.completion_probability]
    found = texts(decoder, 150, first=1000)
    assert distance(found) < 0.1
    assert distance(texts("autoregressive", 100)) > 0.35
    assert root.completion_probability <= estimates[
        0
    ] + 1e-12 and root.completion_probability == pytest.approx(EVIDENCE, abs=1e-3)


def test_asap_keeps_one_trie_per_constraint():
    decoder = Asap()
    with small() as llm:
        for constraint in (WORDS, Regex("aa"), Regex("bb"), Regex("aa")):
            llm.generate(PROMPT, decoder=decoder, constraint=constraint, temperature=1.0, seed=1)
    assert len(decoder.tries) == 3


def test_asap_starts_as_plain_masking():
    with small() as llm:
        options = {"constraint": WORDS, "temperature": 1.0, "seed": 3}
        plain = llm.generate(PROMPT, **options).tokens
        assert llm.generate(PROMPT, decoder=Asap(), **options).tokens == plain


def weights(probabilities: np.ndarray, valid: set[int], count: int = 3000):
    """Mean and standard error of the weights, means by token, and the mean number of tests."""
    tokens = np.arange(len(probabilities))
    drawn = [
        draw(probabilities, tokens, valid.__contains__, Noise(seed, stream_id(0)), 5)
        for seed in range(count)
    ]
    values = np.exp([one.log_weight for one in drawn])
    generated = np.array([-1 if one.token is None else one.token for one in drawn])
    by_token = {token: np.where(generated == token, values, 0) for token in valid}
    return values, by_token, np.mean([one.tests for one in drawn])


@pytest.mark.parametrize("likeliest", [0.3, 0.9], ids=["recursive", "geometric"])
@pytest.mark.parametrize("is_valid", [True, False], ids=["likely is valid", "likely is not"])
def test_awrs_weights_are_unbiased_with_few_tests(likeliest, is_valid):
    rest = np.linspace(3, 1, 149)
    probabilities = np.concatenate([[likeliest], (1 - likeliest) * rest / rest.sum()])
    valid = {token for token in range(150) if token % 3 == (0 if is_valid else 1)}
    values, by_token, tests = weights(probabilities, valid)
    truth = probabilities[sorted(valid)].sum()
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - truth) < 3 * error + 1e-9
    for token in sorted(valid)[:2]:
        found = by_token[token]
        bound = 3 * found.std() / np.sqrt(len(found)) + 2e-3
        assert abs(found.mean() - probabilities[token]) < bound
    assert tests < 15
    # Control: wrong weights are detected as biased.
    assert abs(np.mean(values / 1.5) - truth) > 3 * error


def test_awrs_returns_no_token_if_none_is_allowed():
    for likeliest in (0.5, 0.9):
        probabilities = np.array([likeliest, 1 - likeliest])
        found = draw(probabilities, np.arange(2), lambda token: False, Noise(1, 0), 0)
        assert found.token is None and found.log_weight == -np.inf


def test_awrs_particles_converge_to_the_conditional_distribution():
    few, many = distance(texts(Awrs(1), 150)), distance(texts(Awrs(12), 120))
    assert many < 0.15 < 0.3 < few


def test_awrs_evidence_is_unbiased_for_every_number_of_particles():
    for particles in (1, 3):
        decoder, values, tests = Awrs(particles), [], 0
        with small() as llm:
            for seed in range(200):
                request = llm.request(
                    PROMPT, decoder=decoder, constraint=WORDS, temperature=1.0, seed=seed
                )
                llm.start(request, background=False)
                llm.driver.advance(lambda: request.done)  # noqa: B023
                try:
                    request.generation()
                except ConstraintError:
                    values.append(0.0)
                else:
                    state = request.jobs[0].sequence.state[STATE]
                    values.append(np.exp(state["evidence"]))
                    tests = max(tests, state["tests"])
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - EVIDENCE) < 3 * error
        assert 0 < tests < 20 * particles


def test_awrs_greedy_is_plain_greedy_with_few_tests():
    constraint = Regex("(the |cat |on )+!")
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        options = {"constraint": constraint, "max_tokens": 24}
        plain = llm.generate("the cat", **options).tokens
        assert llm.generate("the cat", decoder="awrs", **options).tokens == plain


def test_awrs_rejects_invalid_options():
    for arguments in ((0, 0.5), (61, 0.5), (4, 2)):
        with pytest.raises(InvalidRequestError):
            Awrs(*arguments)


SCHEMA = {
    "type": "object",
    "properties": {"first": {"enum": ["one", "two"]}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}


def test_forced_tokens_are_drafted_and_drafts_are_pruned():
    state = JsonSchema(SCHEMA, whitespace="").start(ByteTokenizer(), 259)
    forced = state.forced_tokens()
    assert bytes(forced) == b'{"first":"'
    drafted = TokenTree.merge([list(b'one"}'), list(b"thr"), list(b"x")])
    tree = pruned(forced, drafted, state)
    assert bytes(tree.tokens) == b'{"first":"one"t'
    assert tree.parents[len(forced)] == len(forced) - 1
    assert [tree.parents[-1], tree.tokens[-1]] == [len(forced) - 1, ord("t")]


def test_jump_forward_needs_fewer_passes_and_generates_the_same_tokens():
    compact = JsonSchema(SCHEMA, whitespace="")
    with LLM(ScriptedModel(seed=2), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        for temperature, limit in product((0.0, 0.9), (5, 100)):
            options = {"constraint": compact, "temperature": temperature, "seed": 1,
                       "max_tokens": limit}  # fmt: skip
            plain = llm.generate("x", decoder="autoregressive", **options)
            fast = llm.generate("x", decoder="jump-forward", **options)
            assert fast.tokens == plain.tokens and fast.finish_reason == plain.finish_reason
            assert fast.stats.passes * 2 < plain.stats.passes


def test_wrongly_forced_tokens_are_not_emitted():
    """Control: a constraint that returns wrong forced tokens costs passes, but never changes the
    text."""
    compact = JsonSchema(SCHEMA, whitespace="")
    state_type = type(compact.start(ByteTokenizer(), 259))
    honest = state_type.forced_tokens
    with LLM(ScriptedModel(seed=2), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        expected = llm.generate("x", constraint=compact, decoder="autoregressive").tokens

        def lying(state):
            allowed = np.flatnonzero(state.mask())
            return [int(allowed[-1])] if len(allowed) > 1 else honest(state)

        state_type.forced_tokens = lying
        try:
            decoder = Speculative(JumpForward(PromptLookupDrafter()), 4)
            found = llm.generate("x", decoder=decoder, constraint=compact)
        finally:
            state_type.forced_tokens = honest
        assert found.tokens == expected
