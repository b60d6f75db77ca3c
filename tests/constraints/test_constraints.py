"""Constraints: states, mask engines, and equality with plain decoding under every decoder."""

from __future__ import annotations

import gc
import json
import random
import re
import weakref
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from anydecode import Choice, Grammar, JsonSchema, Predicate, Regex
from anydecode.certification.checks import Restarts, scripted_llm
from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.models.scripted import EOS, ByteTokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.sampler import constraint_of

TOKENIZER = ByteTokenizer()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = 'the people: {"name": "ab", "age": 7} {"name": "cd", "age": 70} '


def start(constraint, vocab_size=259) -> ConstraintState:
    return constraint.start(TOKENIZER, vocab_size)


def allowed(state: ConstraintState) -> str:
    """The allowed next bytes, as text."""
    return bytes(int(t) for t in np.flatnonzero(state.mask()) if t < 256).decode("latin-1")


def feed(state: ConstraintState, text: str) -> ConstraintState:
    for byte in text.encode():
        state.advance(byte)
    return state


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "make, good, bad",
    [
        (lambda e: Regex("a+b?", engine=e), ["a", "aab"], ["b", "abb", ""]),
        (lambda e: Choice(["yes", "yesterday"], engine=e), ["yes", "yesterday"], ["ye", "no"]),
        (
            lambda e: Choice(["yes", "yesterday", 'a "b"\n\\c', *map(str, range(3000))], engine=e),
            ["yes", "yesterday", 'a "b"\n\\c', "2", "29", "2999"],
            ["ye", "no", "3000", "yes2"],
        ),
        (
            lambda e: Grammar('root ::= "a" root "b" | "c"', "gbnf", engine=e),
            ["c", "aacbb"],
            ["aac", "ab"],
        ),
        (lambda e: JsonSchema(PERSON, engine=e), ['{"name": "x", "age": 3}'], ["{}", "[]"]),
    ],
)
def test_masks_allow_exactly_the_texts_of_the_language(engine, make, good, bad):
    if engine == "xgrammar":
        pytest.importorskip("xgrammar")
    constraint = make(engine)
    for text in good + bad:
        state = start(constraint)
        fits = True
        for byte in text.encode():
            fits = fits and state.allows(byte) and bool(state.mask()[byte])
            if not fits:
                break
            state.advance(byte)
        assert (fits and state.can_stop) == (text in good), text
        if text in good:
            assert state.mask()[EOS]


def test_lark_grammars_and_special_tokens():
    state = start(Grammar('start: "a" start "b" | "c"'))
    assert allowed(state) == "ac" and not state.can_stop
    feed(state, "acb")
    assert state.can_stop and np.flatnonzero(state.mask()).tolist() == [EOS]
    assert start(Regex("a"), vocab_size=300).mask().shape == (300,)


@pytest.mark.parametrize("constraint", [Regex("(ab|ac)+"), JsonSchema(PERSON),
    Predicate(lambda s: s == "abc", lambda s: "abc".startswith(s))])  # fmt: skip
def test_masks_are_equal_after_fork_and_rollback(constraint):
    """Random walk: each state's mask is equal after advance, fork and rollback."""
    choose = random.Random(4)
    state, trail = start(constraint), []
    for _ in range(24):
        trail.append((state.fork(), state.mask().copy()))
        token = choose.choice(np.flatnonzero(state.mask()).tolist())
        state.advance(token)
        if token == EOS:
            break
    for count, (fork, mask) in enumerate(reversed(trail), 1):
        assert np.array_equal(fork.mask(), mask)
        back = state.fork()
        back.rollback(count)
        assert np.array_equal(back.mask(), mask), count
    assert np.array_equal(state.fork().mask(), state.mask())
    with pytest.raises(ConstraintError):
        start(constraint).advance(200)


def test_rollback_removes_an_end_of_text_token():
    state = feed(start(Regex("ab")), "ab")
    assert state.finished
    state.advance(EOS)
    state.rollback(1)
    assert state.can_stop
    state.rollback(1)
    assert allowed(state) == "b"


def test_forced_tokens_are_the_only_allowed_tokens():
    state = start(JsonSchema(PERSON, whitespace=""))
    forced = state.forced_tokens()
    assert bytes(forced) == b'{"name":"'
    for token in forced:
        assert np.flatnonzero(state.mask()).tolist() == [token]
        state.advance(token)
    assert state.forced_tokens() == []
    assert feed(start(Regex("ab")), "ab").forced_tokens() == [EOS]


def test_masks_prepared_on_a_thread_are_equal():
    text = '{"name": "abc", "age": 42}'
    ahead, plain = start(JsonSchema(PERSON)), start(JsonSchema(PERSON))
    for byte in text.encode():
        ahead.prepare()
        fork = ahead.fork()
        assert np.array_equal(ahead.mask(), plain.mask())
        assert np.array_equal(fork.mask(), plain.mask())
        ahead.advance(byte)
        plain.advance(byte)
    ahead.prepare()
    ahead.rollback(3)
    plain.rollback(3)
    assert np.array_equal(ahead.mask(), plain.mask())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("constraint", [
    JsonSchema(PERSON),
    Regex("(the |cat |on |7)+!"),
    Grammar('start: "(" start ")" start | /[a-c]/'),
    Predicate(lambda s: len(s) > 9 and s.endswith("."),
              lambda s: s.isascii() and (len(s) < 20 or s[19:] == ".")),
], ids=["json", "regex", "grammar", "predicate"])  # fmt: skip
def test_every_decoder_generates_the_tokens_of_plain_decoding(constraint, temperature):
    options = {"constraint": constraint, "temperature": temperature, "seed": 5, "max_tokens": 40}
    with scripted_llm() as llm:
        expected = llm.generate(PROMPT, logprobs=2, repetition_penalty=1.2, **options)
        for decoder in ("multi-step", "prompt-lookup", "layerskip", "speculative-sampling",
                        "jump-forward"):  # fmt: skip
            answer = llm.generate(
                PROMPT, decoder=decoder, logprobs=2, repetition_penalty=1.2, **options
            )
            assert answer.tokens == expected.tokens, decoder
            assert [one.logprob for one in answer.logprobs] == pytest.approx(
                [one.logprob for one in expected.logprobs]
            )
        llm.engine.check_integrity()
        assert llm.generate(PROMPT, **options | {"constraint": None}).tokens != expected.tokens


@pytest.mark.parametrize("decoder", ["autoregressive", "jump-forward", "beam", "layerskip"])
def test_samples_are_valid_distinct_and_unchanged_by_preemption(decoder):
    """n samples differ, are valid, and are the same when preempted at random."""
    n = 1 if decoder == "beam" else 4
    person = JsonSchema(PERSON, whitespace="")
    options = {"decoder": decoder, "constraint": person, "max_tokens": 64, "seed": 2,
               "temperature": 0.9, "n": n}  # fmt: skip
    with scripted_llm() as llm:
        calm = llm.generate([PROMPT, "x"], **options)
    with scripted_llm() as llm, Restarts(llm.engine, seed=7):
        shaken = llm.generate([PROMPT, "x"], **options)
        llm.engine.check_integrity()
    texts = [[one.text for one in answer.samples] for answer in calm]
    assert texts == [[one.text for one in answer.samples] for answer in shaken]
    for text in texts[0] + texts[1]:
        person = json.loads(text)
        assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120
    assert len(set(texts[0])) == n


def test_a_faulty_state_changes_the_text():
    """Control for the equality tests: a state whose forks lose a token changes the text."""

    class Forgetful(Predicate):
        def start(self, tokenizer, vocab_size, tokens=()):
            state = super().start(tokenizer, vocab_size)
            for token in tokens:
                state.advance(token)
            state.fork = lambda: self.start(tokenizer, vocab_size, state.tokens[:-1])
            return state

    digits = Forgetful(
        lambda s: re.fullmatch(r"(\d\D)+", s) is not None,
        lambda s: re.fullmatch(r"(\d\D)*\d?", s) is not None,
    )
    options = {"constraint": digits, "max_tokens": 20, "temperature": 0.0}
    with scripted_llm() as llm:
        expected = llm.generate(PROMPT, decoder="autoregressive", **options).tokens
        try:
            found = llm.generate(PROMPT, decoder="multi-step:count=3", **options).tokens
        except ConstraintError:
            found = None
    assert found != expected


def test_finish_reason_and_completeness_with_stop_strings_and_limits():
    with scripted_llm() as llm:
        cut = llm.generate(PROMPT, constraint=JsonSchema(PERSON), stop=['"name"'])
        assert cut.finish_reason == "stop" and not cut.constraint["complete"]
        short = llm.generate(PROMPT, constraint=JsonSchema(PERSON), max_tokens=4)
        assert short.finish_reason == "length" and not short.constraint["complete"]
        whole = llm.generate(PROMPT, constraint=JsonSchema(PERSON))
        assert whole.finish_reason == "stop" and whole.constraint["complete"]
        assert whole.to_dict()["constraint"]["guards"]["max_string"] is None


@pytest.mark.parametrize("make", [
    lambda: Regex("(?=a)b"),
    lambda: Regex("(a"),
    lambda: Regex(""),
    lambda: Regex("[^\\s\\S]"),
    lambda: Grammar("start: nothing"),
    lambda: Grammar("root ::= (", "gbnf"),
    lambda: Grammar('start: "a" start'),
    lambda: Grammar("x" * (2 << 20)),
    lambda: Predicate(lambda s: False, lambda s: False),
])  # fmt: skip
def test_invalid_constraints_are_rejected_before_generation(make):
    with scripted_llm() as llm, pytest.raises(ConstraintError):
        llm.generate("x", constraint=make(), max_tokens=4)


def test_invalid_arguments_are_rejected():
    for make in (
        lambda: Choice([]),
        lambda: Choice("yes"),
        lambda: Choice(["a", ""]),
        lambda: Choice(None),
        lambda: Grammar("a", syntax="bnf"),
        lambda: Regex("a", engine="mine"),
    ):
        with pytest.raises(ConstraintError):
            make()
    with scripted_llm() as llm, pytest.raises(InvalidRequestError, match="use JsonSchema"):
        llm.generate("x", constraint={"type": "object"})


def test_predicates_are_called_once_per_text():
    asked: list[str] = []

    def prefix(text: str) -> bool:
        asked.append(text)
        return "ab".startswith(text)

    state = start(Predicate(lambda s: s == "ab", prefix))
    state.mask()
    feed(state, "a").mask()
    state.rollback(1)
    state.mask()
    assert len(asked) == len(set(asked))
    assert allowed(state) == "a"


def test_the_constraint_of_a_sampler_is_found():
    with scripted_llm() as llm:
        request = llm.request("x", constraint=Regex("a"))
        part = constraint_of(request.jobs[0].sequence.sampler)
        assert part is not None and allowed(part.state) == "a"


def test_a_banned_token_stays_banned_if_the_bias_forbids_the_others() -> None:
    state = start(Choice(["ab", "cd"])).with_banned([ord("a")])
    scores = np.zeros(259, np.float32)
    scores[ord("c")] = -np.inf
    kept = Constrained(state).apply(Candidates(None, scores))
    assert kept.tokens is not None and list(kept.tokens) == [ord("c")]


@pytest.mark.parametrize(
    "constraint", [Regex("a+b"), JsonSchema({"type": "integer"})], ids=["regex", "schema"]
)
def test_a_constraint_does_not_keep_a_tokenizer(constraint: Any) -> None:
    tokenizer = ByteTokenizer()
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    assert state.mask().any()
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is not None  # the state may need it
    del state
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("make", [Regex, Grammar, lambda text: Choice([text])])
def test_lone_surrogates_are_refused(make: Any) -> None:
    with pytest.raises(ConstraintError, match="lone surrogate"):
        make("a\ud800").start(TOKENIZER, TOKENIZER.vocab_size)


def merging_tokenizer() -> HFTokenizer:
    """A tokenizer with tokens of several letters, so that a text has several tokenizations."""
    text = ["get_weather get_time weather london paris celsius hello there world"] * 4
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return HFTokenizer(tokenizer, eos_ids=[tokenizer.token_to_id("<eos>")])


@pytest.mark.parametrize(
    "constraint",
    [
        Choice(["get_weather london", "get_weather paris", "hello there"]),
        Regex("(hello|hell) (world|there)-[0-9]{2}-weather"),
        Grammar('start: "get_weather" " "? ("london" | "paris celsius") NUMBER\nNUMBER: /[0-9]+;/'),
        JsonSchema({"enum": [{"name": "get_weather"}, {"name": "get_time", "at": "london"}]}),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_a_token_is_allowed_if_the_mask_has_it(constraint: Any) -> None:
    """Also where text must follow, of which the mask has one tokenization and the engine's matcher
    accepts all; else a token that was sampled without the mask would depend on the decoder."""
    tokenizer = merging_tokenizer()
    size, chosen, num_forced = tokenizer.vocab_size, random.Random(3), 0
    for _ in range(6):
        state, without = constraint.start(tokenizer, size), constraint.start(tokenizer, size)
        while not state.finished:
            mask = state.mask()
            # No mask has been computed in these forks.
            assert [without.fork().allows(token) for token in range(size)] == mask.tolist()
            num_forced += int(np.count_nonzero(mask) == 1)
            token = chosen.choice(np.flatnonzero(mask).tolist())
            for one in (state, without):
                one.advance(token)
    assert num_forced > 6
