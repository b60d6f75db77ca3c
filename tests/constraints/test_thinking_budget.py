"""A limit on reasoning tokens: where the closing tag is forced, equal tokens whatever the drafter,
batch and memory, and constraints behind the reasoning."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from anydecode import LLM, JsonSchema
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.constraints.thinking_budget import ThinkingBudget, next_message
from anydecode.constraints.vocabulary import vocabulary
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from anydecode.sampling.candidates import Candidates

LETTERS = "abcdefghijklmnopqrstuvwxyz "
OPENED, ASKED = "question <think>\n", "question "
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
TAGS = {
    "letters": (),
    "one": ("<think>", "</think>"),
    "several": ("</", "think", "</thi", ">\n", "nk>x"),
}


def pieces(kind: str) -> PieceTokenizer:
    letters = [*LETTERS, *'<>/\n{}:0123456789",é', *TAGS[kind]]
    return PieceTokenizer(*letters)


def thinking_llm(tokenizer: PieceTokenizer, opening: str = "", **options: Any) -> LLM:
    """A model that begins with `opening`, and then generates random letters for a long time."""
    letters = [token for letter in LETTERS for token in tokenizer.encode(letter)]

    def script(seen: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([*seen[-2:], 7]).normal(size=tokenizer.vocab_size)
        noise[letters] += 6
        answer = tokenizer.decode(list(seen)).partition(ASKED)[2]
        if answer in opening and answer != opening:
            noise[tokenizer.encode(opening[len(answer) :])[0]] = 40
        return np.asarray(noise)

    draft = ScriptedModel(script, tokenizer.vocab_size, noise=0.6)
    model = ScriptedModel(script, tokenizer.vocab_size)
    return LLM(model, tokenizer=tokenizer, draft=draft, **options)


@pytest.mark.parametrize("kind", TAGS)
@pytest.mark.parametrize("opening", ["", "<think>", "well <think>"])
def test_the_closing_tag_is_forced_after_the_budget(kind: str, opening: str) -> None:
    tokenizer = pieces(kind)
    prompt = ASKED if opening else OPENED
    with thinking_llm(tokenizer, opening, cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 50, "temperature": 1.0, "seed": 3}
        free = llm.generate(prompt, **options)
        assert "</think>" not in free.text
        for budget in (0, 1, 12):
            answer = llm.generate(prompt, thinking_token_budget=budget, **options)
            start = len(tokenizer.encode(opening))
            assert answer.tokens[: start + budget] == free.tokens[: start + budget]
            thoughts, tag, rest = answer.text.partition("</think>")
            assert tokenizer.encode(thoughts) == free.tokens[: start + budget]
            assert tag and rest and "</think>" not in rest
            assert len(answer.tokens) == 50
        assert llm.generate(prompt, thinking_token_budget=60, **options).tokens == free.tokens
        # Without reasoning there is nothing to limit.
        plain = llm.generate(ASKED + "<think> no", **options)
        limited = llm.generate(ASKED + "<think> no", thinking_token_budget=0, **options)
        assert plain.tokens == limited.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_plain_decoding_whatever_the_drafter_batch_and_memory(
    temperature: float,
) -> None:
    prompts = [OPENED, "another " + OPENED, "a third " + OPENED]
    options: dict[str, Any] = {
        "max_tokens": 40, "temperature": temperature, "seed": 5, "thinking_token_budget": 9,
    }  # fmt: skip
    tokenizer = pieces("several")
    with thinking_llm(tokenizer, cache_positions=4096) as llm:
        plain = [llm.generate(one, decoder="autoregressive", **options) for one in prompts]
        assert all("</think>" in one.text for one in plain)
        tokens = [one.tokens for one in plain]
        decoders = ("auto", "multi-step", "prompt-lookup", "speculative-sampling", "pearl")
        for decoder in decoders:
            batch = llm.generate(prompts, decoder=decoder, **options)
            assert [one.tokens for one in batch] == tokens, decoder
    with thinking_llm(tokenizer, cache_positions=140, row_budget=8) as llm:
        for decoder in ("autoregressive", "auto", "prompt-lookup"):
            batch = llm.generate(prompts, decoder=decoder, **options)
            assert [one.tokens for one in batch] == tokens, decoder
        assert llm.engine.num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", TAGS)
def test_a_constraint_applies_behind_the_limited_reasoning(
    kind: str, opened: bool, temperature: float
) -> None:
    schemas: list[Any] = [SCHEMA, {**SCHEMA, "not": {"properties": {"a": {"const": 1}}}}]
    opening = "" if opened else "<think>"
    with thinking_llm(pieces(kind), opening, cache_positions=4096) as llm:
        for schema in schemas:  # the second one needs validation
            constraint = AfterReasoning(JsonSchema(schema), "<think>", "</think>", opened)
            options: dict[str, Any] = {
                "max_tokens": 60, "temperature": temperature, "seed": 2, "constraint": constraint,
                "thinking_token_budget": 10,
            }  # fmt: skip
            prompt = OPENED if opened else ASKED
            plain = llm.generate(prompt, decoder="autoregressive", **options)
            thoughts, _, answer = plain.text.partition("</think>")
            assert len(thoughts) == 10 + len(opening)
            assert set(json.loads(answer)) == {"a"} and plain.finish_reason == "stop"
            for decoder in ("auto", "prompt-lookup", "speculative-sampling"):
                assert llm.generate(prompt, decoder=decoder, **options).tokens == plain.tokens


def test_a_budget_and_banned_strings_work_together() -> None:
    with thinking_llm(pieces("one"), cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 1,
                                   "thinking_token_budget": 8}  # fmt: skip
        free = llm.generate(OPENED, **options).text
        banned = [free[2:5], free.partition("</think>")[2][3:6]]
        answer = llm.generate(OPENED, banned_strings=banned, **options)
        assert answer.text.index("</think>") == 8 and not any(one in answer.text for one in banned)
        # The forced tag is banned: the answer cannot go on.
        ended = llm.generate(OPENED, banned_strings=["</think>"], **options)
        assert (ended.text, ended.finish_reason) == (free[:8], "content_filter")


def forced(budget: int, text: str) -> set[int]:
    """The tokens allowed after `text`, one token per byte."""
    tokenizer = ByteTokenizer()
    processor = ThinkingBudget(budget, vocabulary(tokenizer, 259), "<think>\n")
    for token in tokenizer.encode(text):
        processor.advance(token)
    candidates = processor.fork().apply(Candidates(None, np.zeros(259, np.float32)))
    return set(range(259) if candidates.tokens is None else candidates.tokens.tolist())


def test_characters_and_tags_that_have_begun_are_completed() -> None:
    everything = set(range(259))
    assert forced(3, "ab") == everything
    assert forced(3, "abc") == {ord("<")}
    assert forced(3, "a</") == {ord("t")}
    assert forced(4, "</</") == {ord("t")}
    assert forced(2, "a</think>") == everything
    assert forced(3, "a</think>b<think>") == {ord("<")}  # one budget for all reasoning
    assert forced(4, "a</think>b<seed:think>c</think>") == {ord("<")}
    # Three bytes are no character yet.
    processor = ThinkingBudget(2, vocabulary(ByteTokenizer(), 259), "<think>")
    allowed = []
    for byte in "a😀b".encode():
        processor.advance(byte)
        allowed.append(len(processor.apply(Candidates(None, np.zeros(259, np.float32)))))
    assert allowed == [259, 259, 259, 259, 1, 1]


CHANNEL, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
HARMONY = (CHANNEL, "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "anal",
           "final", "assistant", "commentary")  # fmt: skip


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_final_channel_of_gpt_oss_opens_after_the_budget(
    opened: bool, temperature: float
) -> None:
    tokenizer = PieceTokenizer(*LETTERS, *'<|>{}:0123456789"', *HARMONY)
    opening = "" if opened else CHANNEL
    prompt = ASKED + CHANNEL if opened else ASKED
    with thinking_llm(tokenizer, opening, cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
        free = llm.generate(prompt, **options)
        for budget in (0, 9):
            options["thinking_token_budget"] = budget
            answer = llm.generate(prompt, decoder="autoregressive", **options)
            thoughts, end, _ = answer.text.partition("<|end|><|start|>assistant" + FINAL)
            assert end and len(answer.tokens) == 40
            assert free.text.startswith(thoughts) and len(thoughts) == len(opening) + budget
            for decoder in ("auto", "prompt-lookup", "speculative-sampling"):
                assert llm.generate(prompt, decoder=decoder, **options).tokens == answer.tokens


def test_with_tools_gpt_oss_chooses_the_channel_after_the_budget() -> None:
    tokenizer = PieceTokenizer(*LETTERS, *HARMONY)
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    processor = ThinkingBudget(
        1, words, CHANNEL, next_message=next_message(tokenizer, words, may_call=True), may_call=True
    )
    everything = set(range(tokenizer.vocab_size))
    banned = set(tokenizer.encode("a") + tokenizer.encode("anal") + tokenizer.encode("analysis"))
    expected = [everything, *({token} for token in tokenizer.encode("<|end|><|start|>assistant"))]
    for token, allowed in zip(
        tokenizer.encode("x<|end|><|start|>assistant<|channel|>commentary"),
        [*expected, everything, everything - banned],
        strict=True,
    ):
        candidates = processor.apply(Candidates(None, np.zeros(tokenizer.vocab_size, np.float32)))
        assert allowed == set(range(len(candidates)) if candidates.tokens is None
                              else candidates.tokens.tolist())  # fmt: skip
        processor.advance(token)
    # A message that the model has ended itself is not ended twice.
    processor = ThinkingBudget(
        1, words, CHANNEL, next_message=tokenizer.encode("<|end|><|start|>assistant")
    )
    for token in tokenizer.encode("x<|end|>"):
        processor.advance(token)
    candidates = processor.apply(Candidates(None, np.zeros(tokenizer.vocab_size, np.float32)))
    assert candidates.tokens.tolist() == tokenizer.encode("<|start|>")


def test_what_cannot_be_limited_is_refused() -> None:
    with thinking_llm(pieces("one"), cache_positions=512) as llm:
        with pytest.raises(UnsupportedCombinationError, match="does not support thinking_token"):
            llm.generate("a", decoder="beam", thinking_token_budget=3)
        for value in (-1, 2.5, True):
            with pytest.raises(InvalidRequestError, match="thinking_token_budget must be"):
                llm.generate("a", thinking_token_budget=value)
