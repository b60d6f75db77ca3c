"""Servers of the default model, for client libraries as their users have them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anydecode import LLM
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

MODEL = "smollm2-135m-instruct"
#: Settings of libraries that would otherwise report to, or ask, other machines. They are read at
#: import, and no other test depends on them.
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
}
os.environ.update(OFFLINE)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/clients/"):
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, Settings(name=MODEL, port=0)) as server:
        yield server


@pytest.fixture(scope="session")
def root(server: LiveServer) -> str:
    """The address of the server."""
    return server.url


@pytest.fixture(scope="session")
def url(root: str) -> str:
    """The address of OpenAI's API."""
    return f"{root}/v1"


@pytest.fixture(scope="session")
def keyed_url(llm: LLM) -> Iterator[str]:
    """The address of OpenAI's API on a server that wants the key "secret"."""
    settings = Settings(name=MODEL, port=0, api_keys=("secret",))
    with LiveServer(llm, settings) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def tokenizer(llm: LLM, tmp_path: Path) -> str:
    """The model's tokenizer in a folder that transformers opens."""
    transformers = pytest.importorskip("transformers")
    inner: Any = llm.tokenizer
    (eos,) = [inner.token_text(token) for token in inner.eos_ids][:1]
    folder = str(tmp_path / "tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner.backend, bos_token=inner.token_text(inner.bos_id), eos_token=eos
    ).save_pretrained(folder)
    return folder
