"""Answers that continue the last message: the prompt ends with that message, on every API, and
templates that cannot do it are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.models.scripted import ScriptedModel  # noqa: E402
from server_client import CHAT, COMPLETIONS, Client, served  # noqa: E402
from server_models import TemplateTokenizer  # noqa: E402

ASK = {"role": "user", "content": "why?"}
#: What a template adds around a message.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = CHATML.replace("CONTENT", "m.content")
TRIMMED = CHATML.replace("CONTENT", "m.content | trim")
START = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
PARTIALS = ["Because", "The sky is \n", "", "a<|im_end|>b", "why?", "assistant"]


@contextmanager
def templated(template: str) -> Iterator[Client]:
    model = ScriptedModel(seed=1)
    with LLM(model, tokenizer=TemplateTokenizer(template), cache_positions=4096) as llm:
        with served(llm) as client:
            yield client


def prompt_of(client: Client, *messages: Any, status: int = 200, **fields: Any) -> Any:
    """The text of the prompt, or the error."""
    body = {"messages": list(messages), **fields}
    answer = client.http.post("/tokenize", json=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]
    tokens = answer.json()["tokens"]
    return client.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("template", [PLAIN, TRIMMED])
def test_the_prompt_ends_with_the_last_message(template: str) -> None:
    with templated(template) as client:
        for partial in PARTIALS:
            last = assistant(partial)
            assert prompt_of(client, ASK, last, continue_final_message=True) == START + partial
        parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "cause"}]
        continued = prompt_of(client, ASK, assistant(parts), continue_final_message=True)
        assert continued == START + "Because"
        # Without the field, the message is complete.
        complete = prompt_of(client, ASK, assistant("Because"))
        assert complete.endswith("Because<|im_end|>\n<|im_start|>assistant\n")
        no_answer = prompt_of(client, ASK, add_generation_prompt=False)
        assert no_answer == "<|im_start|>user\nwhy?<|im_end|>\n"


def test_every_api_continues_the_same_prompt() -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    messages = [ASK, assistant("Because ")]
    with templated(PLAIN) as client:
        expected = client.ask(COMPLETIONS, START + "Because ", max_tokens=12, **options)
        text = expected["choices"][0]["text"]
        fields = {"messages": messages, "max_tokens": 12, **options}
        continued = {**fields, "continue_final_message": True, "add_generation_prompt": False}
        answer = client.ask(CHAT, **continued)
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["prompt_tokens"] == len(START + "Because ")
        parts = [
            one["choices"][0]["delta"].get("content") for one in client.chunks(CHAT, **continued)
        ]
        assert "".join(part or "" for part in parts) == text
        # Another prompt has another text.
        assert client.ask(CHAT, **fields)["choices"][0]["message"]["content"] != text

        message = client.http.post("/v1/messages", json=fields).json()
        assert [block["text"] for block in message["content"]] == [text]
        counted = client.http.post("/v1/messages/count_tokens", json={"messages": messages})
        assert counted.json() == {"input_tokens": len(START + "Because ")}
        ollama = {"messages": messages, "stream": False, "options": {**options, "num_predict": 12}}
        ollama["options"] |= {"top_k": 0, "top_p": 1.0}
        answer = client.http.post("/api/chat", json=ollama).json()
        assert answer["message"]["content"] == text


@pytest.mark.parametrize(
    "content",
    [
        "m.content | upper",
        "m.content[:9]",
        "m.content ~ m.content",
        "m.content | replace('B', 'C')",
    ],
)
def test_templates_that_change_the_message_are_refused(content: str) -> None:
    with templated(CHATML.replace("CONTENT", content)) as client:
        last = assistant("Because")
        error = prompt_of(client, ASK, last, continue_final_message=True, status=400)
        assert error["message"].startswith(
            "the last message cannot be continued: the chat template"
        )
        assert error["param"] == "continue_final_message" and "\n" not in error["message"]
        error = client.refused(CHAT, messages=[ASK, last], continue_final_message=True)
        assert "the chat template changes" in error["message"]


def test_leading_white_space_that_a_template_removes_is_refused() -> None:
    for template, status in ((PLAIN, 200), (TRIMMED, 400)):
        with templated(template) as client:
            last = assistant(" Because")
            prompt_of(client, ASK, last, continue_final_message=True, status=status)


def test_other_messages_cannot_be_continued() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with templated(PLAIN) as client:
        for messages, extra, part in (
            ([ASK], {}, "its role is user"),
            ([ASK, {**assistant("a"), "tool_calls": [call]}], {}, "it has tool calls"),
            ([ASK, assistant("a")], {"add_generation_prompt": True}, "add_generation_prompt"),
        ):
            fields = {"continue_final_message": True, **extra}
            error = prompt_of(client, *messages, **fields, status=400)
            assert part in error["message"], messages


def test_reasoning_that_has_begun_goes_on() -> None:
    """The answer to a message within its reasoning begins with reasoning, and a format applies
    after it; the answer to one behind its reasoning has none."""
    with templated(PLAIN) as client:
        options: dict[str, Any] = {"max_tokens": 20, "seed": 1, "continue_final_message": True}

        def ask(partial: str, **fields: Any) -> Any:
            messages = [ASK, assistant(partial)]
            answer = client.ask(CHAT, messages=messages, **options, **fields)
            return answer["choices"][0]["message"]

        inside = ask("<think>I wonder")
        assert inside["content"] == "" and len(inside["reasoning_content"]) > 0
        after = ask("<think>I wonder</think>So")
        assert "reasoning_content" not in after and after["content"]
        choice = {"structured_outputs": {"choice": ["yes", "no"]}}
        assert ask("<think>I wonder</think>So ", **choice)["content"] in ("yes", "no")
        assert ask("<think>I wonder", **choice)["content"] == ""
