"""The endpoints of Ollama that list and describe models."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from anydecode.kernels.interface import Weight
from anydecode.models.fill_in import find_sentinels
from anydecode.server.models import ModelState, ServedModels, files_bytes, model_files
from anydecode.server.ollama.generate import timestamp
from anydecode.server.ollama.prompts import LATEST
from anydecode.server.service import Service

#: Without an idle time, a model stays loaded as long as the server runs.
_NEVER = "2999-01-01T00:00:00Z"

#: Ollama's names of sampling options that have another one.
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}
#: The details of a model that has not been loaded.
_DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


class ModelList:
    """Describes the served models and their adapters. What is not known is empty or 0: of a model
    that has not been loaded yet, all but its files."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._details: dict[str, dict[str, Any]] = {}  # of the models that have been loaded

    def tags(self) -> dict[str, Any]:
        """The answer of `/api/tags`."""
        return {"models": [self._entry(name, served) for name, _, served in self._models.entries()]}

    def running(self) -> dict[str, Any]:
        """The answer of `/api/ps`."""
        entries = []
        for name, _, served in self._models.entries():
            if served.service is not None:
                entry = self._entry(name, served)
                del entry["modified_at"]
                expiry = self._models.expiry(served)
                fields = {
                    "expires_at": _NEVER if expiry is None else _timestamp(expiry),
                    "size_vram": 0,
                    "context_length": served.service.llm.max_length,
                }
                entries.append({**entry, **fields})
        return {"models": entries}

    def _entry(self, name: str, served: ModelState) -> dict[str, Any]:
        model = served.model
        if served.service is not None and model.name not in self._details:
            self._details[model.name] = _details(served.service)
        name = name if ":" in name else name + LATEST
        size, modified = files_bytes(model.path), _modified(model.path, self._models.created)
        # Of what identifies the model; its weights are not read.
        digest = hashlib.sha256(repr((name, size, modified)).encode()).hexdigest()
        return {
            "name": name,
            "model": name,
            "digest": digest,
            "size": size,
            "details": self._details.get(model.name, _DETAILS),
            "modified_at": modified,
        }


def show(service: Service) -> dict[str, Any]:
    """The answer of `/api/show`. The first one reads the vocabulary."""
    spec, path = service.llm.model.spec, getattr(service.llm.model, "path", None)
    name = _family(service)
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
        "parameters": "\n".join(
            f"{_PARAMETERS.get(name, name):<30} {value}"
            for name, value in service.llm.sampling_defaults.items()
        ),
        "template": template if isinstance(template, str) else "",
        "modified_at": _modified(path, service.created),
        "details": _details(service),
        "model_info": {
            "general.architecture": name,
            "general.parameter_count": _num_parameters(_weights(service)),
            f"{name}.context_length": service.llm.max_length,
            f"{name}.embedding_length": spec.hidden_size,
            f"{name}.block_count": spec.num_layers,
        },
        "capabilities": capabilities,
    }


def _family(service: Service) -> str:
    """The architecture by its name in GGUF files: "llama" for "LlamaForCausalLM"."""
    return service.llm.model.spec.architecture.removesuffix("ForCausalLM").lower()


def _modified(path: Path | None, otherwise: int) -> str:
    times = [file.stat().st_mtime for file in model_files(path)]
    return _timestamp(max(times, default=float(otherwise)))


def _timestamp(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, timezone.utc))


def _weights(service: Service) -> list[Weight]:
    network = getattr(service.llm.model, "network", None)
    found = [] if network is None else network.matrices()
    return list({id(weight): weight for weight in found}.values())


def _num_parameters(weights: list[Weight]) -> int:
    """The number of elements of the matrices."""
    return sum(weight.out_features * weight.in_features for weight in weights)


def _details(service: Service) -> dict[str, Any]:
    weights = _weights(service)
    files = model_files(getattr(service.llm.model, "path", None))
    formats: dict[str, int] = {}
    for weight in weights:
        formats[weight.format] = formats.get(weight.format, 0) + _num_parameters([weight])
    family = _family(service)
    return {
        **_DETAILS,
        "format": "" if not files else files[0].suffix[1:],
        "family": family,
        "families": [family],
        "parameter_size": short(_num_parameters(weights)) if weights else "",
        "quantization_level": max(formats, key=formats.__getitem__, default=""),
    }


def short(count: int) -> str:
    """A number of parameters as "135M" or "1.5B"."""
    billions = count / 1e9
    return f"{billions:.1f}B" if billions >= 1 else f"{count / 1e6:.0f}M"
