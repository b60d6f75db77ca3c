"""Requests for several texts: of one search, in turn, and those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, JsonSchema, Regex
from anydecode.certification.oracles.constrained.trap_model import TRUTH, WORDS, trap_llm
from anydecode.certification.oracles.search.beam import (
    ShortTokenizer,
    beam_oracle,
    short_model,
)
from anydecode.errors import ConstraintError, InvalidRequestError
from server_client import served
from toy_models import toy_llm

PROMPT = [0, 1]


def short_llm(seed: int = 1) -> LLM:
    return LLM(short_model(seed), tokenizer=ShortTokenizer(), cache_positions=1024)


class Nothing:
    def mask(self) -> np.ndarray:
        return np.zeros(259, bool)

    def fork(self) -> Nothing:
        return self

    def advance(self, token: int) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_texts_of_one_search_best_first(temperature: float) -> None:
    options: dict[str, Any] = {"decoder": "beam", "max_tokens": 6, "temperature": temperature}
    for seed in range(6):
        with short_llm(seed) as llm:
            answer = llm.generate(PROMPT, n=4, logprobs=0, **options)
            totals = [llm.score(PROMPT, one.tokens).total for one in answer.samples]
            alone = llm.generate(PROMPT, **options)
        texts = [one.tokens for one in answer.samples]
        assert texts == beam_oracle(short_model(seed), PROMPT, 4, 6, 1.0, end=3)[:4]
        assert texts[0] == alone.tokens
        assert [one.stats.passes for one in answer.samples[1:]] == [0, 0, 0]
        for one, total in zip(answer.samples, totals, strict=True):
            assert sum(token.logprob for token in one.logprobs) == pytest.approx(total, abs=1e-4)
            assert one.score == pytest.approx(total / len(one.tokens), abs=1e-4)
            assert one.finish_reason == ("stop" if one.tokens[-1] == 3 else "length")


def test_a_search_that_finds_fewer_texts_gives_those() -> None:
    with toy_llm() as llm:
        answer = llm.generate("a", n=4, decoder="beam", constraint=Regex("yes|no"))
        assert sorted(one.text for one in answer.samples) == ["no", "yes"]
        assert llm.generate("a", decoder="beam", constraint=Regex("yes|no")).text == answer.text


@pytest.mark.parametrize("decoder", ["beam", "best-of-n", "autoregressive"])
def test_samples_without_tokens_end(decoder: str) -> None:
    with toy_llm() as llm:
        answer = llm.generate("a", n=3, decoder=decoder, max_tokens=0, temperature=1.0)
    assert [(one.text, one.finish_reason) for one in answer.samples] == [("", "length")] * 3


def test_log_probabilities_of_a_search_are_those_of_its_text() -> None:
    for decoder in ("beam", "awrs"):
        options: dict[str, Any] = {"decoder": decoder, "temperature": 0.8, "seed": 2}
        with toy_llm() as llm:
            answer = llm.generate("the cat", logprobs=1, max_tokens=12, **options)
            total = llm.score("the cat", answer.tokens).total
            assert len(answer.logprobs) == len(answer.tokens)
        assert sum(one.logprob for one in answer.logprobs) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "beam", "n": 5}, "keeps 4 texts"),
        ({"decoder": "contrastive-search", "temperature": 1.0}, "always generates the same text"),
        ({"sampler": "momentum", "temperature": 1.0}, "always generates the same text"),
        ({"first_finish": 1}, "at temperature 0: all samples are the same"),
        ({"decoder": "beam", "first_finish": 1}, "texts finish together"),
        (
            {"decoder": "beam", "constraint": JsonSchema({"type": "array", "uniqueItems": True})},
            "finds one text",
        ),
    ],
)
def test_several_texts_where_there_is_one_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with toy_llm() as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", **{"n": 2, **options})


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup"])
def test_samples_at_temperature_0_are_copies_of_one(decoder: str) -> None:
    with toy_llm() as llm:
        runner = llm.engine.runners["target"]
        one = llm.generate("the cat", decoder=decoder, logprobs=1, max_tokens=12)
        rows = runner.num_rows
        again = llm.generate("the cat", n=3, decoder=decoder, logprobs=1, max_tokens=12)
        assert runner.num_rows - rows <= rows  # one sample is computed
        for sample in again.samples:
            assert sample.tokens == one.tokens and sample.text == one.text
            assert sample.finish_reason == one.finish_reason
            assert [each.logprob for each in sample.logprobs or ()] == [
                each.logprob for each in one.logprobs or ()
            ]
        assert len(again.samples) == 3
        llm.engine.check_integrity()


def test_copies_stop_and_continue_like_the_first() -> None:
    with toy_llm() as llm:
        text = llm.generate("the cat", max_tokens=12, ignore_eos=True).text
        stopped = llm.generate("the cat", n=2, max_tokens=12, ignore_eos=True, stop=text[6])
        assert [one.text for one in stopped.samples] == [text[: text.index(text[6])]] * 2
        whole = llm.generate("the cat", n=2, max_tokens=9, ignore_eos=True)
        part = llm.generate("the cat", n=2, max_tokens=9, ignore_eos=True, segment=4)
        assert part.resume is not None and len(part.resume["samples"]) == 2
        rest = llm.generate("the cat", n=2, max_tokens=9, ignore_eos=True, resume=part.resume)
        assert [one.text for one in rest.samples] == [one.text for one in whole.samples]


@pytest.mark.parametrize(
    "options",
    [
        {
            "constraint": JsonSchema(
                {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
            )
        },
        {"banned_strings": ["e", "t"]},
    ],
    ids=["validated", "banned"],
)
def test_copies_have_text_that_was_held_back(options: dict[str, Any]) -> None:
    with toy_llm() as llm:
        one = llm.generate("a", max_tokens=30, **options)
        both = llm.generate("a", n=2, max_tokens=30, **options).samples
        assert (
            one.text
            and [(each.text, each.finish_reason) for each in both]
            == [(one.text, one.finish_reason)] * 2
        )


def test_an_error_of_the_first_is_one_of_all_copies() -> None:
    with toy_llm() as llm:
        with pytest.raises(ConstraintError):
            llm.generate("a", n=3, decoder="autoregressive", constraint=Nothing())
        llm.engine.check_integrity()


def test_a_constraint_that_allows_nothing_is_an_error_of_all_texts() -> None:
    with toy_llm() as llm:
        for n in (1, 2):
            with pytest.raises(ConstraintError, match="allows none"):
                llm.generate("a", n=n, decoder="beam", constraint=Nothing())
        llm.engine.check_integrity()


def test_samples_of_asap_learn_from_each_other() -> None:
    """Masking alone would give "aa" six times in ten; the true share is 0.07."""
    options: dict[str, Any] = {"constraint": WORDS, "temperature": 1.0, "seed": 5}
    with trap_llm() as llm:
        answer = llm.generate("?", decoder="asap", n=40, **options)
        decoder = llm.decoder("asap")
        (trie,) = decoder.tries.values()
    assert trie.completion_probability == pytest.approx(sum(TRUTH.values()), abs=1e-3)
    first, last = answer.samples[:20], answer.samples[20:]
    assert sum(one.text == "aa" for one in last) < 0.25 * len(last)
    assert len({one.text for one in first}) > 1


def test_abandoned_samples_end() -> None:
    for decoder in ("beam", "asap"):
        with toy_llm() as llm:
            request = llm.request("abc", n=3, decoder=decoder, temperature=1.0, max_tokens=50)
            llm.start(request, background=False)
            llm.engine.step()
            llm.abandon(request)
            assert request.done and not llm.engine.has_work
            llm.engine.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_gives_the_texts_of_one_search(stream: bool) -> None:
    fields: dict[str, Any] = {"decoder": "beam", "n": 3, "max_tokens": 6, "temperature": 0}
    with toy_llm() as llm:
        answer = llm.generate("abc", decoder="beam", n=3, max_tokens=6)
        expected = [one.text for one in answer.samples]
        with served(llm) as client:
            if stream:
                texts = ["", "", ""]
                for chunk in client.chunks("/v1/completions", "abc", **fields):
                    for choice in chunk["choices"]:
                        texts[choice["index"]] += choice["text"]
            else:
                choices = client.ask("/v1/completions", "abc", **fields)["choices"]
                texts = [choice["text"] for choice in choices]
    assert texts == expected
