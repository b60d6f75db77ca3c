"""Folders of targets and drafters of them, and checkpoints with changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from gguf_models import SIZES, make_tensors, write_folder
from model_files import tokenizer_json

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]

TARGET_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def changed(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    """A copy of a checkpoint, changed by `change(config, tensors)`."""
    config, tensors = dict(checkpoint.config), dict(checkpoint.tensors)
    change(config, tensors)  # type: ignore[arg-type]
    return Checkpoint(checkpoint.name, checkpoint.path, config, tensors)


def set_keys(**values: Any) -> Change:
    """A change of config keys."""
    return lambda config, tensors: config.update(values)


def tensor(name: str, value: Any) -> Change:
    """A change of one tensor."""
    return lambda config, tensors: tensors.update({name: np.asarray(value)})


def without(name: str) -> Change:
    """The removal of one tensor."""
    return lambda config, tensors: [tensors.pop(name)][:0]  # type: ignore[return-value]


def assert_tensor_refused(
    file: Path, name: str, value: np.ndarray | None, load: Callable[[], object], message: str
) -> None:
    """Asserts that `load` refuses `file` in one line with another tensor `name`, or without it."""
    tensors = load_file(file)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load()
    assert "\n" not in str(refusal.value)


def target_folder(path: Path, **sizes: int) -> Path:
    """The folder of a small Llama with a tokenizer; `sizes` are keys of its config."""
    config = {**SIZES, **TARGET_CONFIG, **sizes}
    model = write_folder(path, make_tensors("llama", **sizes), **config)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return model


def drafter_folder(path: Path, checkpoint: Checkpoint, file: str) -> Path:
    """A folder with the tensors of a checkpoint in `file`, halved in size if torch writes it."""
    path.mkdir()
    tensors = {name: np.array(x) for name, x in checkpoint.tensors.items()}
    if file.endswith(".pt"):
        torch = pytest.importorskip("torch")
        torch.save({k: torch.from_numpy(v).half() for k, v in tensors.items()}, path / file)
    else:
        save_file(tensors, path / file)
    (path / "config.json").write_text(json.dumps(checkpoint.config))
    return path


def drafted_paths(event: dict[str, Any]) -> list[tuple[int, ...]]:
    """The paths of the tree of one event of a trace."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(event["drafted"], event["parents"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def assert_folder_drafts(
    folder: Path,
    make: Callable[[Network], Checkpoint],
    decoder: str,
    paths: Callable[..., Iterable[tuple[int, ...]]],
    *,
    file: str = "model.safetensors",
    dtype: str | None = None,
) -> None:
    """Asserts that a drafter in a folder of its own keeps its target's text and, with the weights
    as stored, that its drafts are `paths(checkpoint, network, text, temperature)`, which is an
    independent forward pass."""
    model = target_folder(folder / "model")
    network = load_network(load_checkpoint(model))
    drafter = drafter_folder(folder / "drafter", make(network), file)
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "trace": True}
    prompt = [5, 6, 7]
    with LLM(model, draft=drafter, dtype=dtype) as llm:
        for temperature in (0.0, 0.7):
            plain, drafted = (
                llm.generate(prompt, decoder=key, temperature=temperature, **options)
                for key in ("autoregressive", decoder)
            )
            assert drafted.tokens == plain.tokens
    if dtype is not None:
        return
    checkpoint, text = load_checkpoint(drafter), prompt + plain.tokens
    for event in drafted.trace[1:4]:
        expected = paths(checkpoint, network, text[: event["position"]], 0.7)
        assert set(drafted_paths(event)) == set(expected)
