"""Logits processors that requests name: only those that the operator allows, with every decoder and
on every API, with the text of the processor object in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode import LLM, Candidates, Card, LogitsProcessor, SamplerPreset, catalogue  # noqa: E402
from anydecode.catalogue import Range  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, body, served  # noqa: E402


class Without(LogitsProcessor):
    """Removes one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def apply(self, candidates: Candidates) -> Candidates:
        index, _ = candidates.positions(np.array([self.token]))
        candidates.writable()[index] = -np.inf
        return candidates


def preset(key: str, **remote: Range) -> Any:
    """Registers a sampler that removes a token."""

    @catalogue.register(Card(key, "sampling", paper="a test", exactness="lossy", remote=remote))
    def build(token: int = 97) -> SamplerPreset:
        processors = {"logits_processors": [Without(token)]}
        return SamplerPreset(key, processors, needs_temperature=False)

    return build


KEYS = ("without", "without-closed", "without-other")


@pytest.fixture(scope="module", autouse=True)
def presets() -> Iterator[None]:
    catalogue.entries()
    preset("without", token=Range(0, 200))
    for key in KEYS[1:]:
        preset(key)
    yield
    for key in KEYS:
        catalogue.entries().pop(key)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM, presets: None) -> Iterator[Client]:
    allowed = ("without", "without-closed:token=98", "prompt-lookup", "mirostat")
    with served(llm, allowed_logits_processors=allowed) as client:
        yield client


OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 4}


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup", "auto"])
def test_the_text_is_that_of_the_object_in_python(client: Client, llm: LLM, decoder: str) -> None:
    plain = llm.generate("the cat", **OPTIONS)
    token = plain.tokens[2]
    processor = Without(token)
    expected = llm.generate("the cat", **OPTIONS, logits_processors=[processor])
    answer = client.ask(
        COMPLETIONS,
        "the cat",
        **OPTIONS,
        decoder=decoder,
        logits_processors=[f"without:token={token}"],
    )
    assert answer["choices"][0]["text"] == expected.text != plain.text


def test_several_processors_run_together(client: Client, llm: LLM) -> None:
    expected = llm.generate("ab", **OPTIONS, logits_processors=[Without(101), Without(98)])
    names = ["without:token=101", "without-closed:token=98"]
    answer = client.ask(COMPLETIONS, "ab", **OPTIONS, logits_processors=names)
    assert answer["choices"][0]["text"] == expected.text
    assert client.ask(COMPLETIONS, "ab", **OPTIONS, logits_processors=["mirostat", "without"])
    none = client.ask(COMPLETIONS, "ab", **OPTIONS, logits_processors=[])
    assert none["choices"][0]["text"] == llm.generate("ab", **OPTIONS).text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages", "/api/generate"])
def test_every_api_accepts_allowed_processors(client: Client, path: str) -> None:
    for name, status in (("without", 200), ("without-other", 400)):
        request = body(CHAT if path == "/v1/messages" else path, logits_processors=[name])
        if path == "/api/generate":
            request = {"prompt": "a", "stream": False, "options": {"logits_processors": [name]}}
        answer = client.http.post(path, json=request)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "names, message",
    [
        (["without-other"], "may not name the logits processor 'without-other'; allowed are"),
        (["without-closed"], "may not name the logits processor 'without-closed'"),
        (["without-closed:token=99"], "may not name the logits processor"),
        (["without:token=300"], "requests to a server may set 0 to 200"),
        (["without:tokens=3"], "has no parameter 'tokens'"),
        (["prompt-lookup"], "prompt-lookup"),
        (["no-such"], "may not name the logits processor 'no-such'"),
        (["without"] * 17, "at most 16 items"),
        ("without", "logits_processors must be a list"),
        ([1], "logits_processors.0 must be a string, not 1"),
    ],
)
def test_other_processors_are_refused_in_one_line(client: Client, names: Any, message: str) -> None:
    error = client.refused(COMPLETIONS, logits_processors=names)
    assert message in error["message"] and "\n" not in error["message"]
    assert error["param"].startswith("logits_processors")


def test_a_server_allows_none_by_default(llm: LLM) -> None:
    with served(llm) as client:
        error = client.refused(COMPLETIONS, logits_processors=["without"])
        assert "it allows none (--allow-logits-processor)" in error["message"]
