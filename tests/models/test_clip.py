"""The image encoder of LLaVA: its rows are those of transformers, and bad folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode.certification.oracles.prefill.clip_forward import SIDE, WIDTH, image, tiny_encoder
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.clip import MEAN, STD, ClipEncoder

HIDDEN = 20


def folder(path: Path, **changes: Any) -> Path:
    """A folder with a tiny encoder; `changes` are those of its config."""
    config, tensors = tiny_encoder(HIDDEN)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("layer", [-2, -1, 1])
def test_rows_are_those_of_transformers(tmp_path: Path, layer: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, tensors = tiny_encoder(HIDDEN)
    vision = {name: one for name, one in config["vision_config"].items() if name != "model_type"}
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision),
            text_config=transformers.LlamaConfig(
                hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, vocab_size=40,
                num_attention_heads=2,
            ),
            image_token_index=39,
            vision_feature_layer=layer,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    own = load_file(file)
    assert tensors.keys() <= own.keys(), "the names that transformers writes"
    save_file({**own, **tensors}, file, metadata={"format": "pt"})
    model = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    pixels = ((image(0) / 255 - MEAN) / STD).astype(np.float32).transpose(2, 0, 1)
    with torch.no_grad():
        states = model.model.vision_tower(torch.from_numpy(pixels[None]), output_hidden_states=True)
        projector = model.model.multi_modal_projector
        expected = projector(states.hidden_states[layer][0, 1:]).numpy()
    found = ClipEncoder.open(tmp_path).encode(image(0))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("start", ["vision_tower.vision_model.", "model.vision_tower."])
def test_other_names_of_the_same_tensors_are_read(tmp_path: Path, start: str) -> None:
    config, tensors = tiny_encoder(HIDDEN)
    renamed = {
        name.replace("vision_tower.", start) if "tower" in name else f"model.{name}": one
        for name, one in tensors.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(renamed, tmp_path / "model.safetensors")
    found, own = ClipEncoder.open(tmp_path), ClipEncoder(config, tensors)
    assert found.fingerprint == own.fingerprint and found.hidden_size == HIDDEN
    assert np.array_equal(found.encode(image(1)), own.encode(image(1)))


def test_a_flat_image_is_merged_everywhere() -> None:
    config, tensors = tiny_encoder(HIDDEN)
    name = "vision_tower.embeddings.position_embedding.weight"
    tensors[name] = tensors[name] * 0
    encoder = ClipEncoder(config, tensors)
    rows, importance = encoder.merge(np.full((2 * SIDE, 2 * SIDE, 3), 90, np.uint8))
    assert rows.shape == ((SIDE // 3) ** 2, HIDDEN) and importance.shape == rows.shape[:1]
    assert np.allclose(rows, rows[0], atol=1e-5) and np.allclose(importance, importance[0])


def test_images_of_another_size_and_grids_of_other_sides_are_refused() -> None:
    config, tensors = tiny_encoder(HIDDEN)
    encoder = ClipEncoder(config, tensors)
    for pixels in (image(0)[:-1], image(0).astype(np.float32), image(0)[:, :, 0]):
        with pytest.raises(InvalidRequestError, match=r"must be uint8 \[24, 24, 3\]: resize"):
            encoder.encode(pixels)
    config["vision_config"]["image_size"] = 22
    name = "vision_tower.embeddings.position_embedding.weight"
    tensors[name] = tensors[name][: 11 * 11 + 1]
    with pytest.raises(UnsupportedCombinationError, match="11 x 11 patches, which windows of 3"):
        ClipEncoder(config, tensors).merge(image(0)[:22, :22])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "no clip_vision_model"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
        ({"vision_feature_select_strategy": "full"}, "select_strategy is 'full'"),
        ({"vision_feature_layer": 5}, "vision_feature_layer is 5; the encoder has 4 layers"),
        ({"vision_feature_layer": [1, 2]}, "malformed"),
    ],
)
def test_other_encoders_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ClipEncoder.open(folder(tmp_path, **changes))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("mistake", ["missing", "another shape"])
def test_other_tensors_are_refused(mistake: str) -> None:
    config, tensors = tiny_encoder(HIDDEN)
    name = "vision_tower.encoder.layers.2.mlp.fc1.bias"
    if mistake == "missing":
        del tensors[name]
    else:
        tensors[name] = np.zeros(WIDTH, np.float32)
    with pytest.raises(CheckpointError, match=f"{name} is (missing|\\[16\\]); it must be"):
        ClipEncoder(config, tensors)
