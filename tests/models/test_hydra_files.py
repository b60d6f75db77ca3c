"""Hydra heads opened from folders: the published layout, and files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.speculative.hydra import drafted_by
from anydecode.certification.tiny import tiny_network
from anydecode.certification.tiny_heads import hydra_checkpoint
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import find_loader
from anydecode.models.hydra import load_hydra
from anydecode.models.network import Network
from draft_folders import (
    assert_folder_drafts,
    changed,
    drafter_folder,
    set_keys,
    tensor,
    without,
)

PREFIX = partial(hydra_checkpoint, has_prefix=True)
LAYER = "prefix_embeding_layer.layers.0"


@pytest.fixture(scope="module")
def target() -> Network:
    return tiny_network()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor("hydra_mlp.0.1.linear.weight", np.ones((64, 64), np.float32)), "has shape"),
        (tensor("hydra_lm_head.1.1.bias", np.ones(3, np.float32)), "has shape"),
        (tensor("hydra_lm_head.1.2.weight", np.ones((3, 3), np.float32)), "outputs of"),
        (tensor("hydra_lm_head.0.1.weight", np.ones((9, 64), np.float32)), "has shape"),
        (tensor("hydra_mlp.7.1.linear.weight", np.ones((3, 3), np.float32)), "outputs of"),
        (without("hydra_mlp.1.1.res_connection.weight"), "res_connection.weight is missing"),
        (without("hydra_lm_head.2.1.weight"), "outputs of"),
        (without(f"{LAYER}.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (without(f"{LAYER}.mlp.gate_proj.weight"), "gate_proj"),
        (without("prefix_embeding_layer.norm.weight"), "norm.weight is missing"),
        (set_keys(grounded_heads=False), "grounded_heads is False"),
        (set_keys(grounded_heads="x"), "grounded_heads"),
        (set_keys(hidden_state_offset=1), "hidden_state_offset is 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_that_do_not_fit_are_refused(
    target: Network, change: Callable[..., None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_hydra(changed(PREFIX(target), change), target)
    assert "\n" not in str(refused.value)


def test_files_saved_without_dropout_are_read(target: Network) -> None:
    """Modules without dropout between them are numbered 0, 1, ... instead of 1, 3, ...."""

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            kind, head, number, rest = name.split(".", 3)
            number = str(int(number) // 2) if kind == "hydra_mlp" else "0"
            tensors[f"{kind}.{head}.{number}.{rest}"] = tensors.pop(name)

    plain = hydra_checkpoint(target)
    other = changed(plain, change)
    assert find_loader(other) is load_hydra
    one, two = (list(load_hydra(x, target).matrices()) for x in (plain, other))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one, two, strict=True))


@pytest.mark.one_in(3)  # each kind of file, each format and each drafter
@pytest.mark.parametrize("file", ["model.safetensors", "hydra_lm_head.pt"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("make", [hydra_checkpoint, PREFIX], ids=["plain", "++"])
def test_a_folder_drafts_for_its_target(
    tmp_path: Path, make: Callable[..., Checkpoint], dtype: str | None, file: str
) -> None:
    assert_folder_drafts(tmp_path, make, "hydra", drafted_by(8, 4), file=file, dtype=dtype)


def test_heads_alone_are_no_model(tmp_path: Path, target: Network) -> None:
    folder = drafter_folder(tmp_path / "x", hydra_checkpoint(target), "model.safetensors")
    with pytest.raises(AnydecodeError, match="draft=") as refused:
        LLM(folder)
    assert "\n" not in str(refused.value)
