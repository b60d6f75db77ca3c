"""Open WebUI itself, where `open-webui` is installed: connections of both kinds to the server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anydecode import LLM

PROGRAM = shutil.which("open-webui")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs open-webui on the path")
MODEL = "smollm2-135m-instruct"
ASK = [{"role": "user", "content": "Name a city."}]
#: How long the program may take to start, in seconds.
START_SECONDS = 240


def settings(root: str, folder: Path) -> dict[str, str]:
    """The variables with which the program uses the server alone, without accounts."""
    return {
        "DATA_DIR": str(folder),
        "OFFLINE_MODE": "true",
        "WEBUI_AUTH": "false",
        "WEBUI_SECRET_KEY": "none",
        "OPENAI_API_BASE_URLS": f"{root}/v1",
        "OPENAI_API_KEYS": "none",
        "OLLAMA_BASE_URLS": root,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_OPENAI_API_BASE_URL": f"{root}/v1",
        "RAG_OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_MODEL": MODEL,
    }


def wait_until_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS):
        assert process.poll() is None, log.read_text()
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(f"Open WebUI did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def http(root: str, tmp_path_factory: Any) -> Iterator[httpx.Client]:
    """A client of the program's own API, which its page uses."""
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env={**os.environ, **settings(root, folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            wait_until_ready(http, process, log)
            user = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
            http.headers["authorization"] = f"Bearer {user['token']}"
            yield http
    finally:
        process.terminate()
        process.wait(30)


def sent(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_models_of_both_connections_are_listed(http: httpx.Client) -> None:
    owners = {one["id"]: one["owned_by"] for one in http.get("/api/models").json()["data"]}
    assert owners == {MODEL: "openai", f"{MODEL}:latest": "ollama"}


def test_a_chat_and_its_stream_are_the_engine(http: httpx.Client, llm: LLM) -> None:
    body = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 12}
    alone = llm.chat(ASK, max_tokens=12)
    found = sent(http, "/api/chat/completions", **body, stream=False)
    assert found["choices"][0]["message"]["content"] == alone.text
    answer = http.post("/api/chat/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
    assert "".join(delta.get("content") or "" for delta in deltas) == alone.text


def test_a_chat_through_ollamas_api_is_the_engine(http: httpx.Client, llm: LLM) -> None:
    options = {"temperature": 0, "num_predict": 12}
    body = {"model": f"{MODEL}:latest", "messages": ASK, "options": options, "stream": False}
    found = sent(http, "/ollama/api/chat", **body)
    assert found["message"]["content"] == llm.chat(ASK, max_tokens=12).text


def test_embeddings_are_those_of_the_engine(http: httpx.Client, llm: LLM) -> None:
    expected = pytest.approx(llm.embed("Rome"), abs=1e-4)
    found = sent(http, "/api/embeddings", model=MODEL, input=["Rome"])
    assert found["data"][0]["embedding"] == expected
    found = sent(http, "/ollama/api/embed", model=f"{MODEL}:latest", input=["Rome"])
    assert found["embeddings"][0] == expected


def test_an_error_is_shown_in_the_servers_words(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": ASK, "stream": False, "temperature": -1}
    answer = http.post("/api/chat/completions", json=body)
    assert answer.status_code == 400
    assert "temperature must be between 0 and 100" in answer.json()["error"]["message"]
