"""Banned strings: the exact distribution of rewinds, equal tokens whatever the drafter, batch and
memory, text that is held back, and how an answer ends that cannot go on."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Choice, Predicate
from anydecode.certification.chi_square import Fit, bigram_logits, fit
from anydecode.decoders.constrained import banned_strings
from anydecode.decoders.constrained.banned_strings import StringMatcher
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import PieceTokenizer, ScriptedModel
from anydecode.sampling.noise import Noise
from toy_models import PROMPTS, letters_llm, toy_llm

DECODERS = [
    "autoregressive",
    "auto",
    "multi-step",
    "prompt-lookup",
    "speculative-sampling",
    "pearl",
]
PIECES = ("a", "b", "c", "bc")
EOS = len(PIECES)
BANNED = ["ab", "bcb", "cc"]
LENGTH = 4
SAMPLES = 1000
PROMPT = [3, 0]
_LOGITS = bigram_logits(EOS + 1, 2, spread=1.5)

Text = tuple[int, ...]
State = tuple[Text, int, tuple[frozenset[int], ...]]


def logits_after(seen: Text) -> np.ndarray:
    """Random logits after the last two tokens; the end of the text is improbable."""
    return np.asarray(_LOGITS(seen) - np.array([0.0, 0.0, 0.0, 0.0, 3.0]))


def completed(text: Text) -> int | None:
    """The index of the token in which the first banned string that `text` completes begins."""
    letters, starts = spelled(text)
    found = [(letters.find(one) + len(one), letters.find(one)) for one in BANNED if one in letters]
    return starts[min(found)[1]] if found else None


def begun(text: Text) -> int:
    """The index of the token in which a banned string that `text` ends with the beginning of
    begins; the length of `text` if there is none."""
    letters, starts = spelled(text)
    beginnings = {one[:size] for one in BANNED for size in range(1, len(one))}
    found = [at for at in range(len(letters)) if letters[at:] in beginnings]
    return starts[found[0]] if found else len(text)


def spelled(text: Text) -> tuple[str, list[int]]:
    """The letters of a text, and the index of the token of each."""
    starts = [index for index, token in enumerate(text) for _ in (*PIECES, "")[token]]
    return "".join((*PIECES, "")[token] for token in text), starts


def rewound() -> dict[Text, float]:
    """The distribution of answers under rewinds, by enumeration. A state is a text, the number of
    its final tokens, and the bans at each of its positions and at the next. States are visited in
    the order of the numbers of bans, which every step increases, so each is visited once."""
    answers: dict[Text, float] = {}
    first: State = ((), 0, (frozenset(),))
    states: dict[State, float] = {first: 1.0}
    queue: list[tuple[list[int], int, State]] = [([0], -1, first)]
    order = count()

    def add(state: State, mass: float) -> None:
        if state not in states:
            heappush(queue, ([len(one) for one in state[2]], next(order), state))
        states[state] = states.get(state, 0.0) + mass

    while queue:
        state = heappop(queue)[2]
        text, num_final, bans = state
        probability = states.pop(state)
        weights = np.exp(logits_after((*PROMPT, *text)))
        weights[list(bans[-1])] = 0
        for token, weight in enumerate(weights / weights.sum()):
            mass = probability * weight
            longer = (*text, token)
            start = completed(longer)
            if not mass:
                continue
            if start is not None:
                start = max(start, num_final)
                bans_there = bans[start] | {longer[start]}
                add((longer[:start], num_final, (*bans[:start], bans_there)), mass)
            elif token == EOS or len(longer) == LENGTH:
                answers[longer] = answers.get(longer, 0.0) + mass
            else:
                add((longer, max(num_final, begun(longer)), (*bans, frozenset())), mass)
    return answers


def sampled_fit(decoder: str) -> Fit:
    """The fit of sampled answers to `rewound`."""
    tokenizer = PieceTokenizer(*PIECES)
    draft = ScriptedModel(logits_after, EOS + 1, noise=0.5)
    with LLM(
        ScriptedModel(logits_after, EOS + 1),
        tokenizer=tokenizer,
        draft=draft,
        cache_positions=1 << 14,
    ) as llm:
        answer = llm.generate(
            PROMPT, n=SAMPLES, max_tokens=LENGTH, temperature=1.0, seed=1, decoder=decoder,
            banned_strings=BANNED,
        )  # fmt: skip
    return fit([tuple(one.tokens) for one in answer.samples], rewound())


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup"])
def test_answers_have_the_distribution_of_rewinds(decoder: str) -> None:
    expected = rewound()
    assert sum(expected.values()) == pytest.approx(1)
    assert not any(completed(text) is not None for text in expected)
    found = sampled_fit(decoder)
    assert found.passed, found


@pytest.mark.slow
def test_the_noise_of_the_removed_text_gives_another_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Noise, "forked", lambda self, number: self)
    assert not sampled_fit("autoregressive").passed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_plain_decoding_whatever_the_drafter_batch_and_memory(
    temperature: float,
) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 5}
    with letters_llm(cache_positions=4096) as llm:
        free = [one.text for one in llm.generate(PROMPTS, **options)]
        options["banned_strings"] = sorted({text[i : i + 3] for text in free for i in (3, 14, 30)})
        plain = [llm.generate(prompt, decoder="autoregressive", **options) for prompt in PROMPTS]
        for before, answer in zip(free, plain, strict=True):
            assert before != answer.text
            assert not any(one in answer.text for one in options["banned_strings"])
            assert answer.finish_reason == "length" and len(answer.tokens) == 40
        tokens = [one.tokens for one in plain]
        for decoder in DECODERS:
            batch = llm.generate(PROMPTS, decoder=decoder, **options)
            assert [one.tokens for one in batch] == tokens, decoder
    # Little memory: sequences are preempted and restarted.
    with letters_llm(cache_positions=130, row_budget=8) as llm:
        for decoder in DECODERS:
            batch = llm.generate(PROMPTS, decoder=decoder, **options)
            assert [one.tokens for one in batch] == tokens, decoder
        assert llm.engine.num_preemptions > 0


def test_restarts_at_every_step_change_nothing() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "logprobs": 1}
    with letters_llm(cache_positions=4096) as llm:
        free = llm.generate("a", **options).text
        options["banned_strings"] = [free[2:6], free[9:12], free[5:7]]
        plain = llm.generate("a", **options)
        request = llm.request("a", **options)
        llm.start(request, background=False)
        while not request.done:
            llm.engine.step()
            for job in list(llm.engine.running):
                llm.engine.preempt(job)
                for _ in range(3):  # a draft of the draft model, and its verification
                    llm.engine.step()
        restarted = request.generation()
    assert restarted.tokens == plain.tokens and restarted.text == plain.text != free
    assert [one.token for one in restarted.logprobs] == plain.tokens


@pytest.mark.parametrize("decoder", ["autoregressive", "auto"])
def test_a_stream_holds_back_only_what_may_become_a_banned_string(decoder: str) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 8, "decoder": decoder}
    with letters_llm(cache_positions=4096) as llm:
        free = llm.generate("a", **options).text
        options["banned_strings"] = [free[4:8], free[20:23]]
        whole = llm.generate("a", **options).text
        request = llm.request("a", **options)
        llm.start(request, background=False)
        text, seen = "", []
        while not request.done:
            llm.engine.step()
            text += request.take_text()
            seen.append(text)
    assert text == whole != free
    assert all(whole.startswith(part) for part in seen)  # nothing is taken back
    assert len(set(seen)) > (8 if decoder == "auto" else 40)


def scripted(text: str, *pieces: str, prompt: str = ">") -> LLM:
    """A model that prefers to generate `text` and then to stop, else the first piece."""
    tokenizer = PieceTokenizer(*pieces, prompt)

    def script(seen: tuple[int, ...]) -> np.ndarray:
        generated = tokenizer.decode(list(seen)).rpartition(prompt)[2]
        logits = -np.arange(tokenizer.vocab_size, dtype=float)
        if text == generated:
            logits[-1] = 20
        elif text.startswith(generated):
            logits[tokenizer.encode(text[len(generated) :])[0]] = 20
        elif len(generated) >= len(text):
            logits[-1] = 20
        return logits

    return LLM(ScriptedModel(script, tokenizer.vocab_size), tokenizer=tokenizer)


def test_the_token_in_which_the_string_begins_is_banned() -> None:
    """The string begins inside a token and ends inside another."""
    with scripted("x foo bar", *"xyfobar ", "o b", "x f") as llm:
        assert llm.generate(">", banned_strings=["foo bar"]).text == "x xxxxxxx"
        assert llm.generate(">", banned_strings=["oo bar"]).text == "x fxxxxxx"
        assert llm.generate(">", banned_strings=["FOO BAR"]).text == "x foo bar"
        ignoring = llm.generate(">", banned_strings=["FOO BAR"], banned_strings_ignore_case=True)
        assert ignoring.text == "x xxxxxxx"


def test_text_is_held_back_exactly_while_a_banned_string_may_begin_in_it() -> None:
    with scripted("ab abc ab!", *"abc !x") as llm:
        request = llm.request(">", banned_strings=["ab!", "c a?"], decoder="autoregressive")
        llm.start(request, background=False)
        chunks = []
        while not request.done:
            llm.engine.step()
            chunks.append(request.take_text())
    # a, b, " ", a, b, "c", " ", a, b, then "!" completes a string: its "a" gives way to "b".
    assert chunks[:8] == ["", "", "ab ", "", "", "ab", "", ""]
    assert "".join(chunks) == "ab abc baa"


def test_a_stop_before_the_banned_string_ends_the_answer() -> None:
    with scripted("ab;cd", *"abcd;", ";c") as llm:
        options: dict[str, Any] = {"banned_strings": ["b;cd"], "stop": [";"]}
        stopped = llm.generate(">", **options)
        assert (stopped.text, stopped.finish_reason) == ("ab", "stop")
        included = llm.generate(">", include_stop=True, **{**options, "banned_strings": ["b;"]})
        assert included.text == "aaaaa"
        # The end of the answer, by length or end of text, emits what was held back.
        assert llm.generate(">", max_tokens=2, banned_strings=["b;cd"]).text == "ab"
        assert llm.generate(">", banned_strings=["d!"]).text == "ab;cd"


def test_an_answer_that_cannot_go_on_ends_with_content_filter() -> None:
    with letters_llm(cache_positions=4096) as llm:
        answer = llm.generate("x", max_tokens=8, constraint=Choice(("bad", "dad")),
                              banned_strings=["bad"])  # fmt: skip
        assert (answer.text, answer.finish_reason) == ("dad", "stop")
        ended = llm.generate("x", max_tokens=8, constraint=Choice(("cab",)), banned_strings=["ab"])
        assert (ended.text, ended.finish_reason) == ("c", "content_filter")
        assert ended.constraint is not None and not ended.constraint["complete"]
        chunks = list(llm.stream("x", max_tokens=8, constraint=Choice(("cab",)),
                                 banned_strings=["ab"]))  # fmt: skip
        assert "".join(chunk.text for chunk in chunks) == "c"


def test_the_number_of_rewinds_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with letters_llm(cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 1}
        banned = list("abc")
        full = llm.generate("x", banned_strings=banned, **options)
        assert full.finish_reason == "length" and not set(full.text) & set(banned)
        monkeypatch.setattr(banned_strings, "MAX_REWINDS", 5)
        ended = llm.generate("x", banned_strings=banned, **options)
        assert ended.finish_reason == "content_filter" and full.text.startswith(ended.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_validated_constraints_hold_too(temperature: float) -> None:
    """A constraint with retries: the accepted answers are checked for banned strings."""
    even = Predicate(lambda text: text.count("a") % 2 == 0 and len(text) >= 4)
    with letters_llm(cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3,
                                   "constraint": even}  # fmt: skip
        free = llm.generate("x", **options)
        options["banned_strings"] = [free.text[1:4]]
        plain = llm.generate("x", decoder="autoregressive", **options)
        assert options["banned_strings"][0] not in plain.text
        for decoder in ("auto", "prompt-lookup"):
            assert llm.generate("x", decoder=decoder, **options).tokens == plain.tokens
        assert plain.constraint is not None and plain.constraint.keys() == free.constraint.keys()


def test_the_matcher_finds_strings_across_tokens_and_characters() -> None:
    matcher = StringMatcher(["straße", "é!"], ignore_case=True)
    pieces = [b"a STRA", b"S", b"\xc3", b"\xa9", b"!"]
    results = [(matcher.push(i, piece), matcher.first_held) for i, piece in enumerate(pieces)]
    assert results == [(None, 0), (None, 0), (None, 0), (None, 2), (2, 2)]
    assert StringMatcher(["strasse"], ignore_case=True).push(3, "STRAßE".encode()) == 3
    assert StringMatcher(["strasse"]).push(3, "straße".encode()) is None


def test_a_banned_string_may_begin_in_text_that_was_emitted() -> None:
    """ "ab" is emitted when "x" follows. When "xy" is removed, "abc" must not follow either."""
    with scripted("abxyz", *"cabxyz") as llm:
        chunks = [one.text for one in llm.stream(">", banned_strings=["abc", "xy"])]
        assert "".join(chunks) == "abacc"


def test_what_cannot_be_rewound_is_refused() -> None:
    banned: dict[str, Any] = {"banned_strings": ["x"]}
    with toy_llm() as llm:
        for decoder in ("beam", "contrastive-search", "token-healing", "unbiased-tokenization"):
            with pytest.raises(UnsupportedCombinationError, match="does not support banned_str"):
                llm.generate("a", decoder=decoder, **banned)
        with pytest.raises(UnsupportedCombinationError, match="mirostat does not support banned"):
            llm.generate("a", mirostat=2, temperature=1.0, **banned)
        with pytest.raises(UnsupportedCombinationError, match="segment and resume"):
            llm.generate("a", segment=4, **banned)
        for value in ("ab", [""], [3]):
            with pytest.raises(InvalidRequestError, match="banned_strings must be a list of str"):
                llm.generate("a", banned_strings=value)
        with pytest.raises(InvalidRequestError, match="banned_strings_ignore_case is set"):
            llm.generate("a", banned_strings_ignore_case=True)
