"""Malformed model files end in one line, whatever is wrong in them: no other exception, no crash,
no list that grows with a number in a file."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from anydecode import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.cli import main
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network
from anydecode.models.gguf_tokenizer import tokenizer_from_gguf
from anydecode.models.limits import MAX_EXPERTS, MAX_LAYERS, MAX_TOKENS
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import open_model
from gguf_models import (
    HIDDEN,
    SIZES,
    finish,
    grouped,
    make_tensors,
    pack,
    start_writer,
    write_folder,
    write_gguf,
)
from model_files import EXPERT_CONFIG, expert_tensors, run_if_valid, tokenizer_json

some = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 30000, 65536, 2**31 - 1, 2**31, 2**40, 2**63 - 1),
    *(1.5, 1e300, -1e300, float("nan"), float("inf"), True, False, None, "", "abc", "64", "\ud800"),
    *([], [1], [None], [[]], ["x"] * 3, {}, {"a": 1}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with stacked experts and a tokenizer; tests write into copies of it."""
    path = write_folder(tmp_path_factory.mktemp("valid") / "m", expert_tensors(), **EXPERT_CONFIG)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return copied(folder, tmp_path / "m")


def copied(folder: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_network(load_checkpoint(path))
    assert "\n" not in str(caught.value)


# --- properties


def test_the_valid_model_runs(folder: Path) -> None:
    assert run_if_valid(folder)


@some
@given(st.dictionaries(st.sampled_from(sorted(EXPERT_CONFIG)), st.sampled_from(VALUES), min_size=1))
def test_any_values_in_a_config(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    path = copied(folder, tmp_path_factory.getbasetemp() / "config")
    (path / "config.json").write_text(json.dumps({**EXPERT_CONFIG, **changes}))
    run_if_valid(path)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "num_attention_heads", 0),
        ("config.json", "hidden_size", None),
        ("config.json", "model_type", "abc"),
        ("config.json", "hidden_act", "abc"),
        ("config.json", "rope_scaling", {"rope_type": "abc"}),
        ("config.json", "eos_token_id", "abc"),
        ("config.json", "mask_token_id", "abc"),
        ("generation_config.json", "eos_token_id", [2, "abc"]),
        ("sentence_bert_config.json", "max_seq_length", 0),
        ("1_Pooling/config.json", "pooling_mode", "abc"),
    ],
)
def test_a_wrong_value_names_its_file(copy: Path, file: str, key: str, value: Any) -> None:
    modules = [{"type": "models.Transformer"}, {"type": "models.Pooling", "path": "1_Pooling"}]
    write_json(copy / "modules.json", modules)
    write_json(copy / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    content = EXPERT_CONFIG if file == "config.json" else {}
    write_json(copy / file, {**content, key: value})
    refused(copy, f"^{re.escape(str(copy / file))}: ")


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@some
@given(
    st.sampled_from(sorted(expert_tensors())),
    st.sampled_from(
        [
            lambda x: x[:-1],
            lambda x: x[..., :-1],
            lambda x: x[:0],
            lambda x: x[None],
            lambda x: x.ravel(),
            lambda x: x.T,
            lambda x: np.concatenate([x, x]),
            lambda x: x.ravel()[0].reshape(()),
            lambda x: x.astype(np.int32),
            lambda x: x.astype(np.float64),
            lambda x: x.astype(np.float16),
            lambda x: x * np.float32("nan"),
        ]
    ),
)
def test_any_shape_or_type_of_a_tensor(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    path = copied(folder, tmp_path_factory.getbasetemp() / "tensors")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, path / "model.safetensors")
    run_if_valid(path)


@some
@given(st.data())
def test_any_header_of_safetensors(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = copied(folder, tmp_path_factory.getbasetemp() / "header")
    stored = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", stored[:8])[0]
    header = json.loads(stored[8:start])
    name = data.draw(st.sampled_from(sorted(header)))
    entry = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "rest"]))
    value = data.draw(st.sampled_from([*VALUES, [-1, 64], [0, 2**63], "I64", "F4"]))
    header[name] = {**header[name], entry: value} if entry != "rest" else value
    text = json.dumps(header).encode()
    length = data.draw(st.sampled_from([len(text), 0, 1, 2**31, 2**63, 2**64 - 1]))
    (path / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + stored[start:])
    run_if_valid(path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, "smollm3", make_tensors("smollm3"), "Q8_0")
    assert run_if_valid(path)
    return path.read_bytes()


@some
@given(st.data())
def test_any_bytes_in_the_header_of_gguf(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    changed = bytearray(gguf_bytes)
    header = gguf_bytes.index(b"output_norm.weight") + 200
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=2),
                st.sampled_from([2**31, 2**32 - 1, 2**40, 2**64 - 1]).map(struct.Struct("<Q").pack),
            )
        )
        at = data.draw(st.integers(0, header - len(new)))
        changed[at : at + len(new)] = new
    end = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    path.write_bytes(changed[:end])
    run_if_valid(path)


# --- files that change while they are in use

OPENED = """
import os, sys
from anydecode import LLM
with LLM(sys.argv[1], threads=1, prefix_cache=False) as llm:
    before = llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True).tokens
    for size in (1000, 0):
        os.truncate(f"{sys.argv[1]}/model.safetensors", size)
        assert llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True).tokens == before
"""
OPENING = """
import os, sys
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
checkpoint = load_checkpoint(sys.argv[1])
os.truncate(f"{sys.argv[1]}/model.safetensors", 0)
sum(x.data.sum() for x in load_network(checkpoint).matrices())
"""


def run_program(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", program, str(path)]
    # With the sanitizer, the signal is left to the system.
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:handle_sigbus=0"
    environment = {**os.environ, "ASAN_OPTIONS": options}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(load_library() is None, reason="other kernels read the file in every pass")
@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be truncated there")
def test_an_opened_model_does_not_need_its_file(copy: Path) -> None:
    done = run_program(OPENED, copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="as documented for Linux")
def test_a_file_that_is_truncated_while_it_is_opened_ends_the_process(copy: Path) -> None:
    done = run_program(OPENING, copy)
    assert done.returncode == -signal.SIGBUS and "Bus error" in done.stderr, done.stderr


# --- counts


def counted(path: Path, layers: int, experts: int, num_tensors: int = 1) -> Path:
    """A GGUF file that declares layers and experts which it does not have."""
    writer = start_writer(path, "qwen3moe", {**SIZES, "num_hidden_layers": layers})
    writer.add_expert_count(experts)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((40, HIDDEN), np.float32))
    for index in range(num_tensors):
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.zeros(HIDDEN, np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("layers", "experts", "message"),
    [
        (30_000, 30_000, "block_count is 30000; allowed is an integer from 1 to 4096"),
        (2**31, 1, "block_count is 2147483648"),
        (4000, 4000, "experts of all layers is 16000000; allowed is .* to 131072"),
        (1, 2**31, "expert_count is 2147483648"),
    ],
)
def test_numbers_of_layers_and_experts_are_bounded(
    layers: int, experts: int, message: str, tmp_path: Path
) -> None:
    refused(counted(tmp_path / "m.gguf", layers, experts, min(layers, 301)), message)


def test_a_list_of_layers_is_not_built_for_a_number_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = make_tensors("smollm3")
    write_gguf(path, "smollm3", tensors, sizes={**SIZES, "num_hidden_layers": 2**31 - 1})
    refused(path, "block_count is 2147483647")


@pytest.mark.parametrize(
    ("key", "high"),
    [
        ("num_hidden_layers", MAX_LAYERS),
        ("num_experts", MAX_EXPERTS),
        ("vocab_size", MAX_TOKENS),
        ("num_attention_heads", 1 << 16),
    ],
)
def test_counts_of_a_config_are_bounded(key: str, high: int, copy: Path) -> None:
    for value in (high + 1, -1):
        (copy / "config.json").write_text(json.dumps({**EXPERT_CONFIG, key: value}))
        refused(copy, f"{key} is {value}; allowed is an integer from . to {high}")


# --- weights and the spec


def test_the_data_of_weights_must_match_their_format() -> None:
    network = load_network(load_checkpoint("tiny-autoregressive"))
    stored = network.weights.embedding
    wrong = Weight(stored.format, stored.out_features, stored.in_features, stored.data[:-1], "x")
    network.weights.embedding = network.weights.head = wrong
    with pytest.raises(CheckpointError, match="x holds .* not a .* matrix of"):
        Network(network.spec, network.weights)


def test_vectors_must_be_float32() -> None:
    network = load_network(load_checkpoint("tiny-autoregressive"))
    network.weights.final_norm = network.weights.final_norm.astype(np.float64)
    with pytest.raises(CheckpointError, match="final norm is .*float64.*, not float32"):
        Network(network.spec, network.weights)


# --- files of a folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        ("config.json", b"\xff\xfe", "cannot be read as UTF-8"),
        ("tokenizer.json", b"[1]", "not a tokenizer"),
        ("tokenizer.json", b'{"model": {"type": 5}}', "not a tokenizer"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read as UTF-8"),
        ("tokenizer_config.json", b'{"mask_token": "\\ud800"}', "malformed: UnicodeEncodeError"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "../x.safetensors"}}', "unsafe"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "/x.safetensors"}}', "unsafe"),
        ("model.safetensors.index.json", b'{"weight_map": []}', "no valid weight_map"),
        ("model.safetensors", struct.pack("<Q", 2**63), "truncated or corrupt"),
    ],
)
def test_files_of_a_folder(name: str, content: bytes, message: str, copy: Path) -> None:
    (copy / name).write_bytes(content)
    refused(copy, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": 5}, "architectures is 5; allowed is a list of str"),
        ({"architectures": [[]]}, "architectures is"),
        ({"architectures": ["a\nb"]}, "architecture a b of model type"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "abc"}, "hidden_size is 'abc'"),
        ({"vocab_size": float("inf")}, "vocab_size is inf"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"num_experts_per_tok": 5}, "experts_per_token is 5"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
        ({"quantization_config": {"quant_method": []}}, "quantised with \\[\\]"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4.0}}, "4.0 bits"),
    ],
)
def test_values_of_a_config(change: dict[str, Any], message: str, copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({**EXPERT_CONFIG, **change}))
    refused(copy, message)


@pytest.mark.parametrize(
    "entry", [{"name": 1, "template": "x"}, {"name": "default", "template": 2}, {"name": []}, 5]
)
def test_templates_that_are_no_texts_are_ignored(entry: Any, copy: Path) -> None:
    named = {"name": "rag", "template": "text"}
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": [entry, named]}))
    tokenizer = load_checkpoint(copy).tokenizer
    assert tokenizer is not None
    with pytest.raises(InvalidRequestError, match="its templates are rag"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def tokenizer_with(copy: Path, **changes: Any) -> Path:
    (copy / "tokenizer.json").write_text(json.dumps({**tokenizer_json(), **changes}))
    return copy


def test_a_tokenizer_that_panics_is_refused(copy: Path) -> None:
    start = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": start, "pair": start, "special_tokens": {}}
    refused(tokenizer_with(copy, post_processor=template), "cannot encode a text")


def test_a_text_that_a_tokenizer_cannot_encode_is_refused(copy: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    tokenizer = load_checkpoint(tokenizer_with(copy, model=model)).tokenizer
    assert tokenizer is not None and tokenizer.encode("a") == [0]
    with pytest.raises(InvalidRequestError, match="cannot encode this text: .*Missing"):
        tokenizer.encode("b")


def test_stored_padding_allocates_nothing(copy: Path) -> None:
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    tokenizer = load_checkpoint(
        tokenizer_with(copy, padding={**padding, "pad_token": "a", "pad_to_multiple_of": None})
    ).tokenizer
    assert tokenizer is not None and tokenizer.encode("ab") == [0, 1]


def test_token_ids_are_bounded(copy: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    refused(tokenizer_with(copy, model=model), "largest token id of the tokenizer is 4294967295")


def quantized(path: Path, **changes: np.ndarray) -> Path:
    codes, scales, zeros, groups, _ = grouped(4, True)
    parts = {
        "qweight": pack(codes, 4, 0),
        "qzeros": pack(zeros - 1, 4, 1),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }
    tensors = {f"x.{name}": part for name, part in {**parts, **changes}.items() if part.ndim}
    settings = {"quant_method": "gptq", "bits": 4}
    return write_folder(path, tensors, quantization_config=settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "scales": np.empty((0, 24), np.float16),
                "qzeros": np.empty((0, 3), np.int32),
                "g_idx": np.array(0),  # left out
            },
            "do not fit together",
        ),
        ({"scales": np.ones(24, np.float16)}, "do not fit together"),
        ({"scales": np.ones((2, 24), np.int32)}, "are int32, no float"),
        ({"qweight": np.ones((16, 24), np.uint8)}, "not a matrix of int32"),
        ({"qweight": np.ones((16, 24), np.float32)}, "not a matrix of int32"),
        ({"g_idx": np.full(128, -1, np.int32)}, "do not fit together"),
        ({"g_idx": np.full(128, 2, np.int32)}, "do not fit together"),
        ({"g_idx": np.zeros(127, np.int32)}, "do not fit together"),
    ],
)
def test_gptq_parts(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    tensors = load_checkpoint(quantized(tmp_path / "m", **changes)).tensors
    with pytest.raises(CheckpointError, match=message):
        tensors["x.weight"]


# --- adapters


def adapter(path: Path, base: Path, rank: int = 2) -> Path:
    path.mkdir()
    factors = {"A": np.ones((rank, 8), np.float32), "B": np.ones((8, rank), np.float32)}
    tensors = {f"m.lora_{side}.weight": factor for side, factor in factors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"base_model_name_or_path": str(base), "r": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_adapters_based_on_each_other_are_refused(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    adapter(first, second)
    adapter(second, third)
    adapter(third, second)
    for path in (first, second):
        refused(path, "the base models of its adapters form a circle")
    refused(adapter(tmp_path / "d", tmp_path / "d"), "form a circle")


def test_an_adapter_of_rank_0_is_refused(tmp_path: Path) -> None:
    refused(adapter(tmp_path / "a", Path("tiny-autoregressive"), rank=0), "factors of shape")


# --- GGUF


def write_raw(path: Path, *parts: bytes, tensors: int = 0, keys: int = 0) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, offset: int, *shape: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", 0, offset)


KEY = text("k") + struct.pack("<IB", 0, 1)
GGUF_FILES: list[tuple[dict[str, Any], list[bytes], str]] = [
    ({"tensors": 2**63}, [], "declares more entries than the file has bytes"),
    ({"keys": 2**64 - 1}, [], "declares more entries than the file has bytes"),
    ({"keys": 1}, [struct.pack("<Q", 2**60)], "truncated"),
    ({"keys": 1}, [text("k"), struct.pack("<IQ", 8, 2**60)], "truncated"),
    ({"keys": 1}, [text("k"), struct.pack("<IIQ", 9, 8, 2**60)], "does not fit"),
    ({"keys": 1}, [text("k"), struct.pack("<IIQ", 9, 4, 2**60)], "does not fit"),
    ({"keys": 1}, [text("k"), struct.pack("<I", 99)], "unknown metadata type 99"),
    ({"keys": 2}, [KEY, KEY], "metadata 'k' appear twice"),
    ({"tensors": 1}, [tensor("x", 0, 2**40, 2**20)], "truncated"),
    ({"tensors": 1}, [tensor("x", 2**40, 8), bytes(64)], "truncated"),
    ({"tensors": 1}, [tensor("x", 1, 8), bytes(64)], "not aligned"),
    ({"tensors": 1}, [tensor("x", 0, 8, 8, 8, 8, 8), bytes(64)], "has 5 dimensions"),
    ({"tensors": 2}, [tensor("x", 0, 8), tensor("x", 0, 8), bytes(128)], "appears twice"),
    ({"tensors": 1}, [tensor("y" * 100_000, 0, 0)], "of shape \\[0\\]|\\.\\.\\."),
]


@pytest.mark.parametrize(("counts", "parts", "message"), GGUF_FILES)
def test_headers_of_gguf(
    counts: dict[str, Any], parts: list[bytes], message: str, tmp_path: Path
) -> None:
    refused(write_raw(tmp_path / "m.gguf", *parts, **counts), message)


def test_tensors_of_gguf_may_overlap(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", make_tensors("llama"))
    info = {one.name: one for one in gguf.GGUFReader(path).tensors}
    offsets = [
        struct.pack("<Q", int(info[f"blk.{layer}.attn_norm.weight"].field.parts[-1][0]))
        for layer in range(2)
    ]
    stored = path.read_bytes()
    assert stored.count(offsets[1]) == 1
    path.write_bytes(stored.replace(offsets[1], offsets[0]))
    assert run_if_valid(path)


def test_a_long_token_is_refused_before_it_is_split() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "x" * 10_000_000],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    with pytest.raises(CheckpointError, match="10000000 characters; allowed are up to 4096"):
        tokenizer_from_gguf(metadata, "m.gguf")


# --- threads


@pytest.mark.parametrize("threads", [0, -1, 257, 2**31, 2**70, 1.5, "2", True])
def test_threads_are_validated_for_a_model_object(threads: Any) -> None:
    with pytest.raises(InvalidRequestError, match="threads is .* allowed is an integer from 1"):
        open_model(tiny_model(), threads=threads)
    with pytest.raises(InvalidRequestError, match="threads is .* allowed is an integer from 1"):
        LLM(tiny_model(), threads=threads)


@pytest.mark.parametrize("threads", [-1, 257, 2**31])
def test_threads_of_training_are_validated(threads: int) -> None:
    pytest.importorskip("torch")
    from anydecode.training.diffusion import limit_threads

    with pytest.raises(InvalidRequestError, match="threads is .* allowed is an integer from 1"):
        limit_threads(threads)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--model", "tiny-autoregressive", "--prompt", "a"],
        ["certify", "prompt-lookup"],
        ["serve", "tiny-autoregressive"],
        ["score", "--model", "tiny-autoregressive", "--prompt", "a", "--continuation", "b"],
    ],
)
def test_threads_of_commands_are_validated(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("-1", "0", "99999999999"):
        with pytest.raises(SystemExit) as ended:
            main.run([*command, "--threads", value])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "threads is" in error and error.count("\n") == 1
