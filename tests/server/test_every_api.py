"""What every API that generates does alike: constraints, reasoning, guidance, parts that are no
text, and token counts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from replaying import replaying_llm  # noqa: E402
from server_client import CHAT, COMPLETIONS, FILL_IN, RESPONSES, Client, served  # noqa: E402
from server_constraints import KINDS  # noqa: E402
from server_models import THINKING, TemplateTokenizer, answering  # noqa: E402

MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/messages", "/api/chat", "/api/generate"
CHATS = (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT)
OLLAMA = (OLLAMA_CHAT, OLLAMA_GENERATE)
DOCS = Path(__file__).parents[2] / "docs"


def request(path: str, text: Any, max_tokens: int, **options: Any) -> dict[str, Any]:
    """A request for the answer to `text`; `options` are fields of the engine."""
    options = {"seed": 3, **options}
    if path in OLLAMA:
        options["num_predict"] = max_tokens
        prompt = {"messages": [{"role": "user", "content": text}]}
        return {"options": options, **(prompt if path == OLLAMA_CHAT else {"prompt": text})}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    fields = {limit: max_tokens, **options}
    if path == RESPONSES:
        is_text = isinstance(text, str)
        return {"input": text if is_text else [{"role": "user", "content": text}], **fields}
    if path in (COMPLETIONS, FILL_IN):
        return {"prompt": text, **fields}
    return {"messages": [{"role": "user", "content": text}], **fields}


def answer(path: str, found: dict[str, Any]) -> tuple[str, str]:
    """The text and the reasoning of a response that is not streamed."""
    if path in OLLAMA:
        message = found.get("message", found)
        return message.get("content", message.get("response")), message.get("thinking", "")
    if path == RESPONSES:
        parts = [(one["type"], one["content"][0]["text"]) for one in found["output"]]
    elif path == MESSAGES:
        parts = [(one["type"], one.get("text", one.get("thinking"))) for one in found["content"]]
    else:
        choice = found["choices"][0]
        message = choice.get("message", {"content": choice.get("text")})
        return message["content"], message.get("reasoning_content", "")
    text = "".join(one for kind, one in parts if kind in ("message", "text"))
    return text, "".join(one for kind, one in parts if kind in ("reasoning", "thinking"))


def ask(client: Client, path: str, text: str, max_tokens: int, **options: Any) -> tuple[str, str]:
    """The text and the reasoning of the answer."""
    body = {**request(path, text, max_tokens, **options), "stream": False}
    response = client.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return answer(path, response.json())


def streamed(client: Client, path: str, text: str, max_tokens: int, **options: Any) -> str:
    """The text of a streamed answer."""
    body = {**request(path, text, max_tokens, **options), "stream": True}
    response = client.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found = ""
    for line in response.text.splitlines():
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        if path in OLLAMA:
            found += answer(path, event)[0]
        elif path == MESSAGES:
            found += event.get("delta", {}).get("text", "")
        else:
            found += "".join(one["delta"].get("content") or "" for one in event["choices"])
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [FILL_IN, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE])
def test_every_constraint_reaches_the_other_apis(client: Client, path: str, kind: str) -> None:
    field, check = KINDS[kind]
    text, _ = ask(client, path, "abc", 200, structured_outputs=field)
    assert check(text), text
    assert streamed(client, path, "abc", 200, structured_outputs=field) == text


@pytest.mark.parametrize("path", [FILL_IN, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE])
def test_an_answer_of_the_other_apis_has_one_constraint(client: Client, path: str) -> None:
    both = {"regex": "a", "choice": ["b"]}
    body = request(path, "abc", 9, structured_outputs=both)
    response = client.http.post(path, json=body)
    assert response.status_code == 400
    assert "an answer has one constraint" in str(response.json()["error"])


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, FILL_IN, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE]
)
def test_guidance_is_that_of_the_engine(client: Client, llm: LLM, path: str) -> None:
    has_template = path not in (COMPLETIONS, FILL_IN)
    prompt = "user: the cat\nassistant: " if has_template else "the cat"
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 1.0}
    guided = {**options, "guidance_scale": 3.0, "negative_prompt": "a dog"}
    plain = llm.generate(prompt, max_tokens=16, seed=3, **options)
    expected = llm.generate(prompt, max_tokens=16, seed=3, **guided)
    assert expected.text != plain.text
    assert ask(client, path, "the cat", 16, **guided)[0] == expected.text


@pytest.fixture(scope="module")
def thinking() -> Iterator[Client]:
    with answering(b"hmm</think>yes", TemplateTokenizer(THINKING)) as llm, served(llm) as client:
        yield client


@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
@pytest.mark.parametrize("path", CHATS)
def test_the_reasoning_has_a_budget_on_every_api(thinking: Client, path: str, name: str) -> None:
    assert ask(thinking, path, "abc", 30, temperature=0) == ("yes", "hmm")
    assert ask(thinking, path, "abc", 30, temperature=0, **{name: 1})[1] == "h"


EFFORT = "{{ messages[-1].content }} effort: {{ reasoning_effort }}"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("effort", ["low", "medium", "high", "max"])
@pytest.mark.parametrize(
    "path, field",
    [
        (CHAT, "reasoning_effort"),
        (RESPONSES, "reasoning.effort"),
        (MESSAGES, "output_config.effort"),
        (OLLAMA_CHAT, "think"),
        (OLLAMA_GENERATE, "think"),
    ],
)
def test_efforts_reach_the_template_or_are_listed(
    client: Client, path: str, field: str, effort: str
) -> None:
    name, _, part = field.partition(".")
    value = {part: effort} if part else effort

    def found(client: Client) -> dict[str, Any]:
        body = {**request(path, "abc", 4), "stream": False, name: value}
        response = client.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    assert found(client)["anydecode"]["ignored"] == [field]
    with answering(b"yes", TemplateTokenizer(EFFORT)) as llm, served(llm) as other:
        answer = found(other)
        usage = answer.get("usage", answer)
        names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
        assert next(usage[one] for one in names if one in usage) == len(f"abc effort: {effort}")
        assert "ignored" not in answer["anydecode"]


def test_other_efforts_are_refused(client: Client) -> None:
    for path, fields in (
        (CHAT, {"reasoning_effort": "huge"}),
        (RESPONSES, {"reasoning": {"effort": "huge"}}),
        (MESSAGES, {"output_config": {"effort": "huge"}}),
        (OLLAMA_CHAT, {"think": "huge"}),
    ):
        response = client.http.post(path, json={**request(path, "abc", 4), **fields})
        assert response.status_code == 400 and "'low'" in str(response.json()["error"])


URL = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    "path, part",
    [
        (CHAT, {"type": "image_url", "image_url": {"url": URL}}),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
        (CHAT, {"type": "file", "file": {"file_data": "AA==", "filename": "a.pdf"}}),
        (RESPONSES, {"type": "input_image", "image_url": URL, "detail": "auto"}),
        (RESPONSES, {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
        (RESPONSES, {"type": "input_file", "file_data": "AA==", "filename": "a.pdf"}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": "AA=="}}),
        (MESSAGES, {"type": "document", "source": {"type": "base64", "data": "AA=="}}),
        (MESSAGES, {"type": "search_result", "source": "a", "title": "b", "content": []}),
    ],
)
def test_parts_that_are_no_text_are_refused(
    client: Client, path: str, part: dict[str, Any]
) -> None:
    texts = {CHAT: "text", RESPONSES: "input_text", MESSAGES: "text"}
    content = [{"type": texts[path], "text": "What is this?"}, part]
    response = client.http.post(path, json=request(path, content, 4))
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert repr(part["type"]) in message and "text" in message and "\n" not in message
    is_streamed = {**request(path, content, 4), "stream": True}
    assert client.http.post(path, json=is_streamed).status_code == 400


@pytest.mark.parametrize("path", OLLAMA)
def test_images_for_ollama_are_refused(client: Client, path: str) -> None:
    body = request(path, "abc", 4)
    (body["messages"][0] if path == OLLAMA_CHAT else body)["images"] = ["AA=="]
    response = client.http.post(path, json=body)
    assert response.status_code == 400 and "text only" in response.json()["error"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_cached_tokens_of_several_samples_are_those_of_one_prompt(path: str) -> None:
    long = "a prompt that is long enough to fill several blocks of the cache. " * 3
    with scripted_llm() as llm, served(llm) as client:
        found = []
        for count in (3, 3, 1):
            options: dict[str, Any] = {"n": count, "temperature": 1.0, "decoder": "autoregressive"}
            usage = client.ask(path, long, **options)["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        length = usage["prompt_tokens"]
        assert found == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]


THOUGHT = "<|channel|>analysis<|message|>Hm. Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("has_call", [False, True])
def test_reasoning_tokens_of_gpt_oss_are_counted(has_call: bool) -> None:
    call = TOOL_FORMATS["gpt-oss"].render([("go", {})])
    rest = call if has_call else "<|channel|>final<|message|>Hi"
    function: dict[str, Any] = {"name": "go", "parameters": {"type": "object", "properties": {}}}
    tools: dict[str, Any] = {
        CHAT: {"type": "function", "function": function},
        RESPONSES: {"type": "function", **function},
        MESSAGES: {"name": "go", "input_schema": function["parameters"]},
    }
    with replaying_llm(THOUGHT + rest) as llm, served(llm, tool_parser="gpt-oss") as client:
        counts = []
        for path, tool in tools.items():
            fields = {"tools": [tool]} if has_call else {}
            body = {**request(path, "abc", 200, temperature=0), **fields}
            response = client.http.post(path, json=body)
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            names = ("completion_tokens_details", "output_tokens_details")
            [details] = [usage[name] for name in names if name in usage]
            counts += details.values()
        # As in the other formats, up to the text that ends the reasoning.
        assert counts == [len(THOUGHT.partition("<|end|>")[0])] * 3


def test_a_logits_processor_of_another_package_is_served(tmp_path: Path) -> None:
    """The example of the documentation, installed with its entry point."""
    page = (DOCS / "extend" / "logits-processor.md").read_text()
    code = page.partition('```python title="no_echo.py"\n')[2].partition("```")[0]
    (tmp_path / "no_echo.py").write_text(code)
    info = tmp_path / "no_echo-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-echo\nVersion: 0.1\n")
    points = "[anydecode.decoders]\nno-echo = no_echo:no_echo\n"
    (info / "entry_points.txt").write_text(points)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "anydecode", "serve", "tiny-autoregressive", "--port", "0",
         "--allow-logits-processor", "no-echo:penalty=50", "--tool-parser", "mistral"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        written = ""
        while not (found := re.search(r"running on (http://[0-9.:]+)", written)):
            line = process.stderr.readline()
            assert line, written
            written += line
        threading.Thread(target=process.stderr.read, daemon=True).start()
        with httpx.Client(base_url=found[1], timeout=60, trust_env=False) as http:
            client = Client(http)
            options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "logprobs": 0}
            options["logit_bias"] = {"97": 30.0}
            plain = client.ask(COMPLETIONS, "ab", **options)["choices"][0]
            names = ["no-echo:penalty=50"]
            answer = client.ask(COMPLETIONS, "ab", **options, logits_processors=names)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            assert len(set(plain["logprobs"]["tokens"])) == 1
            assert all(one != next_one for one, next_one in zip(tokens, tokens[1:], strict=False))
            refused = client.refused(COMPLETIONS, logits_processors=["no-echo"])
            assert "may not name the logits processor 'no-echo'" in refused["message"]
    finally:
        process.kill()
        process.wait()
