"""The tensors with which tools store a quantised matrix, in numpy, and the numbers that they mean.

Every function takes a float32 matrix `[out, in]` and returns the tensors of a module by their names
in it, and the dequantised matrix. Those of bitsandbytes, HQQ, compressed-tensors, ModelOpt and
torchao were compared with what the tool itself writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float4_e2m1fn, float8_e4m3fn

Parts = tuple[dict[str, np.ndarray], np.ndarray]

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25,
    -0.0, -0.0052083335, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25,
)  # fmt: skip


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).copy()


def bitsandbytes_four_bits(
    matrix: np.ndarray,
    kind: str = "nf4",
    is_nested: bool = False,
    dtype: str = "bfloat16",
    run: int = 64,
) -> Parts:
    """The numbers are those in float32; bitsandbytes rounds them to `dtype`. Runs of `run` numbers
    go on from row to row, and the last one may be shorter."""
    table = np.array(NF4 if kind == "nf4" else FP4, np.float32)
    padded = np.zeros(-(-matrix.size // run) * run, np.float32)
    padded[: matrix.size] = matrix.ravel()
    runs = padded.reshape(-1, run)
    scales = np.abs(runs).max(1)
    state = {"quant_type": kind, "blocksize": run, "dtype": dtype, "shape": list(matrix.shape)}
    parts = {"weight.absmax": scales, "weight.quant_map": table}
    if is_nested:
        offset = float(scales.mean())
        nested = np.linspace(-1, 1, 256, dtype=np.float32)
        count = -(-len(scales) // 256)
        factors = np.full(count, np.abs(scales - offset).max() or 1.0, np.float32)
        codes = np.abs((scales - offset) / factors[0] - nested[:, None]).argmin(0).astype(np.uint8)
        scales = nested[codes] * factors[0] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts["weight.absmax"] = codes
        parts |= {"weight.nested_quant_map": nested, "weight.nested_absmax": factors}
    codes = np.abs((runs / scales[:, None])[..., None] - table).argmin(-1).astype(np.uint8)
    pairs = codes.reshape(-1, 2)[: -(-matrix.size // 2)]
    parts["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = _bytes(json.dumps(state))
    values = (table[codes] * scales[:, None]).ravel()[: matrix.size]
    return parts, values.reshape(matrix.shape)


def bitsandbytes_int8(matrix: np.ndarray) -> Parts:
    largest = np.abs(matrix.astype(np.float16)).max(1).astype(np.float32)
    codes = np.rint(matrix * (127 / largest)[:, None]).clip(-127, 127).astype(np.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return parts, codes * (largest / np.float32(127))[:, None]


def hqq(
    matrix: np.ndarray, bits: int = 4, axis: int = 1, group: int = 32, dtype: str = "float16"
) -> Parts:
    kind = np.dtype(bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    groups = matrix.reshape((-1, group) if axis else (group, -1))
    low, high = (f(groups, axis, keepdims=True) for f in (np.min, np.max))
    scales = ((high - low) / ((1 << bits) - 1)).astype(kind)
    zeros = (-low / scales.astype(np.float32)).astype(kind)
    codes = np.rint(groups / scales.astype(np.float32) + zeros.astype(np.float32))
    codes = codes.clip(0, (1 << bits) - 1).astype(np.uint8)
    values = (codes.astype(kind) - zeros) * scales
    if bits == 3:
        padded = np.zeros((-(-len(codes) // 10) * 10, codes.shape[1]), np.int32)
        padded[: len(codes)] = codes
        fields, packing = np.split(padded, 10), "3bit_32"
    else:
        fields, packing = np.split(codes, 8 // bits), f"{bits}bit_u8"
    packed = np.bitwise_or.reduce(
        [field << bits * (len(fields) - 1 - i) for i, field in enumerate(fields)]
    )
    flag, number = (lambda x: np.array(x, np.uint8)), (lambda x: np.array(x, np.int32))
    parts = {
        "W_q": packed, "scale": scales, "zero": zeros, "shape": np.array(matrix.shape, np.int64),
        "nbits": number(bits), "group_size": number(group), "axis": number(axis),
        "packing": _bytes(packing), "compute_dtype": _bytes(f"torch.{dtype}"),
        "unpack_view_dtype": _bytes("torch.int32" if bits == 3 else "torch.uint8"),
        "view_as_float": flag(0), "quant_scale": flag(0), "quant_zero": flag(0),
        "offload_meta": flag(0), "encoded_state_dict": flag(1), "stores_quant_config": flag(1),
        "channel_wise": flag(1), "optimize": flag(1), "round_zero": flag(bits == 4),
    }  # fmt: skip
    return parts, values.reshape(matrix.shape).astype(np.float32)


def pack_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes `[rows, n]` as int32 words, without gaps between them, bit by bit."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for i, bit in np.ndindex(count, bits):
        at = i * bits + bit
        words[:, at // 32] |= (codes[:, i].astype(np.uint32) >> bit & 1) << np.uint32(at % 32)
    return words.view(np.int32)


def _integers(
    matrix: np.ndarray, bits: int, groups: np.ndarray, is_symmetric: bool, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Signed numbers, scales and zero points by group, and the exact products."""
    count, half = int(groups.max()) + 1, 1 << (bits - 1)
    low, high = (
        np.stack([f(matrix[:, groups == g], 1) for g in range(count)], 1) for f in (np.min, np.max)
    )
    if is_symmetric:
        scales = (np.maximum(-low, high) / (half - 0.5)).astype(dtype)
        zeros = np.zeros(scales.shape, np.int8)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = ((high - low) / (2 * half - 1)).astype(dtype)
        zeros = np.rint(-half - low / scales.astype(np.float32)).clip(-half, half - 1)
        zeros = zeros.astype(np.int8)
    factor, offset = scales.astype(np.float32)[:, groups], zeros.astype(np.float32)[:, groups]
    numbers = np.rint(matrix / factor + offset).clip(-half, half - 1).astype(np.int8)
    return numbers, scales, zeros, (numbers - offset) * factor


def pack_quantized(
    matrix: np.ndarray,
    bits: int = 4,
    group: int = 32,
    is_symmetric: bool = True,
    has_order: bool = False,
    dtype: Any = bfloat16,
    seed: int = 1,
) -> Parts:
    """`seed` is that of the order."""
    groups = np.arange(matrix.shape[1]) // group
    if has_order:
        groups = groups[np.random.default_rng(seed).permutation(len(groups))]
    numbers, scales, zeros, values = _integers(matrix, bits, groups, is_symmetric, dtype)
    half = 1 << (bits - 1)
    parts = {
        "weight_packed": pack_stream(numbers.astype(np.int16) + half, bits),
        "weight_shape": np.array(matrix.shape, np.int64),
        "weight_scale": scales,
    }
    if not is_symmetric:
        packed = pack_stream(zeros.T.astype(np.int16) + half, bits).T
        parts["weight_zero_point"] = np.ascontiguousarray(packed)
    if has_order:
        parts["weight_g_idx"] = groups.astype(np.int32)
    return parts, values


def int_quantized(
    matrix: np.ndarray, is_symmetric: bool = True, dtype: Any = bfloat16, is_single: bool = False
) -> Parts:
    shape = (1, matrix.size) if is_single else matrix.shape
    groups = np.zeros(shape[1], np.int64)
    numbers, scales, zeros, values = _integers(
        matrix.reshape(shape), 8, groups, is_symmetric, dtype
    )
    if is_single:
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    parts = {"weight": numbers.reshape(matrix.shape), "weight_scale": scales}
    return parts if is_symmetric else {**parts, "weight_zero_point": zeros}, values.reshape(
        matrix.shape
    )


def fp8(matrix: np.ndarray, kind: str = "tensor", dtype: Any = np.float32) -> Parts:
    """`kind` is "tensor" (one number), "channel" `[out, 1]`, "output" `[out]` or "block"."""
    rows, columns = {"tensor": matrix.shape, "block": (128, 128)}.get(kind, (1, matrix.shape[1]))
    scales = np.empty((-(-len(matrix) // rows), -(-matrix.shape[1] // columns)), dtype)
    for i, j in np.ndindex(scales.shape):
        part = matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(part).max() / 448
    factors = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: len(matrix), : matrix.shape[1]]
    numbers = (matrix / factors.astype(np.float32)).astype(float8_e4m3fn)
    if kind in ("tensor", "output"):
        scales = scales.reshape(() if kind == "tensor" else -1)
    return {"weight": numbers, "weight_scale": scales}, numbers.astype(np.float32) * factors


def fp8_of_transformers(
    matrix: np.ndarray, kind: str = "tensor", name: str = "weight_scale_inv", dtype: Any = bfloat16
) -> Parts:
    """Under the names of DeepSeek and Mistral (`weight_scale_inv`) or AutoFP8 and fbgemm
    (`weight_scale`), with the scales of activations that stand beside them."""
    parts, values = fp8(matrix, kind, dtype)
    static = {"activation_scale": np.array(0.5, bfloat16), "input_scale": np.ones(1, np.float32)}
    return {"weight": parts["weight"], name: parts["weight_scale"], **static}, values


def mxfp8(matrix: np.ndarray) -> Parts:
    largest = np.abs(matrix.reshape(len(matrix), -1, 32)).max(-1)
    exponents = np.ceil(np.log2(largest / 448)).astype(np.int16)
    factors = np.repeat(2.0**exponents, 32, 1).astype(np.float32)
    numbers = (matrix / factors).astype(float8_e4m3fn)
    parts = {"weight": numbers, "weight_scale": (exponents + 127).astype(np.uint8)}
    return parts, numbers.astype(np.float32) * factors


def _asymmetric(
    matrix: np.ndarray, bits: int, groups: np.ndarray, is_symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[out, in]`, scales and zero points `[out, groups]` from 1 on, and the products."""
    top, count = (1 << bits) - 1, int(groups.max()) + 1
    low, high = (
        np.stack([f(matrix[:, groups == g], 1) for g in range(count)], 1) for f in (np.min, np.max)
    )
    if is_symmetric:
        scales = (np.maximum(-low, high) * 2 / top).astype(np.float16)
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.rint(-low / scales.astype(np.float32)).clip(1, top).astype(np.int64)
    factor = scales.astype(np.float32)[:, groups]
    codes = np.rint(matrix / factor + zeros[:, groups]).clip(0, top).astype(np.int64)
    return codes, scales, zeros, (codes - zeros[:, groups]).astype(np.float32) * factor


def gptq(
    matrix: np.ndarray,
    bits: int = 4,
    group: int = 64,
    is_symmetric: bool = False,
    has_order: bool = False,
    offset: int = 1,
    seed: int = 1,
) -> Parts:
    """`offset` is what version 1 of the format subtracts from zero points, `seed` that of the
    order."""
    groups = np.arange(matrix.shape[1]) // group
    if has_order:
        groups = groups[np.random.default_rng(seed).permutation(len(groups))]
    codes, scales, zeros, values = _asymmetric(matrix, bits, groups, is_symmetric)
    parts = {
        "qweight": np.ascontiguousarray(pack_stream(codes, bits).T),
        "qzeros": pack_stream(zeros.T - offset, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": groups.astype(np.int32),
    }
    return parts, values


def awq(matrix: np.ndarray, bits: int = 4, group: int = 64) -> Parts:
    """The layout gemm: eight outputs per word, the even ones first."""
    groups = np.arange(matrix.shape[1]) // group
    codes, scales, zeros, values = _asymmetric(matrix, bits, groups, False)

    def packed(rows: np.ndarray) -> np.ndarray:
        order = np.arange(rows.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_stream(rows[:, order.ravel()], bits)

    parts = {"qweight": packed(codes.T), "qzeros": packed(zeros.T)}
    return {**parts, "scales": np.ascontiguousarray(scales.T)}, values


def awq_gemv(matrix: np.ndarray, bits: int = 4, group: int = 64) -> Parts:
    """The layout gemv: inputs and groups in order, padded to two words of groups."""
    groups = np.arange(matrix.shape[1]) // group
    codes, scales, zeros, values = _asymmetric(matrix, bits, groups, False)
    missing = ((0, 0), (0, 16 - scales.shape[1]))
    parts = {
        "qweight": pack_stream(codes, bits),
        "qzeros": pack_stream(np.pad(zeros, missing), bits),
        "scales": np.pad(scales, missing),
    }
    return parts, values


def _fp4(matrix: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    numbers = (matrix / factors).astype(float4_e2m1fn)
    codes = numbers.view(np.uint8) & 15
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers.astype(np.float32) * factors


def mxfp4(matrix: np.ndarray) -> Parts:
    largest = np.abs(matrix.reshape(len(matrix), -1, 32)).max(-1)
    exponents = np.floor(np.log2(largest / 4)).astype(np.int16)
    packed, values = _fp4(matrix, np.repeat(2.0**exponents, 32, 1).astype(np.float32))
    return {"weight_packed": packed, "weight_scale": (exponents + 127).astype(np.uint8)}, values


def nvfp4(matrix: np.ndarray, is_modelopt: bool = False) -> Parts:
    factor = np.float32(np.abs(matrix).max() / (6 * 448))
    largest = np.abs(matrix.reshape(len(matrix), -1, 16)).max(-1)
    scales = (largest / (6 * factor)).astype(float8_e4m3fn)
    packed, values = _fp4(matrix, np.repeat(scales.astype(np.float32) * factor, 16, 1))
    if is_modelopt:
        parts = {"weight": packed, "weight_scale_2": np.array(factor)}
    else:
        parts = {"weight_packed": packed, "weight_global_scale": np.array([1 / factor])}
    return {**parts, "weight_scale": scales}, values


def torchao_int8(matrix: np.ndarray, bits: int = 8, group: int = 0, dtype: Any = bfloat16) -> Parts:
    """`group` 0: one scale per output."""
    groups = np.arange(matrix.shape[1]) // (group or matrix.shape[1])
    numbers, scales, zeros, values = _integers(matrix, bits, groups, bits == 8, dtype)
    names = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    return dict(zip(names, (numbers, scales, zeros), strict=True)), values


def torchao_fp8(matrix: np.ndarray) -> Parts:
    parts, values = fp8(matrix, "channel")
    names = {"weight": "_weight_qdata", "weight_scale": "_weight_scale"}
    return {names[name]: part for name, part in parts.items()}, values


class Case(NamedTuple):
    """A layout: how a matrix is stored, the settings of its config, and the format it becomes."""

    write: Callable[..., Parts]
    options: dict[str, Any]
    settings: dict[str, Any]
    format: str


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
ACT_ORDER = {**GPTQ, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}
PACKED, INT8 = compressed("pack-quantized"), compressed("int-quantized")
FLOAT = compressed("float-quantized", block_structure=[128, 128])
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
F32 = {"dtype": np.float32}

CASES = {
    "bitsandbytes nf4": Case(bitsandbytes_four_bits, {}, BITSANDBYTES, "NF4"),
    "bitsandbytes nf4 nested": Case(
        bitsandbytes_four_bits, {"is_nested": True, "dtype": "float16"}, BITSANDBYTES, "NF4"
    ),
    "bitsandbytes fp4": Case(
        bitsandbytes_four_bits, {"kind": "fp4", "dtype": "float32"}, BITSANDBYTES, "FP4"
    ),
    "bitsandbytes fp4, runs of 4096": Case(
        bitsandbytes_four_bits, {"kind": "fp4", "run": 4096}, BITSANDBYTES, "FP4"
    ),
    "bitsandbytes nf4, runs of 32": Case(bitsandbytes_four_bits, {"run": 32}, BITSANDBYTES, "BF16"),
    "bitsandbytes int8": Case(bitsandbytes_int8, {}, EIGHT, "Q8_0"),
    "hqq 8 bits": Case(hqq, {"bits": 8}, HQQ, "F16"),
    "hqq 4 bits": Case(hqq, {"bits": 4}, HQQ, "Q4_1"),
    "hqq 3 bits": Case(hqq, {"bits": 3}, HQQ, "Q4_1"),
    "hqq 2 bits, axis 0": Case(hqq, {"bits": 2, "axis": 0, "dtype": "bfloat16"}, HQQ, "BF16"),
    "hqq 1 bit": Case(hqq, {"bits": 1, "group": 16, "dtype": "float32"}, HQQ, "F32"),
    "packed int4": Case(pack_quantized, {}, PACKED, "Q4_0"),
    "packed int4, zero points": Case(pack_quantized, {"is_symmetric": False}, PACKED, "Q5_0"),
    "packed int4, order": Case(pack_quantized, {"has_order": True}, PACKED, "Q4_0"),
    "packed int4, float32 scales": Case(pack_quantized, F32, PACKED, "F32"),
    "packed int3": Case(pack_quantized, {"bits": 3}, PACKED, "Q4_0"),
    "packed int8": Case(pack_quantized, {"bits": 8}, PACKED, "Q8_0"),
    "packed int8, zero points": Case(
        pack_quantized, {"bits": 8, "is_symmetric": False}, PACKED, "BF16"
    ),
    "int8": Case(int_quantized, {}, INT8, "Q8_0"),
    "int8, one scale": Case(int_quantized, {**F32, "is_single": True}, INT8, "Q8_0"),
    "int8, zero points": Case(int_quantized, {**F32, "is_symmetric": False}, INT8, "F32"),
    "fp8, one scale": Case(fp8, {}, FLOAT, "BF16"),
    "fp8, outputs": Case(fp8, {"kind": "channel", "dtype": bfloat16}, FLOAT, "BF16"),
    "fp8, blocks": Case(fp8, {"kind": "block"}, FLOAT, "F32"),
    "naive int8": Case(int_quantized, {}, compressed("naive-quantized"), "Q8_0"),
    "mxfp4": Case(mxfp4, {}, compressed("mxfp4-pack-quantized"), "MXFP4"),
    "nvfp4": Case(nvfp4, {}, compressed("nvfp4-pack-quantized"), "NVFP4"),
    "modelopt fp8": Case(fp8, {}, MODELOPT, "BF16"),
    "modelopt fp8, outputs": Case(
        fp8, {"kind": "output"}, {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "F32"
    ),
    "modelopt fp8, blocks": Case(
        fp8, {"kind": "block"}, {**MODELOPT, "quant_algo": "FP8_PB_WO"}, "F32"
    ),
    "modelopt nvfp4": Case(
        nvfp4, {"is_modelopt": True}, {**MODELOPT, "quant_algo": "NVFP4"}, "NVFP4"
    ),
    "torchao int8": Case(torchao_int8, {}, TORCHAO, "Q8_0"),
    "torchao int4": Case(torchao_int8, {"bits": 4, "group": 32}, TORCHAO, "Q5_0"),
    "torchao fp8": Case(torchao_fp8, {}, TORCHAO, "BF16"),
    "fp8, old blocks": Case(
        fp8, {"kind": "block"}, compressed("float-quantized", block_structure="128x128"), "F32"
    ),
    "mxfp8": Case(mxfp8, {}, compressed("mxfp8-quantized"), "BF16"),
    "fp8 of Mistral": Case(fp8_of_transformers, {}, {**FP8, "weight_block_size": None}, "BF16"),
    "fp8 of Qwen3": Case(
        fp8_of_transformers, {"kind": "block"}, {**FP8, "weight_block_size": [128, 128]}, "BF16"
    ),
    "fp8 of AutoFP8": Case(fp8_of_transformers, {"name": "weight_scale", **F32}, FP8, "BF16"),
    "fbgemm fp8": Case(
        fp8_of_transformers,
        {"kind": "channel", "name": "weight_scale", **F32},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "BF16",
    ),
    "gptq": Case(gptq, {"bits": 4}, GPTQ, "Q4_1"),
    "gptq, order": Case(gptq, {"bits": 4, "has_order": True}, ACT_ORDER, "Q4_1"),
    "gptq, order, symmetric": Case(
        gptq, {"has_order": True, "is_symmetric": True}, ACT_ORDER, "Q4_0"
    ),
    "gptq 8 bits, order": Case(
        gptq, {"bits": 8, "has_order": True, "is_symmetric": True}, {**ACT_ORDER, "bits": 8}, "Q8_0"
    ),
    "gptq 3 bits": Case(gptq, {"bits": 3}, {**GPTQ, "bits": 3}, "Q4_0"),
    "gptq 3 bits, order": Case(gptq, {"bits": 3, "has_order": True}, {**GPTQ, "bits": 3}, "Q4_0"),
    "gptq 2 bits, version 2": Case(
        gptq,
        {"bits": 2, "offset": 0},
        {**GPTQ, "bits": 2, "checkpoint_format": "gptq_v2"},
        "Q4_0",
    ),
    "gptq, other bits than the settings": Case(
        gptq, {"bits": 8, "is_symmetric": True}, {**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "Q8_0"
    ),
    "awq": Case(awq, {"bits": 4}, AWQ, "Q4_1"),
    "awq gemv": Case(awq_gemv, {"bits": 4}, {**AWQ, "version": "gemv"}, "Q4_1"),
    "auto-round": Case(
        gptq,
        {"is_symmetric": True},
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
        "Q4_0",
    ),
    "auto-round awq": Case(
        awq, {"bits": 4}, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, "Q4_1"
    ),
}
