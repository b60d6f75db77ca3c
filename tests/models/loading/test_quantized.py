"""Quantised weights in the layouts of the tools that write them, from the folder to the logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

import quantized_parts
from anydecode.errors import CheckpointError
from anydecode.kernels.formats import (
    BLOCKS,
    check_weight,
    dequantize,
    dequantize_rows,
    in_order,
    quantize,
)
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from quantized_parts import CASES, Case
from tiny_models import built, chain, checkpoint_of, hf_model, logits

SIZES = {
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7]
#: The kind of a tensor of torchao, by the type of its numbers.
KINDS = {"int8": "IntxUnpackedToInt8Tensor", "float8_e4m3fn": "Float8Tensor"}


def matrices() -> dict[str, np.ndarray]:
    """The modules of a Llama and their weights."""
    generator = np.random.default_rng(5)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {
        f"model.layers.{layer}.{name}": generator.standard_normal(shape, np.float32) * 0.1
        for layer in range(2)
        for name, shape in shapes.items()
    }


def others() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(6)
    tensors: dict[str, np.ndarray] = {
        name: generator.standard_normal((40, 256), np.float32)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    norms = [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return tensors | {name: np.ones(256, np.float32) for name in (*norms, "model.norm.weight")}


def write(folder: Path, case: Case) -> tuple[Path, Path]:
    """A folder in a tool's layout, and one with the numbers that it means."""
    quantized, plain, kinds = others(), others(), {}
    for module, matrix in matrices().items():
        parts, values = case.write(matrix, **case.options)
        quantized |= {f"{module}.{part}": array for part, array in parts.items()}
        plain[f"{module}.weight"] = values
        if case.settings["quant_method"] == "torchao":
            kinds[f"{module}.weight"] = kind_of(parts)
    settings = {"quantization_config": case.settings}
    if case.settings["quant_method"] == "modelopt":
        settings = {}
    one = write_folder(folder / "one", quantized, **SIZES, **settings)
    if not settings:
        content = {"producer": {"name": "modelopt"}, "quantization": case.settings}
        (one / "hf_quant_config.json").write_text(json.dumps(content))
    if kinds:
        save_file(quantized, one / "model.safetensors", header(quantized, kinds))
    return one, write_folder(folder / "two", plain, **SIZES)


def kind_of(parts: dict[str, np.ndarray]) -> dict[str, Any]:
    kind = KINDS[parts["_weight_qdata"].dtype.name]
    return {"_type": kind, "_data": {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}


def header(tensors: dict[str, np.ndarray], kinds: dict[str, Any]) -> dict[str, str]:
    plain = {name: {"_type": "Tensor"} for name in tensors if "_weight_" not in name}
    texts = {name: json.dumps(entry) for name, entry in {**plain, **kinds}.items()}
    return {**texts, "tensor_names": json.dumps(list(texts))}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    case = CASES[name]
    one, two = write(tmp_path, case)
    checkpoint, plain = load_checkpoint(one), load_checkpoint(two)
    assert set(checkpoint.tensors) == set(plain.tensors)
    for module in matrices():
        weight, expected = checkpoint.tensors[f"{module}.weight"], plain.tensors[f"{module}.weight"]
        assert isinstance(weight, Weight) and isinstance(expected, np.ndarray)
        assert weight.format == case.format
        error = np.abs(dequantize(weight) - expected)
        if weight.format == "Q4_1":  # offsets are rounded by less than 0.8% of a step
            assert error.max() < 0.008 * case_step(case, expected)
        else:  # tools round products to the type of the scales
            kind = weight.data.dtype if weight.format in ("F16", "BF16") else np.dtype(np.float32)
            share = {2: 2**-8 if kind == bfloat16 else 2**-10}.get(kind.itemsize, 2e-6)
            assert (error <= share * np.abs(expected) + 1e-9).all()
    reference = logits(built(plain, executor=choose_executor("native")), chain(TEXT))
    native = logits(built(checkpoint, executor=choose_executor("native")), chain(TEXT))
    share = np.linalg.norm(native - reference) / np.linalg.norm(reference)
    is_packed = case.format not in ("F32", "F16", "BF16")
    assert share < (0.03 if is_packed else 0.01 if case.format != "F32" else 1e-5)


def case_step(case: Case, values: np.ndarray) -> float:
    """The largest step between the numbers of a matrix with offsets."""
    groups = values.reshape(len(values), -1, 32)
    return float((groups.max(-1) - groups.min(-1)).max()) / ((1 << case.options["bits"]) - 1)


@pytest.mark.parametrize(
    "name",
    ["bitsandbytes nf4, runs of 32", "hqq 8 bits", "packed int8, zero points", "fp8, blocks"],
)
def test_plain_numbers_are_the_bits_of_the_tools(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    matrix = np.random.default_rng(2).standard_normal((6, 256), np.float32)
    parts, values = case.write(matrix, **case.options)
    tensors = {f"x.{part}": array for part, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight)
    assert np.array_equal(weight.data, values.astype(weight.data.dtype))


def test_an_order_that_is_not_used(tmp_path: Path) -> None:
    case = CASES["packed int4"]
    matrix = np.random.default_rng(2).standard_normal((6, 128), np.float32)
    parts, values = case.write(matrix)
    parts["weight_g_idx"] = np.full(128, -1, np.int32)
    tensors = {f"x.{part}": array for part, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.format == "Q4_0"
    assert np.array_equal(dequantize(weight), values)


@pytest.mark.parametrize(("method", "file"), [("gptq", "quantize_config"), ("awq", "quant_config")])
def test_settings_of_early_versions_are_in_a_file_of_their_own(
    method: str, file: str, tmp_path: Path
) -> None:
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    parts, values = CASES[method].write(matrix)
    folder = write_folder(tmp_path / "m", {f"x.{name}": part for name, part in parts.items()})
    settings: dict[str, Any] = {"bits": 4, "group_size": 64, "desc_act": False}
    if method == "awq":
        settings = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (folder / f"{file}.json").write_text(json.dumps(settings))
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.format == "Q4_1"
    assert np.abs(dequantize(weight) - values).max() < 0.008


def test_inputs_of_another_order_are_each_stored_once(tmp_path: Path) -> None:
    case = CASES["gptq, order, symmetric"]
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    parts, values = case.write(matrix, **case.options)
    tensors = {f"x.{name}": part for name, part in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.order is not None
    assert np.array_equal(dequantize(weight), values)
    assert np.array_equal(dequantize_rows(weight, [3, 0]), values[[3, 0]])
    assert np.array_equal(dequantize(in_order(weight)), values.astype(np.float16))
    check_weight(weight)
    for order in (weight.order[:-1], np.zeros_like(weight.order), weight.order.astype(np.int64)):
        with pytest.raises(CheckpointError, match="inputs of x is not each of the 128 inputs"):
            check_weight(replace(weight, order=order))


#: Each token runs through all experts, so that rounding changes no choice.
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 4, "model_type": "mixtral"}


def experts() -> dict[str, np.ndarray]:
    """The modules of a Mixtral's experts and their weights."""
    generator = np.random.default_rng(7)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    return {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}": (
            generator.standard_normal(shape, np.float32) * 0.1
        )
        for layer in range(2)
        for expert in range(4)
        for name, shape in shapes.items()
    }


def write_experts(folder: Path, case: Case, is_swapped: bool = False) -> tuple[Path, Path]:
    """A Mixtral whose experts are in a tool's layout, and one with the numbers that it means. Each
    matrix has its inputs in an order of its own, if they have one. With `is_swapped`, the first two
    matrices of each expert have each other's."""
    generator = np.random.default_rng(8)
    quantized = others() | matrices_of_attention()
    for layer in range(2):
        router = generator.standard_normal((4, SIZES["hidden_size"]), np.float32)
        quantized[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router * 0.1
    plain, options = dict(quantized), dict(case.options)
    for seed, (module, matrix) in enumerate(experts().items()):
        if "has_order" in options:
            options["seed"] = seed
        parts, plain[f"{module}.weight"] = case.write(matrix, **options)
        quantized |= {f"{module}.{part}": array for part, array in parts.items()}
    if is_swapped:
        order = "g_idx" if case.settings["quant_method"] == "gptq" else "weight_g_idx"
        for module in experts():
            if module.endswith(".w1"):
                one, other = f"{module}.{order}", f"{module[:-1]}3.{order}"
                quantized[one], quantized[other] = quantized[other], quantized[one]
    settings = {"quantization_config": case.settings}
    one = write_folder(folder / "one", quantized, **EXPERTS, **settings)
    return one, write_folder(folder / "two", plain, **EXPERTS)


def matrices_of_attention() -> dict[str, np.ndarray]:
    return {f"{name}.weight": x for name, x in matrices().items() if ".self_attn." in name}


PACKED_EXPERTS = [
    *("gptq", "gptq, order", "gptq, order, symmetric", "gptq 8 bits, order", "gptq 3 bits, order"),
    *("packed int4", "packed int4, order", "packed int4, zero points", "packed int8", "mxfp4"),
    *("nvfp4", "awq", "awq gemv", "hqq 4 bits", "hqq 3 bits", "bitsandbytes int8"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PACKED_EXPERTS)
def test_experts_stay_packed(name: str, tmp_path: Path) -> None:
    """In no more bytes than the same matrices outside of experts, an order of inputs included."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    case = CASES[name]
    one, two = write_experts(tmp_path, case)
    reference = logits(built(load_checkpoint(two), executor=choose_executor("native")), chain(TEXT))
    model = built(load_checkpoint(one), executor=choose_executor("native"))
    found = [weight for weight in model.network.matrices() if ".experts." in weight.name]
    assert len(found) == 24 and {weight.format for weight in found} == {case.format}
    has_order = bool(case.options.get("has_order"))
    assert all((weight.order is not None) == has_order for weight in found)
    native = logits(model, chain(TEXT))
    share = np.linalg.norm(native - reference) / np.linalg.norm(reference)
    assert share < 0.03
    size = model.executor.packer.num_bytes  # type: ignore[attr-defined]
    plain = sum(x.nbytes for x in (*others().values(), *matrices_of_attention().values()))
    values, block = BLOCKS[case.format]
    codes = sum(x.size // values * block for x in experts().values())
    orders = sum(4 * x.shape[1] for x in experts().values()) if has_order else 0
    assert size < plain + 1.05 * codes + orders + 2**14  # routers, and what is padded
    cache = model.new_cache(len(TEXT))
    for position, token in enumerate(TEXT):  # the same bits one by one
        assert np.array_equal(logits(model, chain([token], position), cache)[0], native[position])
    if has_order:
        swapped, _ = write_experts(tmp_path, case, is_swapped=True)
        other = built(load_checkpoint(swapped), executor=choose_executor("native"))
        difference = logits(other, chain(TEXT)) - reference
        assert np.linalg.norm(difference) / np.linalg.norm(reference) > 0.1


def test_experts_of_gpt_oss_as_modules_keep_their_orders() -> None:
    """Gate and up are rows of one matrix, which have one order."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "sliding_window": 8}
    model = hf_model("GptOss", **sizes, num_local_experts=4, num_experts_per_tok=4)
    plain, stored, generator = checkpoint_of(model), checkpoint_of(model), np.random.default_rng(3)
    for name in [name for name in stored.tensors if ".experts." in name]:
        block, _, kind = name.rpartition(".")
        stack = stored.tensors.pop(name)
        assert isinstance(stack, np.ndarray)
        plain.tensors[name] = values = stack.copy()
        for expert, part in enumerate(stack):
            if kind.endswith("_bias"):
                stored.tensors[f"{block}.{kind.removesuffix('_bias')}s.{expert}.bias"] = part
                continue
            order = generator.permutation(len(part)).astype(np.int32)
            weight = quantize(part.T[:, order], "Q8_0")
            values[expert][order] = dequantize(weight).T
            stored.tensors[f"{block}.{kind}s.{expert}.weight"] = replace(weight, order=order)
    expected = logits(built(plain), chain(TEXT))
    packed = built(stored)
    found = [weight for weight in packed.network.matrices() if ".experts." in weight.name]
    assert len(found) == 3 * 4 * 3 and all(weight.order is not None for weight in found)
    difference = logits(packed, chain(TEXT)) - expected
    assert np.linalg.norm(difference) < 1e-5 * np.linalg.norm(expected)
    for tensor in stored.tensors.values():
        if isinstance(tensor, Weight):
            tensor.order = None
    difference = logits(built(stored), chain(TEXT)) - expected
    assert np.linalg.norm(difference) > 0.1 * np.linalg.norm(expected)


def test_the_kernels_of_cuda_read_inputs_in_another_order(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from anydecode.kernels.cuda.packing import pack

    case = CASES["gptq, order, symmetric"]
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    tensors = {f"x.{name}": part for name, part in case.write(matrix, **case.options)[0].items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.order is not None
    packed = pack([weight], torch.device("cpu"))
    assert packed.bits == 4 and packed.order is not None
    assert np.array_equal(packed.order.numpy(), weight.order)
    assert packed.num_bytes < 32 * 128 * 0.6 + 128 * 8 + 1


def test_the_kernels_of_cuda_read_numbers_of_bitsandbytes_as_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from anydecode.kernels.cuda.packing import pack

    case = CASES["bitsandbytes nf4"]
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    parts, values = case.write(matrix)
    tensors = {f"x.{name}": part for name, part in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.format == "NF4"
    packed = pack([weight], torch.device("cpu"))
    assert packed.takes_bfloat16
    assert np.array_equal(packed.codes.float().numpy(), values.astype(bfloat16).astype(np.float32))


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_settings_may_stand_in_other_places(place: str, tmp_path: Path) -> None:
    case = CASES["packed int4"]
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    parts, values = case.write(matrix)
    tensors = {f"x.{name}": part for name, part in parts.items()}
    inner = {"quantization_config": case.settings} if place == "text_config" else case.settings
    folder = write_folder(tmp_path / "m", tensors, **{place: inner})
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and np.array_equal(dequantize(weight), values)


def test_hqq_writes_no_settings_of_its_own(tmp_path: Path) -> None:
    parts, values = quantized_parts.hqq(matrices()["model.layers.0.mlp.down_proj"], bits=8)
    folder = write_folder(tmp_path / "m", {f"x.{part}": array for part, array in parts.items()})
    tensors = load_checkpoint(folder).tensors
    weight = tensors["x.weight"]
    assert set(tensors) == {"x.weight"} and isinstance(weight, Weight)
    assert np.array_equal(dequantize(weight), values)


SWAPPED = {
    "bitsandbytes nf4": ("weight", lambda x: x >> 4 | x << 4),
    "hqq 4 bits": ("W_q", lambda x: x >> 4 | x << 4),
    "packed int4": ("weight_packed", lambda x: x.view(np.uint8)[:, ::-1].copy().view(np.int32)),
    "packed int4, order": ("weight_g_idx", lambda x: np.sort(x)),
    "packed int4, zero points": ("weight_zero_point", lambda x: x * 0),
    "fp8, outputs": ("weight_scale", lambda x: x[::-1].copy()),
    "gptq 3 bits": ("qzeros", lambda x: x.view(np.uint8)[:, ::-1].copy().view(np.int32)),
    "gptq, order": ("g_idx", lambda x: np.sort(x)),
    "awq gemv": ("qweight", lambda x: x.view(np.uint8)[:, ::-1].copy().view(np.int32)),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_another_order_has_other_weights(name: str, tmp_path: Path) -> None:
    """Negative controls: nibbles, words, groups, zero points and outputs in another order."""
    case, (part, change) = CASES[name], SWAPPED[name]
    matrix = np.random.default_rng(2).standard_normal((32, 128), np.float32)
    parts, values = case.write(matrix, **case.options)
    parts[part] = change(parts[part])
    tensors = {f"x.{name}": array for name, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight)
    assert np.abs(dequantize(weight) - values).max() > 0.1


STATE = "weight.quant_state.bitsandbytes__nf4"


def text(content: str) -> np.ndarray:
    return np.frombuffer(content.encode(), np.uint8).copy()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bitsandbytes nf4", {"weight": np.zeros((3, 1), np.uint8)}, "do not fit together"),
        ("bitsandbytes nf4", {"weight.absmax": np.zeros(3, np.float32)}, "do not fit together"),
        ("bitsandbytes nf4", {"weight.quant_map": np.zeros(8, np.float32)}, "not the table of NF4"),
        (
            "bitsandbytes nf4",
            {"weight.quant_map": np.array(quantized_parts.FP4, np.float32)},
            "the quant_map of 'x' is not the table of NF4",
        ),
        (
            "bitsandbytes nf4",
            {"weight.absmax": np.full(8, np.nan, np.float32)},
            "a scale of 'x' is not finite",
        ),
        (
            "bitsandbytes nf4",
            {"weight.absmax": np.ones(8, np.uint8)},
            "without nested_quant_map, nested_absmax, nested_blocksize, nested_offset; allowed",
        ),
        (
            "bitsandbytes nf4",
            {STATE: text('{"shape": [4, 128], "blocksize": 96}')},
            "the blocksize of 'x' is 96; allowed are 32, 64, 128, .*, 4096",
        ),
        ("bitsandbytes nf4", {STATE: text("{")}, "is not valid JSON"),
        ("bitsandbytes nf4", {STATE: text("[]")}, "is no JSON object"),
        ("bitsandbytes nf4", {STATE: text('{"shape": [4]}')}, "the shape of 'x' is"),
        ("bitsandbytes nf4", {STATE: text('{"shape": [4, 4]}')}, "the blocksize of .x. is None"),
        (
            "bitsandbytes nf4",
            {STATE: text('{"shape": [4, 128], "blocksize": 64, "dtype": "int4"}')},
            "quantised from 'int4'; supported are float32",
        ),
        ("bitsandbytes int8", {"weight": np.zeros((4, 128), np.uint8)}, "do not fit together"),
        ("bitsandbytes int8", {"weight_format": np.array(1, np.uint8)}, "supported is 0"),
        ("bitsandbytes int8", {"SCB": np.full(4, np.nan, np.float32)}, "is not finite"),
        ("hqq 4 bits", {"W_q": np.zeros((1, 32), np.uint8)}, "do not fit together"),
        ("hqq 4 bits", {"scale": np.ones((3, 1), np.float16)}, "do not fit together"),
        ("hqq 4 bits", {"packing": text("5bit_u8")}, "is '5bit_u8'; supported are 8bit_u8, 4bit"),
        ("hqq 4 bits", {"compute_dtype": text("torch.int8")}, "is 'torch.int8'; supported are"),
        ("hqq 4 bits", {"quant_zero": np.array(1, np.uint8)}, "are quantised themselves"),
        ("hqq 4 bits", {"shape": np.array([4], np.int64)}, "has the shape"),
        ("packed int4", {"weight_packed": np.zeros((4, 17), np.int32)}, "allowed are 1 to 8"),
        ("packed int4", {"weight_packed": np.zeros((3, 16), np.int32)}, "do not fit together"),
        ("packed int4", {"weight_scale": np.ones((4, 3), bfloat16)}, "have 3 groups"),
        ("packed int4", {"weight_scale": np.ones((4, 4), np.int32)}, "are int32, no float"),
        ("packed int4, order", {"weight_g_idx": np.full(128, 4, np.int32)}, "is not a group, of 4"),
        (
            "packed int4, zero points",
            {"weight_zero_point": np.ones((2, 4), np.int32)},
            "do not fit",
        ),
        ("int8", {"weight": np.zeros((4, 128), np.uint8)}, "do not fit together"),
        ("int8", {"weight_scale": np.ones((3, 1), bfloat16)}, "do not fit together"),
        ("mxfp4", {"weight_scale": np.full((4, 4), 255, np.uint8)}, "exponents below 255"),
        ("mxfp4", {"weight_scale": np.zeros((4, 3), np.uint8)}, "do not fit together"),
        ("modelopt fp8", {"weight": np.zeros((4, 128), np.int8)}, "do not fit together"),
        ("modelopt fp8, outputs", {"weight_scale": np.ones(3, np.float32)}, "do not fit together"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(
    name: str, changes: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    matrix = np.random.default_rng(2).standard_normal((4, 128), np.float32)
    parts = case.write(matrix, **case.options)[0] | changes
    tensors = {f"x.{part}": array for part, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=case.settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder).tensors["x.weight"]
    assert "\n" not in str(caught.value) and "'x" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quip"}, "quantised with 'quip' are not supported; .*bitsandbytes, hqq"),
        ({"load_in_4bit": True}, "quantised with None are not supported"),
        ("gptq", "quantised with None are not supported"),
        (quantized_parts.compressed("marlin-24"), "format 'marlin-24' is not supp.*pack-quantized"),
        ({**quantized_parts.PACKED, "config_groups": [1]}, "allowed is an object of objects"),
        (
            {**quantized_parts.PACKED, "transform_config": {"config_groups": {"R1": {}}}},
            "with a transform_config is not supported",
        ),
        (quantized_parts.compressed("float-quantized", block_structure=[0, 1]), "block_structure"),
        (
            {**quantized_parts.PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "format 'sparse-24-bitmask' is not supported",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "'W4A8_AWQ' is not .*are FP8, FP8_",
        ),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"a": np.zeros(2)}, quantization_config=settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_the_error_says_whether_transformers_reads_a_method(tmp_path: Path) -> None:
    pytest.importorskip("transformers.quantizers.auto")
    for method, is_read in (("quark", True), ("quip", False)):
        settings = {"quant_method": method}
        folder = write_folder(tmp_path / "m", {"a": np.zeros(2)}, quantization_config=settings)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder)
        advice = "transformers reads it, with fewer guarantees: backend='transformers'"
        assert (advice in str(caught.value)) == is_read


def test_other_tensors_of_torchao_are_refused(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "m", {"a": np.zeros(2)}, quantization_config=quantized_parts.TORCHAO
    )
    kinds = {"x.weight": {"_type": "Int4TilePackedTo4dTensor"}}
    save_file({"a": np.zeros(2)}, folder / "model.safetensors", header({}, kinds))
    with pytest.raises(
        CheckpointError, match="is a Int4TilePackedTo4dTensor of torchao.*Int8Tensor"
    ):
        load_checkpoint(folder)
