"""Medusa heads opened from folders: published layouts, and files that do not fit."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode import LLM
from anydecode.certification.oracles.speculative.medusa import drafted_by
from anydecode.certification.tiny import tiny_network
from anydecode.certification.tiny_heads import medusa_checkpoint
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.drafters import find_loader
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.torch_file import open_torch_file
from anydecode.models.medusa import load_medusa
from anydecode.models.network import Network
from draft_folders import (
    assert_folder_drafts,
    changed,
    drafter_folder,
    target_folder,
    tensor,
    without,
)

Tensors = dict[str, np.ndarray]
VOCAB = 259


@pytest.fixture(scope="module")
def target() -> Network:
    return tiny_network()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor("0.1.weight", np.ones((5, 64), np.float32)), "0.1.weight has shape"),
        (tensor("0.0.linear.weight", np.ones((64, 32), np.float32)), "0.0.linear.weight has"),
        (tensor("0.0.linear.bias", np.ones(3, np.float32)), "0.0.linear.bias has shape"),
        (tensor("0.0.linear.weight", np.ones((64, 64), np.int64)), "not a matrix of floats"),
        (tensor("9.0.linear.weight", np.ones((64, 64), np.float32)), "gaps"),
        (tensor("1.3.linear.weight", np.ones((64, 64), np.float32)), "gaps"),
        (without("0.0.linear.weight"), "gaps"),
        (without("2.1.weight"), "head 2 has no output"),
        (tensor("token_map", np.ones(4, np.float32)), "token_map is float32"),
        (tensor("token_map", np.arange(4)), "0.1.weight has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_that_do_not_fit_are_refused(
    target: Network, change: Callable[..., None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load_medusa(changed(medusa_checkpoint(target), change), target)
    assert "\n" not in str(refused.value)


def _renamed(rename: Callable[[int, str], str]) -> Callable[[dict[str, Any], Tensors], None]:
    """A change of the names of heads: rename(head, the rest of the name)."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for name in list(tensors):
            head, _, rest = name.partition(".")
            tensors[rename(int(head), rest)] = tensors.pop(name)

    return change


def _vllm(head: int, rest: str) -> str:
    if rest == "1.weight":
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{rest.replace('linear.', '')}"


def _equal(one: Network, other: Network) -> bool:
    pairs = zip(one.matrices(), other.matrices(), strict=True)
    return all(np.array_equal(a.data, b.data) for a, b in pairs)


@pytest.mark.parametrize("rename", [lambda h, rest: f"medusa_head.{h}.{rest}", _vllm])
def test_other_layouts_are_read(target: Network, rename: Callable[[int, str], str]) -> None:
    plain = medusa_checkpoint(target)
    other = changed(plain, _renamed(rename))
    assert find_loader(other) is load_medusa
    network = load_medusa(other, target)
    assert len(network.heads) == 3 and network.heads[0].blocks[0].bias is not None
    assert _equal(network, load_medusa(plain, target))


def test_one_head_for_all_is_read_once(target: Network) -> None:
    """vLLM's layout with the head of the target, which is stored once."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        _renamed(_vllm)(config, tensors)
        del tensors["lm_heads.1.weight"], tensors["lm_heads.2.weight"]
        config["original_lm_head"] = True

    network = load_medusa(changed(medusa_checkpoint(target), change), target)
    assert network.shared_head


def test_heads_of_some_tokens_are_read(target: Network) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        _renamed(_vllm)(config, tensors)
        tensors["token_map"] = np.arange(3, 203)
        for head in range(3):
            tensors[f"lm_heads.{head}.weight"] = tensors[f"lm_heads.{head}.weight"][3:203]
        config |= {"truncated_vocab_size": 200, "logit_scale": 0.5}

    network = load_medusa(changed(medusa_checkpoint(target), change), target)
    assert network.spec.num_logits == 200 and network.spec.logit_scale == 0.5
    assert network.weights.head_tokens is not None
    assert network.weights.head_tokens.tolist() == list(range(3, 203))


def test_heads_without_a_last_matrix_use_the_targets(target: Network) -> None:
    network = load_medusa(medusa_checkpoint(target, own_heads=False), target)
    assert network.shared_head and network.heads[0].output is target.weights.head


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(tmp_path: Path, dtype: str | None, file: str) -> None:
    paths = drafted_by(8, 4)
    assert_folder_drafts(tmp_path, medusa_checkpoint, "medusa", paths, file=file, dtype=dtype)


def test_heads_in_the_folder_of_their_target_draft_for_it(tmp_path: Path) -> None:
    """Medusa-2: the folder is a model, and with draft= its heads."""
    model = target_folder(tmp_path / "model")
    heads = medusa_checkpoint(load_network(load_checkpoint(model)))
    tensors = load_file(model / "model.safetensors")
    tensors |= {f"medusa_head.{name}": np.array(x) for name, x in heads.tensors.items()}
    save_file(tensors, model / "model.safetensors")
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    with LLM(model, draft=model) as llm:
        plain = llm.generate([5, 6, 7], decoder="autoregressive", **options)
        drafted = llm.generate([5, 6, 7], decoder="medusa", trace=True, **options)
        assert llm.engine.runners["draft"].model.spec.architecture == "Medusa"
    assert drafted.tokens == plain.tokens
    assert any(event["drafted"] for event in drafted.trace or ())


def test_heads_of_another_model_are_refused_with_the_sizes_of_this_one(tmp_path: Path) -> None:
    model = target_folder(tmp_path / "model")
    other = medusa_checkpoint(tiny_network(hidden=96))
    folder = drafter_folder(tmp_path / "heads", other, "medusa_lm_head.safetensors")
    with pytest.raises(
        CheckpointError, match=r"drafter for model: hidden size \d+, \d+ tokens"
    ) as e:
        LLM(model, draft=folder)
    assert "\n" not in str(e.value)


def test_heads_alone_are_no_model(tmp_path: Path, target: Network) -> None:
    folder = drafter_folder(
        tmp_path / "heads", medusa_checkpoint(target), "medusa_lm_head.safetensors"
    )
    with pytest.raises(AnydecodeError, match="draft") as refused:
        LLM(folder)
    assert "\n" not in str(refused.value)


def test_tensors_of_torch_files_are_those_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(24.0).reshape(4, 6)
    saved = {
        "a": whole,
        "b": whole[1:3, 2:].contiguous(),
        "view": whole[1:, ::2],
        "turned": whole.T,
        "half": whole.half(),
        "bfloat16": whole.bfloat16(),
        "integers": torch.arange(5),
        "parameter": torch.nn.Parameter(whole + 1),
        "number": torch.tensor(3.0),
    }
    torch.save(saved, tmp_path / "x.pt")
    readers = open_torch_file(tmp_path / "x.pt")
    assert readers.keys() == saved.keys()
    for name, expected in saved.items():
        read = readers[name]()
        assert np.array_equal(np.asarray(read, np.float64), expected.detach().double().numpy())


class _Evil:
    def __reduce__(self) -> Any:
        return Path, ("x",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": _Evil()}), "asks for pathlib"),
        (pickle.dumps([1]), "no tensors"),
        (pickle.dumps({"a": 1}), "other than tensors"),
        (pickle.dumps({"a": 1})[:-4], "corrupt|malformed"),
        (b"", "corrupt"),
    ],
    ids=["code", "list", "number", "cut", "empty"],
)
def test_torch_files_with_other_contents_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "x.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", content)
    with pytest.raises(CheckpointError, match=message) as refused:
        open_torch_file(file)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="corrupt"):
        open_torch_file(tmp_path / "x.pt")


def test_cut_data_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(50, 50)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data[:100] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="beyond its data"):
        open_torch_file(tmp_path / "y.pt")["a"]()
