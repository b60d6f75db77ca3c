"""The page of clients names exactly the clients that are tested, in the pinned versions."""

from __future__ import annotations

import re
from pathlib import Path

#: By package: the file of its tests, where that has another name.
FILES = {
    "langchain-openai": "langchain",
    "llama-index-llms-openai-like": "llama_index",
    "openai-agents": "agents_sdk",
    "pydantic-ai-slim": "pydantic_ai",
}
#: By endpoint: the calls of clients that reach it.
CALLS = {
    "/v1/chat/completions": (
        "chat.completions.",
        "langchain_openai.ChatOpenAI(",
        "agents.OpenAIChatCompletionsModel",
        "OpenAIChatModel(",
        "litellm.completion(",
        "model.chat(",
        "dspy.LM(",
    ),
    "/v1/completions": (
        "client.completions.create(",
        "langchain_openai.OpenAI(",
        "litellm.text_completion(",
        "plain.complete(",
        "{url}/completions",
    ),
    "/v1/responses": ("agents.OpenAIResponsesModel",),
    "/v1/embeddings": (
        "embeddings.create(",
        "langchain_openai.OpenAIEmbeddings(",
        "OpenAIEmbeddingModel(",
        "litellm.embedding(",
        "dspy.Embedder(",
    ),
    "/v1/files": ("client.files.create(",),
    "/v1/batches": ("client.batches.create(",),
    "/v1/models": ("models.list()",),
    "/v1/messages": ("client.messages.create(",),
    "/v1/messages/count_tokens": ("client.messages.count_tokens(",),
    "/api/chat": ("client.chat(",),
    "/api/generate": ("client.generate(",),
    "/api/embed": ("client.embed(",),
    "/api/embeddings": ("client.embeddings(",),
    "/api/tags": ("client.list(",),
    "/api/show": ("client.show(",),
}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_tested_client(repository: Path) -> None:
    page = (repository / "docs/guides/clients.md").read_text("utf-8")
    pins = (repository / "constraints-clients.txt").read_text("utf-8")
    tests = repository / "tests/clients"
    listed = set()
    for package, version, *_ in rows(page, "By client"):
        package = package.strip("`")
        listed.add(tests / f"test_{FILES.get(package, package.replace('-', '_'))}.py")
        assert f"\n{package}=={version}\n" in pins, package
    assert listed == set(tests.glob("test_*.py"))


def test_the_page_has_the_endpoints_that_each_client_uses(repository: Path) -> None:
    page = (repository / "docs/guides/clients.md").read_text("utf-8")
    packages = [cells[0].strip("`") for cells in rows(page, "By client")]
    for endpoint, clients in rows(page, "By endpoint"):
        users = set()
        for package in packages:
            name = FILES.get(package, package.replace("-", "_"))
            text = (repository / f"tests/clients/test_{name}.py").read_text("utf-8")
            if any(call in text for call in CALLS[endpoint.strip("`")]):
                users.add(package)
        assert set(re.findall(r"`(.+?)`", clients)) == users, endpoint
