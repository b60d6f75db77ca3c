"""Files of what is trained for exits or layers come back as they were; bad ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.tiny import routed_model, tiny_model
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models import mamba_blocks
from anydecode.models.exit_files import model_fingerprint, read_exits, write_exits
from anydecode.models.exit_heads import ExitHeads
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.judge import Judge
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.small_mlps import SmallMlps


def test_routers_of_layers_come_back_as_they_were(tmp_path: Path) -> None:
    file, random = tmp_path / "routers.safetensors", np.random.default_rng(0)
    layers = [2, 9, 10]  # ascending as numbers, not as names
    weight, bias = random.standard_normal((3, 8), np.float32), np.arange(3, dtype=np.float32)
    LayerRouters(layers, weight, bias, "a model").save(file)
    found = LayerRouters.load(file)
    assert found.layers == layers and found.fingerprint == "a model"
    assert np.array_equal(found.weight, weight) and np.array_equal(found.bias, bias)


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": {1: [1.0, np.nan]}, "bias": {1: [0.0]}},
        {"weight": {1: [1.0, 2.0]}, "bias": {1: [np.inf]}},
        {"weight": {1: [1.0, 2.0]}, "bias": {2: [0.0]}},
        {"weight": {1: [1.0, 2.0], 2: [1.0]}, "bias": {1: [0.0], 2: [0.0]}},
        {"weight": {1: [[1.0, 2.0]]}, "bias": {1: [0.0]}},
        {"weight": {1: [1.0, 2.0]}, "bias": {1: [0.0, 1.0]}},
    ],
    ids=["nan", "inf", "other layers", "other widths", "a matrix", "two offsets"],
)
def test_bad_tensors_of_layers_are_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    file = tmp_path / "routers.safetensors"
    arrays = {
        part: {number: np.array(one, np.float32) for number, one in tensors.items()}
        for part, tensors in parts.items()
    }
    write_exits(file, arrays, "a model")
    with pytest.raises(CheckpointError, match="layer routers .*(do not fit together|not finite)"):
        LayerRouters.load(file)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    write_exits(file, {"weight": {3: np.array([1.0, np.nan], np.float32)}}, "a model")
    with pytest.raises(CheckpointError, match="exit heads .*not finite"):
        read_exits(file, ("weight",), "exit heads")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


#: Parts for a layer or an exit, with states of some size and the fingerprint of a model.
PARTS: dict[str, Callable[[int, int, str], Any]] = {
    "layer routers": lambda layer, size, of: LayerRouters([layer], zeros(1, size), zeros(1), of),
    "exit heads": lambda exit, size, of: ExitHeads(
        {exit: zeros(size, size)}, {exit: zeros(size)}, of
    ),
    "exit routers": lambda exit, size, of: ExitRouters(
        {exit: zeros(2, size)}, {exit: zeros(2)}, of, "token 1"
    ),
    "small MLPs": lambda layer, size, of: SmallMlps(
        {layer: zeros(size)}, {layer: zeros(2, size)}, {layer: zeros(2, size)},
        {layer: zeros(size, 2)}, of,
    ),
    "maps of hidden states": lambda layer, size, of: HiddenTransfer(
        zeros(1, size, size), (layer,), zeros(1, 2), of
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "width"), [(4, 0), (-1, 0), (1, 1)])
@pytest.mark.parametrize("what", PARTS)
def test_parts_that_do_not_fit_a_model_are_refused(what: str, layer: int, width: int) -> None:
    network = tiny_model(layers=4).network
    size, fingerprint = network.spec.hidden_size, model_fingerprint(network)
    PARTS[what](1, size, fingerprint).check(network)
    with pytest.raises(InvalidRequestError, match=f"the {what} do not fit a model of 4 layers"):
        PARTS[what](layer, size + width, fingerprint).check(network)


def test_a_judge_of_other_states_is_refused() -> None:
    network = tiny_model(layers=4).network
    for size in (1, network.spec.hidden_size + 1):
        judge = Judge(zeros(size), 0.0, 0.5, model_fingerprint(network))
        with pytest.raises(InvalidRequestError, match="weights of a judge do not fit"):
            judge.check(network)


@pytest.mark.parametrize("mistake", ["a part is missing", "another width", "another size"])
def test_bad_blocks_of_routers_are_refused(tmp_path: Path, mistake: str) -> None:
    file = tmp_path / "routers.safetensors"
    down, up = np.ones((3, 8), np.float32), np.ones((1, 3), np.float32)
    size = 6 if mistake == "another size" else 8
    block = {"norm": (size,), "gate": (5, size), "up": (5, size), "down": (size, 5)}
    if mistake == "a part is missing":
        del block["down"]
    elif mistake == "another width":
        block["down"] = (size, 4)
    parts = {f"block.{name}": {2: np.ones(shape, np.float32)} for name, shape in block.items()}
    write_exits(file, {"down.weight": {2: down}, "up.weight": {2: up}, **parts}, "a model")
    with pytest.raises(CheckpointError, match="exit routers .*(do not fit|has the shapes)"):
        ExitRouters.load(file)


@pytest.mark.parametrize("mistake", ["a part is missing", "another window", "another size"])
def test_bad_mamba_blocks_of_routers_are_refused(tmp_path: Path, mistake: str) -> None:
    file, down, up = tmp_path / "routers.safetensors", zeros(3, 8), zeros(1, 3)
    size = 6 if mistake == "another size" else 8
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (size,), "in_proj": (10, size), "conv": (5, 4), "conv_bias": (5,),
        "x_proj": (8, 5), "dt_proj": (5, 2), "dt_bias": (5,), "a_log": (5, 3), "skip": (5,),
        "out_proj": (size, 5),
    }  # fmt: skip
    if mistake == "a part is missing":
        del shapes["skip"]
    elif mistake == "another window":
        shapes["conv"] = (4, 5)
    parts = {f"mamba.{name}": {2: zeros(*shape)} for name, shape in shapes.items()}
    write_exits(file, {"down.weight": {2: down}, "up.weight": {2: up}, **parts}, "a model")
    with pytest.raises(CheckpointError, match="exit routers .*(do not fit|has the shapes)"):
        ExitRouters.load(file)


def test_mamba_blocks_of_routers_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "routers.safetensors"
    with routed_model("mamba") as llm:
        own: ExitRouters = llm.model.exit_routers  # type: ignore[attr-defined]
    own.save(file)
    found = ExitRouters.load(file)
    assert found.block is None and found.mamba is not None and own.mamba is not None
    for part in mamba_blocks.PARTS:
        for exit in own.exits:
            assert np.array_equal(getattr(found.mamba, part)[exit], getattr(own.mamba, part)[exit])
