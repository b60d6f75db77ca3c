"""The LoRA adapters of an engine, by name: loaded and removed while requests run."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

from anydecode.arguments import checked_arguments
from anydecode.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from anydecode.models.encoder_tasks import task_named, tasks_of


class LoadedAdapter:
    """An adapter that a model has loaded. The requests that use it refer to it; its weights are
    freed when nothing does any more.

    Attributes:
        index: Its index in the model.
        path: Its folder.
    """

    def __init__(self, model: Any, index: int, path: Path) -> None:
        self.index = index
        self.path = path
        weakref.finalize(self, model.remove_adapter, index).atexit = False


class Adapters:
    """The adapters of one model; safe for threads."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()  # while one is loaded
        self._adapters: dict[str, LoadedAdapter] = {}
        self._tasks: dict[str | None, LoadedAdapter] = {}

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters, sorted."""
        return sorted(self._adapters)

    @property
    def paths(self) -> dict[str, Path]:
        """The folders of the loaded adapters, by name."""
        return {name: adapter.path for name, adapter in list(self._adapters.items())}

    @checked_arguments()
    def add(self, name: str, path: str | Path) -> None:
        """Load an adapter from a folder.

        Raises:
            InvalidRequestError: There is already an adapter of this name.
            UnsupportedCombinationError: The model does not support adapters.
            CheckpointError: The files are missing or corrupt, or do not fit the model.
        """
        add = getattr(self._model, "add_adapter", None)
        if add is None:
            raise UnsupportedCombinationError("this model does not support adapters")
        with self._lock:
            if name in self._adapters:
                raise InvalidRequestError(
                    f"there is already an adapter called {name!r}; remove it first"
                )
            self._adapters[name] = LoadedAdapter(self._model, add(Path(path)), Path(path))

    @checked_arguments()
    def remove(self, name: str) -> None:
        """Remove an adapter. Requests that use it end as they would; then its weights are freed.

        Raises:
            AdapterNotFoundError: There is no adapter of this name.
        """
        with self._lock:
            self.find(name)
            del self._adapters[name]

    @checked_arguments()
    def of_embedding(self, name: str | None, task: str | None) -> LoadedAdapter | None:
        """The adapter called `name`, or the updates of a task of the model; None for neither.

        Raises:
            InvalidRequestError: There is no such task, or both are given.
            AdapterNotFoundError: There is no adapter of this name.
        """
        found = task_named(tasks_of(self._model), task)
        if found is None:
            return self.find(name)
        if name is not None:
            raise InvalidRequestError(
                f"task {task!r} has updates of the same matrices as the adapter {name!r}: leave"
                " one of them out"
            )
        with self._lock:
            if task not in self._tasks:
                index = self._model.install_adapter(found.adapter)
                self._tasks[task] = LoadedAdapter(self._model, index, self._model.path)
            return self._tasks[task]

    @checked_arguments()
    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter called `name`; None for None. Raises `AdapterNotFoundError`."""
        adapter = None if name is None else self._adapters.get(name)
        if adapter is None and name is not None:
            loaded = ", ".join(self.names) or "none is loaded"
            raise AdapterNotFoundError(f"no adapter is called {name!r} ({loaded})")
        return adapter
