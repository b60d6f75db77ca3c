"""The endpoints `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import JSONResponse, Response

from anydecode.errors import AnydecodeError
from anydecode.server.errors import ApiError
from anydecode.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from anydecode.server.service import Service


async def load_adapter(service: Service, body: LoadAdapterRequest, names: list[str]) -> Response:
    """Load an adapter from the folder that the operator has given. `names`: those that are taken,
    by models and other adapters."""
    settings, llm = service.settings, service.llm
    if settings.adapter_folder is None:
        raise ApiError(403, "adapters are not loaded by requests; start with --adapter-folder")
    path = _inside(settings.adapter_folder, body.lora_path)
    async with service.adapter_lock:
        if body.lora_name in names or body.lora_name in llm.adapters:
            message = f"there is already a model called {body.lora_name!r}"
            raise ApiError(400, message, param="lora_name")
        if len(llm.adapters) >= settings.max_adapters:
            raise ApiError(
                400,
                f"{len(llm.adapters)} adapters are loaded; this server allows"
                f" {settings.max_adapters}: unload one first",
                param="lora_name",
            )
        await asyncio.to_thread(_load, service, body.lora_name, path)
    return JSONResponse({"id": body.lora_name, "object": "model", "parent": settings.name})


async def unload_adapter(service: Service, body: UnloadAdapterRequest) -> Response:
    """Unload an adapter. Requests that use it end as they would."""
    if service.settings.adapter_folder is None:
        raise ApiError(403, "adapters are not unloaded by requests; start with --adapter-folder")
    async with service.adapter_lock:  # so that the event loop waits for none that is being loaded
        if body.lora_name not in service.llm.adapters:
            message = f"no adapter is called {body.lora_name!r}"
            raise ApiError(404, message, code="model_not_found", param="lora_name")
        service.llm.remove_adapter(body.lora_name)
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


def _inside(folder: Path, name: str) -> Path:
    """The folder `name` inside `folder`. Raises `ApiError` if there is none."""
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        is_inside = path != root and path.is_relative_to(root) and path.is_dir()
    except (OSError, ValueError):  # for example a null byte
        is_inside = False
    if not is_inside:
        message = f"lora_path {name!r} is not a folder inside the server's folder of adapters"
        raise ApiError(400, message, param="lora_path")
    return path


def _load(service: Service, name: str, path: Path) -> None:
    try:
        service.llm.add_adapter(name, path)
    except AnydecodeError as error:  # without the path of the folder
        message = str(error).replace(str(path), path.name)
        raise ApiError(400, message, param="lora_path") from None
