"""Constraints after the reasoning of a model, through the API and the server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tokenizers import Tokenizer, decoders, pre_tokenizers  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

from anydecode import LLM, Choice, JsonSchema, Predicate  # noqa: E402
from anydecode.constraints.constraint import ConstraintState  # noqa: E402
from anydecode.constraints.reasoning import AfterReasoning  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel  # noqa: E402
from anydecode.models.tokenizers import HFTokenizer  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "hello"}]
THOUGHT = 'if {"a": 1} </thin or <b</think'
MARK = "assistant: "


class Pieces(PieceTokenizer):
    """ASCII and a few longer tokens, with a chat template that opens the reasoning or leaves it to
    the model. The template contains only the reasoning tags."""

    def __init__(self, *pieces: str, opened: bool = True) -> None:
        super().__init__(*ASCII, *pieces)
        self.opened = opened
        self.chat_template = "<think> </think>"

    def render_chat(self, messages: Any, **variables: Any) -> str:
        text = super().render_chat(messages)
        if variables.get("enable_thinking") is False:
            return f"{text}<think>\n\n</think>\n\n"
        return f"{text}<think>\n" if self.opened else text


PIECES = {
    "ordinary": (),
    "one": ("<think>", "</think>", "\n\n"),
    "several": ("</", "think", ">\n", ">\n\n", ">\n\n\n", "k>{", "</think>{", ' "', "<th"),
}


def reasoning_model(tokenizer: PieceTokenizer, script_text: str) -> ScriptedModel:
    """A model that prefers to generate `script_text` and then to stop; random otherwise."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        generated = tokenizer.decode(list(seen)).rpartition(MARK)[2]
        logits: np.ndarray = np.random.default_rng(list(generated.encode())).normal(
            size=tokenizer.vocab_size
        )
        if script_text == generated:
            logits[-1] = 20
        elif script_text.startswith(generated):
            logits[tokenizer.encode(script_text[len(generated) :])[0]] = 20
        return logits

    return ScriptedModel(script, tokenizer.vocab_size)


@contextmanager
def served(tokenizer: Pieces, script_text: str, **settings: Any) -> Iterator[tuple[Any, LLM]]:
    with LLM(
        reasoning_model(tokenizer, script_text), tokenizer=tokenizer, cache_positions=4096
    ) as llm:
        with LiveServer(llm, Settings(name="scripted", port=0, **settings)) as server:
            http = openai.DefaultHttpxClient(trust_env=False, verify=False)
            url = f"{server.url}/v1"
            with openai.OpenAI(
                base_url=url, api_key="none", max_retries=0, http_client=http
            ) as one:
                yield one, llm


def parts(answer: Any, stream: bool) -> tuple[str, str, str, list[Any]]:
    """Reasoning, content, finish reason and tool calls."""
    if not stream:
        choice = answer.choices[0]
        message = choice.message
        reasoning = getattr(message, "reasoning_content", "")
        calls = [call.function for call in message.tool_calls or []]
        return reasoning, message.content or "", choice.finish_reason, calls
    reasoning, content, reason, calls = "", "", "", []
    for chunk in answer:
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    calls.append(call.function)
                else:
                    calls[call.index].arguments += call.function.arguments
            reason = choice.finish_reason or reason
    return reasoning, content, reason, calls


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "save", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "load", "parameters": SCHEMA}},
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", list(PIECES))
def test_a_response_format_applies_after_the_reasoning(
    kind: str, opened: bool, stream: bool
) -> None:
    tokenizer = Pieces(*PIECES[kind], opened=opened)
    script_text = f"<think>\n{THOUGHT}</think>\n\nhello"
    with served(tokenizer, script_text) as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=200, temperature=0,
            response_format=FORMAT, stream=stream,
        )  # fmt: skip
        reasoning, content, reason, _ = parts(answer, stream)
        assert reasoning.strip() == THOUGHT
        assert set(json.loads(content)) == {"a", "b"} and reason == "stop"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "load"}}])
def test_a_forced_tool_call_comes_after_the_reasoning(
    choice: Any, opened: bool, stream: bool
) -> None:
    script_text = f"<think>\n{THOUGHT}</think>\n\nhello"
    with served(Pieces(*PIECES["several"], opened=opened), script_text) as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=300, temperature=0, tools=TOOLS,
            tool_choice=choice, parallel_tool_calls=False, stream=stream,
        )  # fmt: skip
        reasoning, content, reason, calls = parts(answer, stream)
        assert (reasoning.strip(), content.strip(), reason) == (THOUGHT, "", "tool_calls")
        assert len(calls) == 1 and set(json.loads(calls[0].arguments)) == {"a", "b"}
        assert calls[0].name in (("save", "load") if choice == "required" else ("load",))


def test_a_tool_call_inside_the_reasoning_is_not_a_call() -> None:
    thought = '<tool_call>{"name": "save"}</tool_call>'
    with served(Pieces(), f"<think>\n{thought}</think>hello") as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=300, temperature=0, tools=TOOLS
        )
    assert parts(answer, False) == (thought, "hello", "stop", [])


@pytest.mark.parametrize("stream", [False, True])
def test_the_format_of_responses_applies_after_the_reasoning(stream: bool) -> None:
    script_text = f"<think>\n{THOUGHT}</think>\n\nhello"
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    with served(Pieces(*PIECES["one"]), script_text) as (client, _):
        options = {"model": "scripted", "input": "hello", "temperature": 0, "text": text}
        answer = client.responses.create(**options, max_output_tokens=200, stream=stream)
        if stream:
            answer = list(answer)[-1].response
        assert answer.status == "completed"
        assert set(json.loads(answer.output_text)) == {"a", "b"}
        short = client.responses.create(**options, max_output_tokens=12)
        assert (short.status, short.output_text) == ("incomplete", "")


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_limit_can_end_the_reasoning(stream: bool) -> None:
    script_text = f"<think>\n{THOUGHT}</think>\n\nhello"
    with served(Pieces(), script_text) as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=10, temperature=0,
            response_format=FORMAT, stream=stream,
        )  # fmt: skip
        assert parts(answer, stream) == (THOUGHT[:10], "", "length", [])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", list(PIECES))
def test_a_thinking_budget_ends_the_reasoning(kind: str, opened: bool, stream: bool) -> None:
    script_text = f"<think>\n{THOUGHT}</think>\n\nhello"
    with served(Pieces(*PIECES[kind], opened=opened), script_text) as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=200, temperature=0,
            response_format=FORMAT, stream=stream, extra_body={"thinking_token_budget": 4},
        )  # fmt: skip
        reasoning, content, reason, _ = parts(answer, stream)
        assert 0 < len(reasoning.strip()) < 8 and THOUGHT.startswith(reasoning.strip())
        assert set(json.loads(content)) == {"a", "b"} and reason == "stop"


def test_without_reasoning_the_format_applies_from_the_first_token() -> None:
    options: dict[str, Any] = {
        "model": "scripted", "messages": ASK, "max_tokens": 100, "temperature": 0,
        "response_format": FORMAT,
    }  # fmt: skip
    script_text = f"<think>\n{THOUGHT}</think>hello"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with served(Pieces(), script_text) as (client, llm):
        closed = client.chat.completions.create(**options, extra_body=off)
        alone = llm.generate(
            llm.tokenizer.render_chat(ASK, enable_thinking=False),
            max_tokens=100,
            constraint=JsonSchema(SCHEMA),
        )
        assert closed.choices[0].message.content == alone.text
    unaware = Pieces(opened=False)
    unaware.chat_template = "{role}: {content}"
    settings: tuple[tuple[Pieces, dict[str, str]], ...] = (
        (unaware, {}), (Pieces(), {"reasoning_parser": "none"}),
    )  # fmt: skip
    for tokenizer, more in settings:
        with served(tokenizer, script_text, **more) as (client, _):
            answer = client.chat.completions.create(**options)
            assert set(json.loads(answer.choices[0].message.content)) == {"a", "b"}


def test_optional_reasoning_can_be_skipped() -> None:
    with served(Pieces(opened=False), '{"a": 22, "b": true}') as (client, _):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=100, temperature=0, response_format=FORMAT
        )
    assert parts(answer, False)[:3] == ("", '{"a": 22, "b": true}', "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("opened", [True, False])
def test_every_decoder_generates_the_same_tokens(opened: bool, temperature: float) -> None:
    tokenizer = Pieces(*PIECES["several"], opened=opened)
    model = reasoning_model(tokenizer, f"<think>\n{THOUGHT}</think>\n\nhello")
    constraint = AfterReasoning(JsonSchema(SCHEMA), "<think>", "</think>", opened)
    prompt = tokenizer.render_chat(ASK)
    draft = ScriptedModel(vocab_size=tokenizer.vocab_size, seed=3)
    with LLM(model, tokenizer=tokenizer, draft=draft, cache_positions=4096) as llm:
        options: dict[str, Any] = {"max_tokens": 150, "temperature": temperature, "seed": 4}

        def generate(decoder: str) -> list[int]:
            answer = llm.generate(prompt, constraint=constraint, decoder=decoder, **options)
            assert answer.constraint is not None and answer.constraint["complete"]
            return answer.tokens

        plain = generate("autoregressive")
        assert set(json.loads(tokenizer.decode(plain).rpartition("</think>")[2])) == {"a", "b"}
        for decoder in ("auto", "prompt-lookup", "jump-forward", "speculative-sampling"):
            assert generate(decoder) == plain, decoder


@pytest.mark.parametrize("opened", [True, False])
def test_an_answer_is_completed_within_the_limit(opened: bool) -> None:
    """Forced completion counts the tokens of the reasoning towards the limit."""
    tokenizer = Pieces(opened=opened)
    schema = {"type": "array", "items": {"type": "integer"}}
    start = "" if opened else "<think>\n"
    script_text = f"<think>\n{THOUGHT}</think>[" + "1, 2, " * 100
    limit = len(start) + len(THOUGHT) + len("</think>") + 20
    constraint = AfterReasoning(JsonSchema(schema), "<think>", "</think>", opened)
    with LLM(
        reasoning_model(tokenizer, script_text), tokenizer=tokenizer, cache_positions=4096
    ) as llm:
        for decoder in ("autoregressive", "auto"):
            answer = llm.generate(
                tokenizer.render_chat(ASK), constraint=constraint, max_tokens=limit, decoder=decoder
            )
            assert answer.finish_reason == "stop" and answer.constraint["steered"]
            value = json.loads(answer.text.rpartition("</think>")[2])
            assert value[:4] == [1, 2, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_values_are_sampled_again_after_the_same_reasoning(temperature: float) -> None:
    """Only the answer is validated and retried; the reasoning is kept."""
    tokenizer = Pieces()
    schema = {"type": "array", "items": {"enum": [1, 3]}, "contains": {"const": 3}, "maxItems": 6}
    script_text = f"<think>\n{THOUGHT}</think>[1]"
    constraint = AfterReasoning(JsonSchema(schema, close=True), "<think>", "</think>", True)
    with LLM(
        reasoning_model(tokenizer, script_text), tokenizer=tokenizer, cache_positions=4096
    ) as llm:
        answer = llm.generate(
            tokenizer.render_chat(ASK), constraint=constraint, max_tokens=120,
            temperature=temperature, seed=1, logprobs=0,
        )  # fmt: skip
    reasoning, _, answer_text = answer.text.rpartition("</think>")
    assert reasoning == THOUGHT and 3 in json.loads(answer_text)
    assert answer.constraint["tries"] > 0 and len(answer.logprobs) == len(answer.tokens)


def test_the_closing_tag_can_be_a_special_token() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<think>", "</think>"])
    tokenizer = HFTokenizer(backend, eos_ids=[256])
    constraint = AfterReasoning(Choice(("yes", "no")), "<think>", "</think>", True)
    for text in ("hm</think>yes<end>", "</think>\n\nno<end>"):
        state = constraint.start(tokenizer, tokenizer.vocab_size)
        for token in tokenizer.encode(text):
            assert state.allows(token)
            state.advance(token)
        assert state.finished
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    assert not state.allows(256)
    state.advance(tokenizer.encode("</think>")[0])
    assert set(np.flatnonzero(state.mask())) == set(tokenizer.encode("yn\n"))


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("inner", ["choice", "predicate"])
def test_masks_equal_a_reference_on_texts(inner: str, opened: bool) -> None:
    """Random walks with rollbacks and forks: a token is allowed if and only if the text can still
    be completed, and no token belongs partly to the reasoning and partly to the answer."""
    pieces = [*"abc<>/t\n", "\n\n", ">\n", "t>", "t>a", "</t>", "<t>", "ab", ">\n\n\n"]
    tokenizer = PieceTokenizer(*pieces)
    options = ("ab", "ac", "<b")
    constraint: Any = Choice(options)
    if inner == "predicate":
        constraint = Predicate(
            options.__contains__, lambda text: any(one.startswith(text) for one in options)
        )
    after = AfterReasoning(constraint, "<t>", "</t>", opened)
    size = tokenizer.vocab_size
    eos = size - 1

    def reference(text: bytes) -> tuple[str, bytes]:
        """The phase of a text, and the part of it that belongs to the answer."""
        if not opened and not text.startswith(b"<t>"):
            return ("start" if b"<t>".startswith(text) else "answer"), text
        _, tag, answer = text.partition(b"</t>")
        if not tag:
            return "reasoning", b""
        stripped = answer.lstrip(b"\n")
        if len(answer) - len(stripped) > 2:
            return "wrong", b""
        return ("answer" if stripped else "closed"), stripped

    def fits(before: bytes, token: int) -> bool:
        position, answer = reference(before)
        if token == eos:
            return position != "reasoning" and answer.decode() in options
        piece = pieces[token].encode()
        next_position, answer_part = reference(before + piece)
        if position == "reasoning" and next_position == "answer":
            return False
        if next_position == "answer":
            return any(one.encode().startswith(answer_part) for one in options)
        return next_position != "wrong"

    rng = random.Random(5)
    for _ in range(60):
        state: ConstraintState = after.start(tokenizer, size)
        tokens: list[int] = []
        for _ in range(25):
            text = b"".join(tokenizer.token_bytes(token) for token in tokens)
            expected = [fits(text, token) for token in range(size)]
            mask = state.mask()
            assert mask is not None and mask.tolist() == expected, text
            assert [state.allows(token) for token in range(size)] == expected
            assert state.can_stop == expected[eos]
            forbidden = [token for token in range(size) if not expected[token]]
            with pytest.raises(ConstraintError):
                state.fork().advance(rng.choice(forbidden))
            assert all(mask[token] and mask.sum() == 1 for token in state.forced_tokens()[:1])
            options_now = [token for token in range(size) if expected[token] and token != eos]
            if rng.random() < 0.3 or not options_now:
                count = rng.randint(0, len(tokens))
                state.rollback(count)
                tokens = tokens[: len(tokens) - count]
                continue
            branch = state.fork()
            token = rng.choice(options_now)
            branch.advance(rng.choice(options_now))
            state.advance(token)
            tokens.append(token)


@pytest.mark.parametrize(
    ("opened", "reasoning"),
    [
        (False, ""),  # the answer at once
        (False, "<r>ab</r>"),
        (False, "<r>ab</r>\n"),
        (True, "ab</r>"),
    ],
)
def test_an_invalid_answer_is_cut_after_the_reasoning_and_its_valid_start(
    opened: bool, reasoning: str
) -> None:
    """Every byte is a token. The second item of the answer is invalid."""
    answer = JsonSchema({"type": "array", "items": {"type": "array", "uniqueItems": True}})
    answer.start(ByteTokenizer(), ByteTokenizer.vocab_size)
    constraint = AfterReasoning(answer, "<r>", "</r>", opened)
    validator = constraint.incremental_validator(ByteTokenizer())
    assert validator is not None
    text = reasoning + "[[4], [3, 3]"
    found = [validator.push(byte) for byte in text.encode()]
    assert found == [None] * (len(text) - 1) + [text.index("[3")]
