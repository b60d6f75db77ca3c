"""The sampling options that a model's authors recommend, as defaults of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydecode.errors import CheckpointError, InvalidRequestError, quoted
from anydecode.models.files import read_json
from anydecode.sampling.params import MIN_TEMPERATURE, TRUNCATIONS, SamplingParams

#: The options that are read from `generation_config.json`, which has the same names.
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
#: The model's own file, and none, as values of `generation_config`.
AUTO, NONE = "auto", "none"
FILE_NAME = "generation_config.json"
#: Rules that set their own limit, and exclude every other truncation.
_OWN_LIMIT = ("mirostat", "autodeco")


def sampling_defaults(model: Any, source: str | Path | None) -> dict[str, float]:
    """The sampling options of requests that do not set them.

    Args:
        model: The model.
        source: "auto" for what the model's files recommend, "none" or None for nothing, or a
            folder with a `generation_config.json`, or such a file.

    Raises:
        InvalidRequestError: There is no such file.
        CheckpointError: The file is corrupt, or a value is not allowed.
    """
    if source in (None, NONE):
        return {}
    if source == AUTO:
        config = getattr(model, "generation_config", None) or {}
        return _options(config, f"the generation settings of {model.name}")
    if not isinstance(source, str | Path):
        raise InvalidRequestError(
            f"generation_config is {quoted(source)}; it must be {AUTO}, {NONE}, or a folder with a"
            f" {FILE_NAME}"
        )
    path = Path(source)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequestError(
            f"there is no file {file}: give a folder with a {FILE_NAME}, {AUTO} or {NONE}"
        )
    return _options(read_json(file), str(file))


def _options(config: Mapping[str, Any], source: str) -> dict[str, float]:
    """The options in a generation config. As in transformers, `do_sample: false` is temperature 0;
    as in vLLM, `top_k: -1` is off."""
    found = {name: config[name] for name in NAMES if config.get(name) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    temperature = found.get("temperature")
    if isinstance(temperature, int | float) and 0 < temperature < MIN_TEMPERATURE:
        found["temperature"] = 0.0  # so low a temperature is a way to write 0
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{source}: {error}; --generation-config {NONE} leaves them out"
        ) from None
    return found


def missing_defaults(given: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """Those of `defaults` that apply beside the options `given`: what is not given, except
    truncations beside a rule that has a limit of its own."""
    has_limit = any(given.get(name) for name in _OWN_LIMIT)
    return {
        name: value
        for name, value in defaults.items()
        if name not in given and not (has_limit and name in TRUNCATIONS)
    }
