"""Several models in one server: loaded when a request names them, unloaded within a memory budget
or when idle, never while a request uses them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import httpx  # noqa: E402

from adapter_files import save_adapter  # noqa: E402
from anydecode import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.certification.tiny import tiny_llm  # noqa: E402
from anydecode.cli.serve import named_model  # noqa: E402
from anydecode.errors import CheckpointError, InvalidRequestError  # noqa: E402
from anydecode.server.errors import ApiError  # noqa: E402
from anydecode.server.models import ServedModel, ServedModels, files_bytes  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, body, events  # noqa: E402

WAIT = 30
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
#: A request that goes on until it is cancelled.
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "decoder": "autoregressive"}


class Loader:
    """Loads a scripted model of one seed, counts that, and keeps weak references to the results."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loaded: list[weakref.ref[LLM]] = []
        self.error: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()

    def __call__(self) -> LLM:
        assert self.may_load.wait(WAIT)
        if self.error is not None:
            raise self.error
        llm = scripted_llm(seed=self.seed)
        self.loaded.append(weakref.ref(llm))
        return llm

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.loaded)


class Router:
    """A server of the models "a", "b" and "c", each of 100 bytes; "a" is loaded."""

    def __init__(self, http: httpx.Client, models: ServedModels, loaders: dict[str, Loader]):
        self.http = http
        self.models = models
        self.loaders = loaders
        self.client = Client(http)

    def text(self, model: str | None = None, **fields: Any) -> str:
        named = {} if model is None else {"model": model}
        answer = self.client.ask(COMPLETIONS, "the cat ", **GREEDY, **named, **fields)
        found: str = answer["choices"][0]["text"]
        return found

    def status(self) -> dict[str, str]:
        entries = self.http.get("/v1/models").json()["data"]
        return {one["id"]: one["status"]["value"] for one in entries}

    def loaded(self) -> list[str]:
        return [name for name, status in self.status().items() if status == "loaded"]


@contextmanager
def router(
    monkeypatch: pytest.MonkeyPatch, *, reload: bool = True, **options: Any
) -> Iterator[Router]:
    monkeypatch.setattr("anydecode.server.models.memory_of", lambda llm: 100)
    loaders = {name: Loader(seed) for seed, name in enumerate("abc", 1)}
    others = [ServedModel(name, loaders[name], 100) for name in "bc"]
    models = ServedModels(
        loaders["a"](),
        Settings(name="a", port=0),
        others,
        reload=loaders["a"] if reload else None,
        **options,
    )
    try:
        with (
            LiveServer(models) as server,
            httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
        ):
            yield Router(http, models, loaders)
    finally:
        models.close()


def alone(seed: int) -> str:
    with scripted_llm(seed=seed) as llm:
        return llm.generate("the cat ", **GREEDY).text


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_model_answers_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        assert one.status() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        texts = {name: one.text(name) for name in "abc"}
        assert texts == {"a": alone(1), "b": alone(2), "c": alone(3)}
        assert len(set(texts.values())) == 3
        assert one.text() == texts["a"]
        assert one.loaded() == ["a", "b", "c"]
        assert one.client.ask(CHAT, **GREEDY, model="b")["model"] == "b"
        refused = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="d"))
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith("available: a, b, c")
        assert len(one.loaders["b"].loaded) == 1


def test_every_api_reaches_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    question = [{"role": "user", "content": "abc"}]
    with router(monkeypatch) as one:
        chat = one.client.ask(CHAT, "abc", **GREEDY, model="b")["choices"][0]["message"]["content"]
        assert chat != one.client.ask(CHAT, "abc", **GREEDY)["choices"][0]["message"]["content"]
        fields = {"temperature": 0, "ignore_eos": True, "model": "b"}
        response = one.client.ask(RESPONSES, "abc", **{**fields, "max_output_tokens": 12})
        assert response["output"][0]["content"][0]["text"] == chat
        assert response["model"] == "b"
        options = {"temperature": 0, "num_predict": 12, "ignore_eos": True}
        ollama = {"model": "b:latest", "messages": question, "stream": False, "options": options}
        assert one.http.post("/api/chat", json=ollama).json()["message"]["content"] == chat
        message = {"model": "b", "messages": question, "max_tokens": 12, "temperature": 0}
        answer = one.http.post("/v1/messages", json=message)
        assert answer.status_code == 200 and answer.json()["model"] == "b"
        for path in ("/live", "/decoders"):
            assert one.http.get(path, params={"model": "c"}).status_code == 200
            assert one.http.get(path, params={"model": "d"}).status_code == 404
        assert one.http.get("/v1/models/c").json()["status"] == {"value": "loaded"}


def test_simultaneous_requests_load_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        loader = one.loaders["b"]
        loader.may_load.clear()
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(one.text("b"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: one.status()["b"] == "loading")
        assert one.text("a") == alone(1)  # others go on
        loader.may_load.set()
        for thread in threads:
            thread.join(WAIT)
        assert texts == [alone(2)] * 4
        assert len(loader.loaded) == 1


@pytest.mark.slow
def test_the_least_recently_used_model_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, memory_budget=200) as one:
        one.text("b")
        one.text("a")
        assert one.text("c") == alone(3)
        assert one.loaded() == ["a", "c"]
        assert one.loaders["b"].num_alive == 0  # its memory is free
        assert one.text("b") == alone(2)
        assert one.loaded() == ["b", "c"]  # also the first model goes
        assert one.text() == alone(1)  # and comes back
        assert one.loaded() == ["a", "b"]


def test_a_model_in_use_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, memory_budget=100) as one:
        with one.http.stream(
            "POST", COMPLETIONS, json=body(COMPLETIONS, **{**LONG, "stream": True})
        ) as answer:
            received = events(answer.iter_lines())
            next(received)
            refused = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b"))
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            error = refused.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert "'b' is not loaded, and there is no memory for it" in error["message"]
            next(received)  # the stream goes on
        until(lambda: one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b")).is_success)
        assert one.loaded() == ["b"]


def test_a_response_in_the_background_keeps_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"ignore_eos": True, "decoder": "autoregressive", "max_output_tokens": 3000}
    with router(monkeypatch, memory_budget=100) as one:
        asked = body(RESPONSES, **fields) | {"background": True}
        identity = one.http.post(RESPONSES, json=asked).json()["id"]
        busy = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b"))
        assert busy.status_code == 503
        assert one.http.post(f"{RESPONSES}/{identity}/cancel").json()["status"] == "cancelled"
        until(lambda: one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b")).is_success)


@pytest.mark.slow
def test_idle_models_are_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, idle_seconds=0.05) as one:
        one.text("b")
        until(lambda: not one.loaded())
        until(lambda: one.loaders["a"].num_alive == one.loaders["b"].num_alive == 0)
        assert one.http.get("/live").json()["status"] == "unloaded"
        assert one.http.get("/health").status_code == 200
        assert one.text() == alone(1)


def test_a_model_that_cannot_be_loaded_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        one.loaders["b"].error = CheckpointError("/secret/b.gguf is corrupt")
        failed = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b"))
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the model 'b' could not be loaded"
        assert one.text() == alone(1)
        assert one.status()["b"] == "unloaded"
        one.loaders["b"].error = None  # the operator has replaced the file
        assert one.text("b") == alone(2)


def test_ollama_lists_and_unloads_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        one.text("b")

        def names(path: str) -> list[str]:
            return [entry["name"] for entry in one.http.get(path).json()["models"]]

        assert names("/api/tags") == ["a:latest", "b:latest", "c:latest"]
        assert names("/api/ps") == ["a:latest", "b:latest"]
        answer = one.http.post("/api/generate", json={"model": "b", "keep_alive": 0}).json()
        assert answer["done_reason"] == "unload"
        until(lambda: names("/api/ps") == ["a:latest"])
        generated = {"model": "a", "prompt": "abc", "keep_alive": "0", "stream": False}
        answer = one.http.post("/api/generate", json={**generated, "options": {"num_predict": 3}})
        assert "ignored" not in answer.json()["anydecode"]
        until(lambda: names("/api/ps") == [])
        assert one.http.post("/api/show", json={"model": "c"}).status_code == 200
        assert names("/api/ps") == ["c:latest"]


def test_metrics_have_the_name_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        one.text("b")
        found = one.client.metrics()
        assert found['anydecode_engine_up{model="a"}'] == 1
        assert found['anydecode_passes_total{model="b",runner="target"}'] > 0
        assert found['anydecode_passes_total{model="a",runner="target"}'] == 0
        assert found['anydecode_runner_info{model="b",name="scripted",runner="draft"}'] == 1


def test_an_engine_that_stops_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch) as one:
        one.text("b")
        llm = one.loaders["b"].loaded[0]()
        assert llm is not None

        def fail() -> bool:
            raise MemoryError("none is left")

        monkeypatch.setattr(llm.engine, "step", fail)
        failed = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b"))
        assert failed.status_code == 503
        assert one.http.get("/health").status_code == 503


def test_adapters_of_an_unloaded_model_come_back(tmp_path: Path) -> None:
    save_adapter(tmp_path / "lora", 1)
    settings = Settings(name="tiny", port=0, adapter_folder=tmp_path)
    models = ServedModels(tiny_llm(), settings, reload=tiny_llm, idle_seconds=0.05)
    fields = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, "model": "x"}
    with (
        LiveServer(models) as server,
        httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
    ):
        asked = {"lora_name": "x", "lora_path": "lora"}
        assert http.post("/v1/load_lora_adapter", json=asked).status_code == 200
        text = Client(http).ask(COMPLETIONS, **fields)["choices"][0]["text"]
        until(lambda: not models.loaded)
        listed = [(one["id"], one["parent"]) for one in http.get("/v1/models").json()["data"]]
        assert listed == [("tiny", None), ("x", "tiny")]
        assert Client(http).ask(COMPLETIONS, **fields)["choices"][0]["text"] == text
    models.close()


def test_models_that_cannot_be_served_together_are_refused() -> None:
    def unused() -> LLM:
        raise AssertionError

    with scripted_llm() as llm:
        with pytest.raises(InvalidRequestError, match="two models are called 'a'"):
            ServedModels(llm, Settings(name="a"), [ServedModel("a", unused)])
        with pytest.raises(InvalidRequestError, match="b needs about 3 MiB, more than the memory"):
            others = [ServedModel("b", unused, 3 << 20)]
            ServedModels(llm, Settings(name="a"), others, memory_budget=2 << 20)
        with pytest.raises(InvalidRequestError, match="256 KiB.* budget of 1 KiB; "):
            ServedModels(llm, Settings(name="a"), others, memory_budget=1 << 10)


def test_a_model_without_a_loader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch, reload=False, memory_budget=100) as one:
        refused = one.http.post(COMPLETIONS, json=body(COMPLETIONS, model="b"))
        assert refused.status_code == 503
        answer = one.http.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert answer.status_code == 200
        assert one.loaded() == ["a"]


def test_a_request_that_ends_while_its_model_is_loaded_holds_nothing() -> None:
    """The client of a request that waits for a model disconnects: its handler is cancelled."""

    async def main() -> None:
        loader = Loader(2)
        loader.may_load.clear()
        models = ServedModels(Loader(1)(), Settings(name="a"), [ServedModel("b", loader)])
        state: dict[str, Any] = {}
        waiting = asyncio.ensure_future(models.use("b", state))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        loader.may_load.set()
        service = await models.use("b", state)
        assert len(loader.loaded) == 1
        assert models.find("b").num_holds == 1
        assert service is models.loaded[1]
        with pytest.raises(ApiError):
            models.find("c")
        await models.stop()
        models.close()

    asyncio.run(main())


def test_names_and_sizes_of_models(tmp_path: Path) -> None:
    assert named_model("small=models/x.gguf") == ("small", "models/x.gguf")
    assert named_model("owner/name") == ("owner/name", "owner/name")
    file = tmp_path / "a=b.gguf"
    file.write_bytes(bytes(10))
    assert named_model(str(file)) == ("a=b", str(file))
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(bytes(100))
    assert files_bytes(tmp_path / "m-00001-of-00002.gguf") == 200
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(7))
    assert files_bytes(folder) == 7
    assert files_bytes(tmp_path / "missing.gguf") == files_bytes(None) == 0
