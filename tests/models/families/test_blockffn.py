"""BlockFFN: its certificate, mistakes that it rejects, and what its configs may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.families.blockffn import TEXT, Forward
from anydecode.certification.tiny_blockffn import blockffn_checkpoint
from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Routing
from anydecode.kernels.library import load_library
from anydecode.models.families import build_model, experts, spec_from_config
from anydecode.models.families.blockffn import read_blocks
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from certificates import assert_certified, assert_rejected, replace_class_default
from tiny_models import chain, logits, whole

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("blockffn")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", ["rms", "sum", "none"])
def test_logits_equal_those_of_the_oracle(backend: str, norm: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    checkpoint = blockffn_checkpoint(seed=4, norm=norm)
    model = build_model(checkpoint, executor=choose_executor(backend, threads=2))
    found = logits(model, whole(chain(TEXT), model), model.new_cache(64, "float32"))
    expected = Forward(checkpoint).logits(TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_blocks_are_close(dtype: str) -> None:
    checkpoint = blockffn_checkpoint()
    model = build_model(checkpoint, dtype, executor=choose_executor(None, threads=1))
    found = logits(model, whole(chain(TEXT), model), model.new_cache(64))
    expected = Forward(checkpoint).logits(TEXT)
    limit = {"int8": 0.1, "int4": 0.9}[dtype]
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_certificate_rejects_weights_without_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnormed(*arguments: Any) -> Any:
        blocks = read_blocks(*arguments)
        blocks.router_norm = None
        return blocks

    monkeypatch.setattr(experts, "read_blocks", unnormed)
    assert_rejected("blockffn")


class Wrapped:
    """A backend with some operations replaced."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class Dense(Wrapped):
    """Blocks of weight 0 have a weight too small to matter."""

    def activate(self, x: Any, activation: str) -> Any:
        y = self.backend.activate(x, activation)
        if activation != "relu":
            return y
        small = self.backend.scale(self.backend.activate(x, "sigmoid"), 1e-20)
        return self.backend.add(y, small)


class Softmax(Wrapped):
    """The weights of blocks are shares of all of them."""

    def experts(self, x: Any, router: Any, weights: Any, routing: Routing, kind: str) -> Any:
        shares = replace(routing, scoring="softmax")
        return self.backend.experts(x, router, weights, shares, kind)


@pytest.mark.parametrize("backend", [Dense, Softmax])
def test_certificate_rejects_other_passes(
    monkeypatch: pytest.MonkeyPatch, backend: type[Wrapped]
) -> None:
    layer = Network.layer
    monkeypatch.setattr(
        Network, "layer", lambda own, given, x, index: layer(own, backend(given), x, index)
    )
    assert_rejected("blockffn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "value"), [("chunk_weight", 0.0), ("locality_weight", 0.0), ("chunk", 1)]
)
def test_certificate_rejects_another_training(
    monkeypatch: pytest.MonkeyPatch, parameter: str, value: float
) -> None:
    pytest.importorskip("torch")
    from anydecode.training.blockffn import BlockRecipe

    replace_class_default(monkeypatch, BlockRecipe, parameter, value)
    assert_rejected("blockffn")


@pytest.mark.slow
def test_certificate_rejects_a_training_without_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from anydecode.training.blockffn import BlockRun

    update = BlockRun._update

    def plain(self: BlockRun) -> float:
        recipe = self.recipe
        self.recipe = replace(recipe, chunk_weight=0.0, locality_weight=0.0)
        loss = update(self)
        self.recipe = recipe
        return loss

    monkeypatch.setattr(BlockRun, "_update", plain)
    assert_rejected("blockffn")


@pytest.mark.slow
def test_certificate_rejects_patterns_that_are_compared_after_the_relu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from anydecode.training import blockffn

    locality = blockffn.locality_loss
    monkeypatch.setattr(blockffn, "locality_loss", lambda scores: locality(scores.relu()))
    assert_rejected("blockffn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_type": "vanilla"}, "attention_type"),
        ({"router_act": "silu"}, "router_act"),
        ({"norm_after_router": "max"}, "norm_after_router"),
        ({"num_shared_experts": 2}, "num_shared_experts"),
    ],
)
def test_other_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**blockffn_checkpoint().config, **changes})


def test_a_minicpm_without_blocks_stays_one() -> None:
    config = {**blockffn_checkpoint().config, "ffn_type": "vanilla", "num_experts": 0}
    assert spec_from_config(config).layers[0].routing is None
