"""Step-3: logits against another forward pass, and what its configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.families.step3 import Forward
from anydecode.certification.tiny_step3 import step3_checkpoint
from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import build, build_model, spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from tiny_models import chain, logits, whole

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7, 101, 5, 17]


def own_logits(seed: int = 4, backend: str = BACKENDS[-1], **changes: Any) -> np.ndarray:
    checkpoint = step3_checkpoint(seed, **changes)
    model = build_model(checkpoint, executor=choose_executor(backend, threads=1))
    found = logits(model, whole(chain(TEXT), model), model.new_cache(64, "float32"))
    return np.asarray(found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_normalised", [False, True])
def test_logits_equal_those_of_another_forward_pass(backend: str, is_normalised: bool) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    found = own_logits(backend=backend, norm_expert_weight=is_normalised)
    expected = Forward(step3_checkpoint(4, norm_expert_weight=is_normalised)).logits(TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_folder_whose_text_config_has_no_model_type(tmp_path: Path) -> None:
    """Published ones have the model type of the whole model alone, and a vision tower."""
    written = step3_checkpoint(4)
    tensors: dict[str, Any] = {
        name: np.ascontiguousarray(tensor, np.float32) for name, tensor in written.tensors.items()
    }
    tower = {"vision_model.post_layernorm.weight": np.ones(4, np.float32)}
    folder = write_folder(tmp_path, {**tensors, **tower}, **written.config)
    model = build_model(load_checkpoint(folder), executor=choose_executor(BACKENDS[-1], 1))
    found = logits(model, whole(chain(TEXT), model), model.new_cache(64, "float32"))
    assert np.array_equal(found, own_logits())


def test_a_norm_of_queries_without_its_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = build.read_low_rank_query

    def without_weights(*arguments: Any) -> None:
        read(*arguments)
        layer = arguments[3]
        layer.query_down_norm = np.ones_like(layer.query_down_norm)

    monkeypatch.setattr(build, "read_low_rank_query", without_weights)
    expected = Forward(step3_checkpoint(4)).logits(TEXT)
    assert np.abs(own_logits() - expected).max() > 1e-3 * np.abs(expected).max()


def test_a_position_stores_one_key_and_one_value() -> None:
    spec = spec_from_config(step3_checkpoint().config)
    shapes = [(one.num_heads, one.num_kv_heads, one.head_dim) for one in spec.cache_shapes if one]
    assert shapes == [(4, 1, 16)] * 3
    assert [layer.num_experts for layer in spec.layers] == [0, 6, 6]


@pytest.mark.parametrize("listed", ["0, 2", [0, 2]])
def test_layers_with_experts_are_those_of_the_config(listed: Any) -> None:
    spec = spec_from_config(step3_checkpoint(moe_layers_enum=listed).config)
    assert [layer.num_experts for layer in spec.layers] == [6, 0, 6]


def test_without_a_list_the_first_layer_is_dense() -> None:
    spec = spec_from_config(step3_checkpoint(moe_layers_enum=None).config)
    assert [layer.num_experts for layer in spec.layers] == [0, 6, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_q_dim": None}, "share_q_dim"),
        ({"share_q_dim": 0}, "share_q_dim is 0"),
        ({"share_q_dim": 24}, r"q_proj.weight has shape \(20, 48\), not \(24, 48\)"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum is '1,x'"),
        ({"moe_layers_enum": 3}, "moe_layers_enum is 3"),
        ({"moe_top_k": 7}, "experts_per_token is 7"),
        ({"num_attention_groups": 3}, "num_kv_heads is 3"),
    ],
)
def test_invalid_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build_model(step3_checkpoint(**changes), executor=choose_executor(None, threads=1))
    assert "\n" not in str(caught.value)
