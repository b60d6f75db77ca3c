"""A scripted model and a client of its server, one of each per file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from server_client import Client, served


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with served(llm) as client:
        yield client
