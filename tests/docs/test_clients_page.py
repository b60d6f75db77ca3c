"""The page of clients names exactly the clients that are tested, in the pinned versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.app import create_app  # noqa: E402

NAMES = re.compile(r"`(.+?)`")

#: By package or program: the file of its tests, where that has another name.
FILES = {
    "@continuedev/openai-adapters": "continue",
    "Continue": "continue",
    "Open WebUI": "open_webui",
    "inspect-ai": "inspect",
    "langchain-openai": "langchain",
    "llama-index-llms-openai-like": "llama_index",
    "openai-agents": "agents_sdk",
    "pydantic-ai-slim": "pydantic_ai",
}
#: By endpoint: the calls of clients that reach it. Programs whose requests are sent are known by
#: its path.
CALLS = {
    "/v1/chat/completions": (
        "client.chat.completions.",
        "chat.completions.create(",
        "langchain_openai.ChatOpenAI(",
        "agents.OpenAIChatCompletionsModel",
        "OpenAIChatModel(",
        "litellm.completion(",
        "model.chat(",
        "dspy.LM(",
        "openai-api/",
        "api.chatCompletionNonStream(",
        "openai:chat:",
    ),
    "/v1/completions": (
        "client.completions.create(",
        "langchain_openai.OpenAI(",
        "litellm.text_completion(",
        "plain.complete(",
        "{url}/completions",
        "api.completionStream(",
        "openai:completion:",
    ),
    "/v1/fim/completions": ("api.fimStream(",),
    "/v1/responses": (
        "agents.OpenAIResponsesModel",
        "client.responses.create(",
        "openai:responses:",
    ),
    "/v1/responses/input_tokens": ("client.responses.input_tokens.",),
    "/v1/responses/{response_id}": ("client.responses.retrieve(",),
    "/v1/responses/{response_id}/cancel": ("client.responses.cancel(",),
    "/v1/responses/{response_id}/input_items": ("client.responses.input_items.",),
    "/v1/embeddings": (
        "embeddings.create(",
        "langchain_openai.OpenAIEmbeddings(",
        "OpenAIEmbeddingModel(",
        "litellm.embedding(",
        "dspy.Embedder(",
        "api.embed(",
        "openai:embedding:",
    ),
    "/v1/files": ("client.files.create(",),
    "/v1/files/{file_id}": ("client.files.retrieve(",),
    "/v1/files/{file_id}/content": ("client.files.content(",),
    "/v1/batches": ("client.batches.create(",),
    "/v1/batches/{batch_id}": ("client.batches.retrieve(",),
    "/v1/batches/{batch_id}/cancel": ("client.batches.cancel(",),
    "/v1/models": ("models.list()", "api.list()"),
    "/v1/models/{name}": ("client.models.retrieve(",),
    "/v1/messages": (
        "client.messages.create(",
        "anthropic:messages:",
        'provider == "anthropic"',  # litellm's
    ),
    "/v1/messages/count_tokens": ("client.messages.count_tokens(",),
    "/tokenizer_info": ('"tokenizer_backend": "remote"',),
    "/api/chat": ("client.chat(", "ollama:chat:", '"ollama_chat"'),
    "/api/generate": ("client.generate(", "ollama:completion:"),
    "/api/embed": ("client.embed(",),
    "/api/embeddings": ("client.embeddings(",),
    "/api/tags": ("client.list(",),
    "/api/ps": ("client.ps(",),
    "/api/show": ("client.show(",),
}
PROGRAMS = "By program whose requests are sent"


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cells(page: str, heading: str, column: int) -> list[str]:
    return [row[column].strip("`") for row in rows(page, heading)]


def file_of_tests(repository: Path, name: str) -> Path:
    """The file of the tests of a client or program."""
    name = FILES.get(name, name.replace("-", "_"))
    return repository / f"tests/clients/test_{name}.py"


def test_the_page_has_every_tested_client(repository: Path) -> None:
    page = (repository / "docs/guides/clients.md").read_text("utf-8")
    pins = "".join(
        (repository / f"constraints-{name}.txt").read_text("utf-8")
        for name in ("clients", "inspect")
    )
    for file in (repository / "tests/clients").glob("*/package.json"):
        for name, version in json.loads(file.read_text("utf-8"))["dependencies"].items():
            pins += f"\n{name}=={version}\n"
    listed = {repository / "tests/clients/test_open_webui_program.py"}  # run where it is installed
    for package, version, *_ in rows(page, "By client"):
        package = package.strip("`")
        listed.add(file_of_tests(repository, package))
        assert f"\n{package}=={version}\n" in pins, package
    listed |= {file_of_tests(repository, program) for program in cells(page, PROGRAMS, 0)}
    assert listed == set((repository / "tests/clients").glob("test_*.py"))


def test_the_page_has_the_endpoints_that_each_client_uses(repository: Path) -> None:
    page = (repository / "docs/guides/clients.md").read_text("utf-8")
    packages, programs = cells(page, "By client", 0), cells(page, PROGRAMS, 0)
    texts = {
        name: file_of_tests(repository, name).read_text("utf-8") for name in (*packages, *programs)
    }
    texts["openai"] += (repository / "tests/server/test_openai_client.py").read_text("utf-8")
    for endpoints, _, clients in rows(page, "By endpoint"):
        users = set()
        for endpoint in NAMES.findall(endpoints):
            users |= {
                name
                for name in packages
                if any(call in texts[name] for call in CALLS.get(endpoint, ()))
            }
            users |= {name for name in programs if f'"{endpoint}"' in texts[name]}
        assert set(NAMES.findall(clients)) == users, endpoints


def test_the_page_has_every_endpoint(repository: Path) -> None:
    page = (repository / "docs/guides/clients.md").read_text("utf-8")
    listed = [name for row in rows(page, "By endpoint") for name in NAMES.findall(row[0])]
    with scripted_llm() as llm:
        served = create_app(llm).app.openapi()["paths"]
    assert sorted(listed) == sorted(served)
