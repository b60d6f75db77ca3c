"""`anydecode export-drafter`: EAGLE-3 drafters in GGUF files, in the layout of llama.cpp."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint
from anydecode.certification.tiny_blocks import peagle_checkpoint
from anydecode.cli import main
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_eagle3 import load_eagle3
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.network import Network
from anydecode.quantization.gguf import quantize_file
from anydecode.quantization.gguf_drafter import export_drafter
from draft_folders import changed, drafter_folder, set_keys, without
from gguf_models import HEAD, interleave, make_tensors, plain, write_gguf
from llama_cpp_logits import llama_cpp_tokens

TAPS = [0, 1, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "m.gguf"
    write_gguf(path, "llama", make_tensors("llama"))
    return path


@pytest.fixture(scope="module")
def network(target: Path) -> Network:
    return load_network(load_checkpoint(target))


def rounded(tensor: Any) -> np.ndarray:
    """A tensor as the file has it."""
    values = plain(tensor)
    return values if values.ndim == 1 else values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True}], ids=str)
def test_an_exported_drafter_is_the_same(
    flags: dict[str, Any], target: Path, network: Network, tmp_path: Path
) -> None:
    drafter, out = eagle3_checkpoint(network, **flags), tmp_path / "d.gguf"
    assert export_drafter(drafter, target, out) == out.stat().st_size
    found = load_checkpoint(out)
    assert set(found.tensors) == set(drafter.tensors) - {"t2d"}
    for name in found.tensors:
        expected = drafter.tensors[name]
        if name != "d2t":
            expected = rounded(expected)
        assert np.array_equal(plain(found.tensors[name]), expected), name
    own, other = (load_draft_head(one, network) for one in (drafter, found))
    assert own.spec.states == other.spec.states
    first, second = (one.spec.layers[0] for one in (own, other))
    assert first.attention == second.attention
    assert first.rope is not None and second.rope is not None
    assert np.array_equal(first.rope.frequencies, second.rope.frequencies)
    assert np.array_equal(own.weights.head_tokens, other.weights.head_tokens)  # type: ignore[arg-type]


def test_the_file_has_the_names_and_the_order_of_llama_cpp(
    target: Path, network: Network, tmp_path: Path
) -> None:
    drafter, out = eagle3_checkpoint(network), tmp_path / "d.gguf"
    export_drafter(drafter, target, out)
    reader = gguf.GGUFReader(out)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "eagle3"
    assert values["eagle3.target_layers"] == values["eagle3.extract_layers"] == TAPS
    assert values["eagle3.target_hidden_size"] == network.spec.hidden_size
    assert values["eagle3.norm_before_residual"] is False
    own = gguf.GGUFReader(target)
    for name, field in own.fields.items():
        if name.startswith("tokenizer."):
            assert values[name] == field.contents()
    tensors = {one.name: one for one in reader.tensors}
    prefix = "midlayer.self_attn"
    for part, name in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        expected = interleave(plain(drafter.tensors[f"{prefix}.{part}.weight"]), 4)
        assert np.array_equal(tensors[f"blk.0.{name}.weight"].data, expected.astype(np.float16))
    d2t = tensors["d2t"]
    assert d2t.tensor_type == gguf.GGMLQuantizationType.I64
    assert np.array_equal(d2t.data, np.flatnonzero(drafter.tensors["t2d"]))
    norm = tensors["blk.0.attn_norm_2.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(norm.data, drafter.tensors["midlayer.hidden_norm.weight"])


def test_llama_cpp_opens_the_file_with_the_targets_tokenizer(
    target: Path, network: Network, tmp_path: Path
) -> None:
    for number, change in enumerate((set_keys(), without("lm_head.weight"))):
        out = tmp_path / f"{number}.gguf"
        export_drafter(changed(eagle3_checkpoint(network), change), target, out)
        assert llama_cpp_tokens(out, [""]) == llama_cpp_tokens(target, [""])


def test_a_head_that_the_drafter_lacks_is_the_targets(
    target: Path, network: Network, tmp_path: Path
) -> None:
    """llama.cpp takes the whole head of the target, which has other rows."""
    drafter, out = (
        changed(eagle3_checkpoint(network), without("lm_head.weight")),
        tmp_path / "d.gguf",
    )
    export_drafter(drafter, target, out)
    head = plain(load_checkpoint(out).tensors["lm_head.weight"])
    rows = np.flatnonzero(np.asarray(drafter.tensors["t2d"]))
    np.testing.assert_allclose(head, plain(network.weights.head)[rows], rtol=2**-7)


def test_the_file_drafts_also_in_another_format(
    target: Path, network: Network, tmp_path: Path
) -> None:
    out, small = tmp_path / "d.gguf", tmp_path / "small.gguf"
    export_drafter(eagle3_checkpoint(network), target, out)
    quantize_file(out, small, "q8_0")
    folder = drafter_folder(tmp_path / "folder", eagle3_checkpoint(network), "model.safetensors")
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "seed": 5, "trace": True}
    drafted = []
    for draft in (folder, out, small):
        with LLM(target, draft=draft, dtype="float32") as llm:
            plain_text = llm.generate([5, 6, 7], decoder="autoregressive", **options)
            answer = llm.generate([5, 6, 7], decoder="eagle", **options)
            assert answer.tokens == plain_text.tokens
            drafted.append([event["drafted"] for event in answer.trace or ()])
    assert drafted[0] == drafted[1] and any(drafted[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (eagle_checkpoint, "only EAGLE-3"),
        (peagle_checkpoint, "only EAGLE-3"),
        (lambda network: eagle3_checkpoint(network, norm_before_fc=True), "norms of the target"),
        (lambda network: eagle3_checkpoint(network, norm_output=True), "norms of the target"),
        (
            lambda network: changed(
                eagle3_checkpoint(network), set_keys(rope_scaling={"type": "linear", "factor": 2.0})
            ),
            "scales rotary",
        ),
        (lambda network: Checkpoint("m", Path("m"), {}, {}), "no EAGLE-3"),
    ],
)
def test_what_llama_cpp_does_not_run_is_refused(
    make: Any, message: str, target: Path, network: Network, tmp_path: Path
) -> None:
    with pytest.raises(AnydecodeError, match=message) as refusal:
        export_drafter(make(network), target, tmp_path / "d.gguf")
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2, "supported is 1"),
        ("target_layers", None, "target_layers is missing"),
        ("attention.head_count", 0, "head_count"),
        ("rope.scaling.type", "dynamic", "rope scaling"),
        ("rope.scaling.type", "linear", "scaling.factor is missing"),
    ],
)
def test_bad_files_are_refused(
    key: str, value: Any, message: str, network: Network, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d.gguf"
    export_drafter(eagle3_checkpoint(network), target, out)
    file = GGUFFile(out)
    file.metadata.pop("eagle3.extract_layers")
    file.metadata.pop(f"eagle3.{key}", None)
    if value is not None:
        file.metadata[f"eagle3.{key}"] = value
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_eagle3(file)
    assert "\n" not in str(refusal.value)


def test_stored_divisors_of_rotary_frequencies_are_read(
    network: Network, target: Path, tmp_path: Path
) -> None:
    """Files of Llama 3 have them in place of the parameters of their scaling."""
    out = tmp_path / "d.gguf"
    export_drafter(eagle3_checkpoint(network), target, out)
    file = GGUFFile(out)
    plain_rope = load_draft_head(load_eagle3(file), network).spec.layers[0].rope
    norm, size = file.tensors["output_norm.weight"], HEAD // 2
    file.tensors["rope_freqs.weight"] = replace(
        norm, name="rope_freqs.weight", shape=(size,), num_bytes=4 * size
    )
    scaled = load_draft_head(load_eagle3(file), network).spec.layers[0].rope
    assert plain_rope is not None and scaled is not None
    divisors = plain(file.read("output_norm.weight"))[:size]
    np.testing.assert_allclose(scaled.frequencies * divisors, plain_rope.frequencies, rtol=1e-6)


def test_the_command_writes_the_drafter(
    target: Path, network: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drafter_folder(tmp_path / "folder", eagle3_checkpoint(network), "model.safetensors")
    out = tmp_path / "d.gguf"
    arguments = ["export-drafter", str(target), str(out), "--draft", str(folder), "--json"]
    with pytest.raises(SystemExit) as code:
        main.run(arguments)
    assert code.value.code == 0
    assert json.loads(capsys.readouterr().out)["num_bytes"] == out.stat().st_size
    for wrong, message in (
        (arguments, "--force replaces it"),
        (["export-drafter", str(target), str(tmp_path / "e.gguf")], "give --draft"),
        (["export-drafter", str(folder), str(tmp_path / "e.gguf"), "--draft", str(folder)], "GGUF"),
    ):
        with pytest.raises(SystemExit) as code:
            main.run(wrong)
        assert code.value.code == 2 and message in capsys.readouterr().err
