"""Adapters that requests load and unload."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from adapter_files import save_adapter  # noqa: E402
from anydecode import LLM  # noqa: E402
from anydecode.certification.tiny import tiny_llm  # noqa: E402
from anydecode.models.pooling import Pooling  # noqa: E402
from anydecode.server import embeddings  # noqa: E402
from anydecode.server.preparation import Preparation  # noqa: E402
from anydecode.server.run import ServerRun  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, served  # noqa: E402


@pytest.fixture
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        save_adapter(tmp_path / "adapters" / f"lora-{seed}", seed)
    save_adapter(tmp_path / "outside", 4)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "adapters" / "empty").mkdir()
    return tmp_path / "adapters"


@pytest.fixture
def client(llm: LLM, folder: Path) -> Iterator[Client]:
    with served(llm, adapter_folder=folder, max_adapters=2) as client:
        yield client


def posted(client: Client, action: str, name: str, path: str | None = None) -> tuple[int, Any]:
    body = {"lora_name": name} | ({} if path is None else {"lora_path": path})
    answer = client.http.post(f"/v1/{action}_lora_adapter", json=body)
    return answer.status_code, answer.json()


def text(client: Client, **fields: Any) -> str:
    fields = {"max_tokens": 16, "ignore_eos": True, "temperature": 0, **fields}
    answer = client.ask(COMPLETIONS, "the cat sat ", **fields)
    found: str = answer["choices"][0]["text"]
    return found


def test_adapters_are_loaded_listed_and_unloaded(client: Client, folder: Path) -> None:
    assert posted(client, "load", "a", "lora-1")[0] == 200
    models = client.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in models] == [("scripted", None), ("a", "scripted")]
    with tiny_llm() as alone:
        alone.add_adapter("x", folder / "lora-1")
        expected = alone.generate("the cat sat ", max_tokens=16, ignore_eos=True, adapter="x").text
    assert text(client, model="a") == expected != text(client)
    for path in (COMPLETIONS, CHAT, RESPONSES):
        for name in ("a", "scripted"):
            fields: dict[str, Any] = {"model": name, "temperature": 0}
            assert client.ask(path, **fields)["model"] == name
    assert posted(client, "unload", "a")[0] == 200
    assert client.http.post(COMPLETIONS, json={"prompt": "a", "model": "a"}).status_code == 404
    assert posted(client, "unload", "a")[0] == 404


def test_a_request_whose_adapter_is_unloaded_while_it_is_prepared_is_a_404(
    llm: LLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had come later. Rejects a 400, by which clients would correct the request."""
    assert posted(client, "load", "a", "lora-1")[0] == 200
    encode = Preparation.encode

    async def unload_and_encode(*arguments: Any, **options: Any) -> list[int]:
        llm.remove_adapter("a")
        return await encode(*arguments, **options)

    monkeypatch.setattr(Preparation, "encode", unload_and_encode)
    answer = client.http.post(COMPLETIONS, json={"prompt": "b", "model": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_all_texts_of_a_request_have_the_adapter_that_it_began_with(
    llm: LLM, client: Client, folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one gets its name after each part of the texts. Rejects a look-up for each part."""
    monkeypatch.setattr(embeddings, "MAX_AT_ONCE", 2)
    monkeypatch.setattr(llm.model, "pooling", Pooling(), raising=False)  # for scores
    texts = [f"text {number}" for number in range(5)]
    body: dict[str, Any] = {"model": "a", "input": texts}
    if path == "/v1/score":
        body = {"model": "a", "text_1": texts, "text_2": texts[::-1]}
    assert posted(client, "load", "a", "lora-1")[0] == 200
    expected = client.http.post(path, json=body).json()["data"]
    wait, numbers = ServerRun.wait_for_generations, iter([2, 3] * len(texts))

    async def wait_and_replace(*arguments: Any) -> Any:
        llm.remove_adapter("a")
        llm.add_adapter("a", folder / f"lora-{next(numbers)}")
        return await wait(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ServerRun, "wait_for_generations", wait_and_replace)
        assert client.http.post(path, json=body).json()["data"] == expected
    assert client.http.post(path, json=body).json()["data"] != expected


def test_an_adapter_is_unloaded_beside_one_that_is_being_loaded(
    llm: LLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile. Rejects an event loop that waits for the loading."""
    assert posted(client, "load", "a", "lora-1")[0] == 200
    is_loading, may_end = threading.Event(), threading.Event()
    load = llm.model.add_adapter

    def held(path: Path) -> int:
        is_loading.set()
        assert may_end.wait(60)
        return load(path)

    monkeypatch.setattr(llm.model, "add_adapter", held)
    with ThreadPoolExecutor(2) as threads:
        loaded = threads.submit(posted, client, "load", "b", "lora-2")
        assert is_loading.wait(60)
        unloaded = threads.submit(posted, client, "unload", "a")
        try:
            for _ in range(20):  # the server has begun to unload it at one of them
                assert client.http.get("/v1/models", timeout=30).status_code == 200
        finally:
            may_end.set()
        assert (loaded.result()[0], unloaded.result()[0]) == (200, 200)
    assert llm.adapters == ["b"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("a", "../outside", "not a folder inside"),
        ("a", "link", "not a folder inside"),
        ("a", "/etc", "not a folder inside"),
        ("a", ".", "not a folder inside"),
        ("a", "none", "not a folder inside"),
        ("a", "a\0b", "not a folder inside"),
        ("a", "empty", "empty: adapter_config.json is missing"),
        ("scripted", "lora-1", "already a model called 'scripted'"),
        ("", "lora-1", "lora_name"),
    ],
)
def test_invalid_loads_are_refused(
    client: Client, folder: Path, name: str, path: str, message: str
) -> None:
    status, answer = posted(client, "load", name, path)
    assert status == 400 and message in answer["error"]["message"]
    assert str(folder) not in answer["error"]["message"]


def test_the_number_of_adapters_is_limited(client: Client) -> None:
    for number in (1, 2):
        assert posted(client, "load", f"a{number}", f"lora-{number}")[0] == 200
    assert posted(client, "load", "a1", "lora-3")[0] == 400
    status, answer = posted(client, "load", "a3", "lora-3")
    assert status == 400 and "this server allows 2" in answer["error"]["message"]
    assert posted(client, "unload", "a1")[0] == 200
    assert posted(client, "load", "a3", "lora-3")[0] == 200


def test_without_a_folder_requests_change_no_adapters(llm: LLM, folder: Path) -> None:
    llm.add_adapter("a", folder / "lora-1")
    with served(llm) as client:
        assert posted(client, "load", "b", "lora-2")[0] == 403
        assert posted(client, "unload", "a")[0] == 403
        assert text(client, model="a")
