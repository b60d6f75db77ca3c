"""The endpoints of Ollama that list and describe models."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from anydecode.kernels.interface import Weight
from anydecode.models.fill_in import find_sentinels
from anydecode.server.ollama.generate import timestamp
from anydecode.server.ollama.prompts import LATEST
from anydecode.server.service import Service

#: The model stays loaded as long as the server runs.
_NEVER = "2999-01-01T00:00:00Z"


class ModelList:
    """Describes the served model and its adapters. What is not known is empty or 0."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._path: Path | None = getattr(service.llm.model, "path", None)

    def tags(self) -> dict[str, Any]:
        """The answer of `/api/tags`."""
        modified = {"modified_at": self._modified}
        return {"models": [{**entry, **modified} for entry in self._entries()]}

    def running(self) -> dict[str, Any]:
        """The answer of `/api/ps`."""
        fields = {
            "expires_at": _NEVER,
            "size_vram": 0,
            "context_length": self._service.llm.max_length,
        }
        return {"models": [{**entry, **fields} for entry in self._entries()]}

    def show(self) -> dict[str, Any]:
        """The answer of `/api/show`. The first one reads the vocabulary."""
        spec, service = self._service.llm.model.spec, self._service
        name = self._family
        template = service.tokenizer.chat_template
        capabilities = ["completion"]
        if service.tool_format is not None:
            capabilities.append("tools")
        if service.may_open_reasoning:
            capabilities.append("thinking")
        if find_sentinels(service.tokenizer) is not None:
            capabilities.append("insert")
        if spec.is_encoder:
            capabilities = ["embedding"]
        return {
            "modelfile": "",
            "parameters": "",
            "template": template if isinstance(template, str) else "",
            "modified_at": self._modified,
            "details": self._details,
            "model_info": {
                "general.architecture": name,
                "general.parameter_count": self._num_parameters,
                f"{name}.context_length": service.llm.max_length,
                f"{name}.embedding_length": spec.hidden_size,
                f"{name}.block_count": spec.num_layers,
            },
            "capabilities": capabilities,
        }

    def _entries(self) -> list[dict[str, Any]]:
        names = [self._service.settings.name, *self._service.llm.adapters]
        names = [name if ":" in name else name + LATEST for name in names]
        shared = {"size": self._size, "details": self._details}
        return [
            {"name": name, "model": name, "digest": self._digest(name), **shared} for name in names
        ]

    def _digest(self, name: str) -> str:
        """A digest of what identifies the model; its weights are not read."""
        return hashlib.sha256(repr((name, self._size, self._modified)).encode()).hexdigest()

    @property
    def _family(self) -> str:
        """The architecture by its name in GGUF files: "llama" for "LlamaForCausalLM"."""
        return self._service.llm.model.spec.architecture.removesuffix("ForCausalLM").lower()

    @cached_property
    def _files(self) -> list[Path]:
        if self._path is None:
            return []
        files = self._path.glob("*.safetensors") if self._path.is_dir() else [self._path]
        return [file for file in files if file.exists()]

    @cached_property
    def _size(self) -> int:
        return sum(file.stat().st_size for file in self._files)

    @cached_property
    def _modified(self) -> str:
        times = [file.stat().st_mtime for file in self._files]
        seconds = max(times, default=float(self._service.created))
        return timestamp(datetime.fromtimestamp(seconds, timezone.utc))

    @cached_property
    def _weights(self) -> list[Weight]:
        network = getattr(self._service.llm.model, "network", None)
        found = [] if network is None else network.matrices()
        return list({id(weight): weight for weight in found}.values())

    @cached_property
    def _num_parameters(self) -> int:
        """The number of elements of the matrices."""
        return sum(weight.out_features * weight.in_features for weight in self._weights)

    @cached_property
    def _details(self) -> dict[str, Any]:
        formats: dict[str, int] = {}
        for weight in self._weights:
            size = weight.out_features * weight.in_features
            formats[weight.format] = formats.get(weight.format, 0) + size
        return {
            "parent_model": "",
            "format": "" if not self._files else self._files[0].suffix[1:],
            "family": self._family,
            "families": [self._family],
            "parameter_size": short(self._num_parameters) if self._weights else "",
            "quantization_level": max(formats, key=formats.__getitem__, default=""),
        }


def short(count: int) -> str:
    """A number of parameters as "135M" or "1.5B"."""
    billions = count / 1e9
    return f"{billions:.1f}B" if billions >= 1 else f"{count / 1e6:.0f}M"
