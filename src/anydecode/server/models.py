"""The models of one server: loaded when a request names them, and unloaded to keep to a memory
budget or after an idle time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anydecode.api.llm import LLM
from anydecode.errors import EngineStoppedError, InvalidRequestError
from anydecode.models.loading.gguf_split import part_names
from anydecode.server import logs
from anydecode.server.errors import ApiError
from anydecode.server.metrics import Metrics
from anydecode.server.options import sampling_of, unknown_model
from anydecode.server.service import Service
from anydecode.server.settings import Settings

#: Maximum time between two checks for idle models, in seconds.
_WATCH_SECONDS = 5.0


@dataclass(frozen=True)
class ServedModel:
    """A model that can be loaded.

    Attributes:
        name: Its name for clients.
        load: Loads it; called on a thread. None for a loaded model that is never unloaded.
        num_bytes: The memory that it is expected to take, in bytes.
        path: Its folder or file, if it has one.
    """

    name: str
    load: Callable[[], LLM] | None
    num_bytes: int = 0
    path: Path | None = None


@dataclass
class ModelState:
    """The state of one model: its service while it is loaded, and who uses it."""

    model: ServedModel
    service: Service | None = None
    num_bytes: int = 0  # of memory: as measured once it has been loaded
    num_holds: int = 0  # requests that use the service
    last_used: float = field(default_factory=time.monotonic)
    unload_requested: bool = False  # unloaded as soon as no request uses it
    loading: asyncio.Task[None] | None = None
    adapters: dict[str, Path] = field(default_factory=dict)  # by name, while it is unloaded

    @property
    def status(self) -> str:
        if self.service is not None:
            return "loaded"
        return "unloaded" if self.loading is None else "loading"

    @property
    def adapter_names(self) -> list[str]:
        return list(self.adapters) if self.service is None else self.service.llm.adapters

    @property
    def can_be_unloaded(self) -> bool:
        if self.service is None or self.model.load is None:
            return False
        engine = self.service.llm.engine
        return not (self.num_holds or engine.running or engine.waiting)


class ServedModels:
    """The models of one server; used on the event loop.

    Args:
        llm: The first model, loaded. It answers requests that name no model, by the name of
            `settings`.
        settings: The server's settings.
        others: Further models, which are loaded when a request names them.
        reload: Loads the first model again; None: it is never unloaded.
        memory_budget: Most memory of the loaded models, in bytes: their files and caches. Models
            without a running request are unloaded for another one, the least recently used first.
            None: no limit.
        idle_seconds: A model that was not used for so long is unloaded; None: never.

    Raises:
        InvalidRequestError: Two models have the same name, or one does not fit into the budget.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        others: Sequence[ServedModel] = (),
        *,
        reload: Callable[[], LLM] | None = None,
        memory_budget: int | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        self.settings = settings
        self.created = int(time.time())
        self._budget = memory_budget
        self._idle_seconds = idle_seconds
        path = getattr(llm.model, "path", None)
        first = ServedModel(settings.name, reload, memory_of(llm), path)
        self._states: dict[str, ModelState] = {}
        for model in (first, *others):
            if model.name in self._states or model.name in llm.adapters:
                raise InvalidRequestError(
                    f"two models are called {model.name!r}; name one with NAME=MODEL"
                )
            if memory_budget is not None and model.num_bytes > memory_budget:
                raise InvalidRequestError(
                    f"{model.name} needs about {_size(model.num_bytes)}, more than the memory"
                    f" budget of {_size(memory_budget)}; --cache-positions makes the cache smaller"
                )
            self._states[model.name] = ModelState(model, num_bytes=model.num_bytes)
        self.metrics = Metrics(
            lambda: {one.settings.name: one.llm for one in self.loaded}, has_names=bool(others)
        )
        self.first = self._states[settings.name]
        self.first.service = Service(llm, settings, self.metrics, reload is not None)
        self._lock = asyncio.Lock()  # while a model is loaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> list[Service]:
        """The services of the models that are loaded."""
        return [served.service for served in self._states.values() if served.service is not None]

    @property
    def can_unload(self) -> bool:
        """Whether any of the models can be unloaded."""
        return any(served.model.load is not None for served in self._states.values())

    @property
    def error(self) -> EngineStoppedError | None:
        """Why an engine has stopped; None if all run."""
        return next((error for one in self.loaded if (error := one.llm.driver.error)), None)

    @property
    def available(self) -> list[str]:
        """The names of the models, each followed by those of its adapters."""
        return [name for name, _, _ in self.entries()]

    def expiry(self, served: ModelState) -> float | None:
        """When a model will be unloaded if no request uses it until then, in seconds since the Unix
        epoch; None for never."""
        if self._idle_seconds is None or served.model.load is None:
            return None
        return time.time() + self._idle_seconds - (time.monotonic() - served.last_used)

    def entries(self) -> Iterator[tuple[str, str | None, ModelState]]:
        """The name of each model and adapter, that of an adapter's model, and the model's state."""
        for name, served in self._states.items():
            yield name, None, served
            for adapter in served.adapter_names:
                yield adapter, name, served

    def find(self, name: str | None) -> ModelState:
        """The state of the model, or of the model whose adapter is called `name`; the first one if
        no name is given.

        Raises:
            ApiError: There is none.
        """
        if not name:
            return self.first
        for known, _, served in self.entries():
            if known == name:
                return served
        raise unknown_model(name, self.available)

    async def use(self, name: str | None, state: dict[str, Any]) -> Service:
        """The service of the model called `name` (see `find`), loaded if it is not.

        Args:
            name: The name of a model or adapter.
            state: The `state` of the request's ASGI scope. The model stays loaded until
                `ReleaseMiddleware` has seen the end of the request.

        Raises:
            ApiError: There is no such model, no memory for it, or it cannot be loaded.
        """
        served = self.find(name)
        served.unload_requested = False
        while served.service is None:
            if served.loading is None:
                served.loading = self._start(self._load(served))
            await asyncio.shield(served.loading)  # goes on if the client disconnects
        state.setdefault("release", []).append(self._hold(served))
        return served.service

    def hold(self, service: Service) -> Callable[[], None]:
        """Keep a loaded model until the returned function is called."""
        return self._hold(next(one for one in self._states.values() if one.service is service))

    def unload(self, name: str | None) -> None:
        """Unload a model (see `find`) as soon as no request uses it, if it can be loaded again."""
        served = self.find(name)
        if served.model.load is not None:
            served.unload_requested = True
            self._start(self._unload_idle())

    def watch(self) -> None:
        """Start to unload idle models, if any can be unloaded."""
        if not self.can_unload:
            return
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Load and unload no more models."""
        if self._watching is not None:
            self._watching.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Stop the engines of all models."""
        for service in self.loaded:
            service.llm.close()

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.exception())  # has been seen
        return task

    def _hold(self, served: ModelState) -> Callable[[], None]:
        served.num_holds += 1

        def release() -> None:
            served.num_holds -= 1
            served.last_used = time.monotonic()
            if served.unload_requested:
                self._start(self._unload_idle())

        return release

    async def _load(self, served: ModelState) -> None:
        """Load a model, after others have been unloaded if the budget demands it."""
        try:
            async with self._lock:
                await self._make_room(served)
                start = time.monotonic()
                try:
                    llm = await asyncio.to_thread(_load, served)
                except Exception as error:
                    # The reason may name the operator's files.
                    logs.log.error(f"the model {served.model.name} was not loaded", exc_info=error)
                    message = f"the model {served.model.name!r} could not be loaded"
                    raise ApiError(500, message, code="model_load_failed", param="model") from None
                settings = self.settings
                if served is not self.first:
                    settings = replace(settings, name=served.model.name, decoder=None)
                served.service = Service(llm, settings, self.metrics, can_be_unloaded=True)
                self._start(asyncio.to_thread(served.service.preparation.warm))
                served.num_bytes, served.last_used = memory_of(llm), time.monotonic()
                seconds = round(time.monotonic() - start, 2)
                sampling = sampling_of(llm)
                logs.event("load", model=served.model.name, seconds=seconds, sampling=sampling)
        finally:
            served.loading = None

    async def _make_room(self, served: ModelState) -> None:
        """Unload models until the memory of `served` fits into the budget. Raises `ApiError`."""
        if self._budget is None:
            return
        while True:
            loaded = [one for one in self._states.values() if one.service is not None]
            free = self._budget - sum(one.num_bytes for one in loaded)
            if served.num_bytes <= free:
                return
            idle = [one for one in loaded if one.can_be_unloaded]
            if not idle:
                raise ApiError(
                    503,
                    f"the model {served.model.name!r} is not loaded, and there is no memory for it"
                    " while the loaded models are in use; try again later",
                    code="model_not_loaded",
                    param="model",
                    headers={"retry-after": "5"},
                )
            await self._unload(min(idle, key=lambda one: one.last_used))

    async def _unload(self, served: ModelState) -> None:
        service, served.service = served.service, None
        assert service is not None
        served.unload_requested = False
        served.adapters = service.llm.adapter_paths
        await asyncio.to_thread(service.llm.close)
        logs.event("unload", model=served.model.name)
        del service
        gc.collect()  # a model's objects refer to each other

    async def _watch(self) -> None:
        interval = min(_WATCH_SECONDS, (self._idle_seconds or _WATCH_SECONDS) / 4)
        while True:
            await asyncio.sleep(interval)
            await self._unload_idle()

    async def _unload_idle(self) -> None:
        async with self._lock:
            for served in self._states.values():
                is_idle = (
                    self._idle_seconds is not None
                    and time.monotonic() - served.last_used >= self._idle_seconds
                )
                if (is_idle or served.unload_requested) and served.can_be_unloaded:
                    await self._unload(served)


def _load(served: ModelState) -> LLM:
    assert served.model.load is not None
    llm = served.model.load()
    for name, path in served.adapters.items():
        llm.add_adapter(name, path)
    return llm


def as_served(models: LLM | ServedModels, settings: Settings | None) -> ServedModels:
    """Several models as they are, or a single one with `settings`; None for the defaults."""
    if isinstance(models, ServedModels):
        return models
    return ServedModels(models, settings or Settings())


class ReleaseMiddleware:
    """ASGI middleware that releases the models that a request has used when it ends."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            for release in scope.get("state", {}).pop("release", ()):
                release()


def model_files(path: Path | None) -> list[Path]:
    """The files with the weights of a model: in a folder, or a GGUF file with its other parts."""
    if path is None:
        return []
    if path.is_dir():
        return list(path.glob("*.safetensors"))
    files = [path.with_name(name) for name in part_names(path.name)]
    return [file for file in files if file.exists()]


def files_bytes(path: Path | None) -> int:
    """The size of the files with the weights of a model, in bytes."""
    return sum(file.stat().st_size for file in model_files(path))


def memory_of(llm: LLM) -> int:
    """The memory of a loaded model and its drafts, in bytes: the files of the weights, and the
    caches with all their positions."""
    runners = llm.engine.runners.values()
    paths = {getattr(runner.pool.model, "path", None) for runner in runners}
    return sum(map(files_bytes, paths)) + sum(runner.pool.num_bytes for runner in runners)


def _size(num_bytes: int) -> str:
    """A number of bytes in the largest unit, up to MiB, of which it has one."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if num_bytes >> shift:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes} bytes"
