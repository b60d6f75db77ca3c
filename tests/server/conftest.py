"""A scripted model and a client of its server, one of each per file of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from server_client import Client, served


@pytest.fixture(scope="session", autouse=True)
def servers_stop_at_once() -> Iterator[None]:
    """uvicorn looks every 0.1 s whether to stop, and waits as long again when it does."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))

    with pytest.MonkeyPatch.context() as patch:
        names = {**vars(asyncio), "sleep": sleep}
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**names))
        yield


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with served(llm) as client:
        yield client
