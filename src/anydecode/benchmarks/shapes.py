"""`anydecode bench shapes`: writes GGUF files with random weights in the shapes of well-known
models; in NF4 and FP4 a folder, by `shape_folders`.

Speed depends only on shapes and formats, so random weights suffice for timing without a download.
The tokenizer has single bytes, and names for the other ids. The files can be opened with anydecode
and llama.cpp. One tensor at a time is in memory.

Layers of random weights change the hidden state much, so that no early exit predicts what the last
layer does. For methods that run fewer layers, `EarlyExits` makes those behind the first ones add
less and less.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from anydecode.benchmarks import shape_folders
from anydecode.benchmarks.shape_sizes import (
    BEGIN,
    END,
    MERGE,
    SHAPES,
    STD,
    Shape,
    matrices,
    norms,
    routers,
    token_names,
)
from anydecode.errors import InvalidRequestError
from anydecode.report import JsonFile, write_report

if TYPE_CHECKING:
    import gguf

#: What attention adds in files with early exits: were it as much as the MLPs, the mean of the text
#: would outweigh its last token, and all tokens of greedy texts would soon be the same.
_ATTENTION = 0.1
#: The standard deviation of logits in files with early exits, with which the most probable tokens
#: of greedy texts have probabilities like those of trained models.
_LOGITS = 10.0
#: Format -> (the position of the float16 scale in a block, its size by which weights of random
#: codes have the standard deviation 1). Where a format has minima, the next float16 is their scale;
#: the third number is its ratio to the first, which brings the mean to zero.
_SCALES: dict[str, tuple[int, float, float | None]] = {
    "Q4_0": (0, 1 / 4.18, None),
    "Q8_0": (0, 1 / 73.9, None),
    "Q2_K": (80, 1 / 14.1, 1.5),
    "Q3_K": (108, 1 / 43.4, None),
    "Q4_K": (0, 1 / 262, 7.5),
    "Q6_K": (208, 1 / 1366, None),
    "IQ4_NL": (0, 1 / 67.2, None),
    "IQ4_XS": (0, 1 / 1237, None),
    "TQ1_0": (52, 1 / 0.82, None),
    "TQ2_0": (64, 1 / 0.707, None),
    "IQ1_S": (0, 1 / 7.2, None),
    "IQ1_M": (48, 1 / 7.2, None),
    "IQ2_XXS": (0, 1 / 53.2, None),
    "IQ2_XS": (0, 1 / 56.3, None),
    "IQ2_S": (0, 1 / 56.3, None),
    "IQ3_XXS": (0, 1 / 142, None),
    "IQ3_S": (0, 1 / 140, None),
}
#: Format -> (the number of scales of one byte at the start of a block, their value). The codes have
#: the deviation 5.9, and the scales are about `STD` / 5.9: 2^(120 - 128) and 3 / 1024.
_BYTE_SCALES = {"MXFP4": (1, 120), "NVFP4": (4, 3)}
FORMATS = (*_SCALES, *_BYTE_SCALES)  # of GGUF files


@dataclass(frozen=True)
class EarlyExits:
    """How much less the layers behind the first ones add to the hidden state.

    Attributes:
        layers: First layers, which are as in other files of random weights.
        change: What the next layer adds, as a share of what the first ones do.
        decay: The share of each later layer, as a multiple of that of the layer before it.
    """

    layers: int
    change: float
    decay: float

    def factor(self, name: str, hidden: int) -> float:
        """What the weights of the matrix `name` are multiplied by, in a model of so many features
        of hidden states."""
        if name == "output":
            return _LOGITS / (STD * hidden**0.5)
        parts = name.split(".")
        if parts[-1] not in ("attn_output", "ffn_down", "ffn_down_exps"):
            return 1.0
        factor = _ATTENTION if parts[-1] == "attn_output" else 1.0
        behind = int(parts[1]) - self.layers
        return factor if behind < 0 else float(factor * self.change * self.decay**behind)


def random_blocks(
    format: str, rows: int, columns: int, generator: np.random.Generator, factor: float = 1.0
) -> np.ndarray:
    """Blocks uint8 `[rows, bytes]` of random weights with standard deviation `STD` times `factor`,
    which only formats of `_SCALES` have."""
    import gguf

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    data = generator.integers(0, 256, (rows, columns // values, size), np.uint8)
    if format == "TQ2_0":  # the code 3 is not used: it becomes 1
        data ^= (data & data >> 1 & 0x55) << 1
    if format == "Q4_0":  # the code 0, -8, becomes 0, which is 8: the others are symmetric
        data[(data & 15) == 0] |= 8
        data[(data & 240) == 0] |= 128
    if format in _BYTE_SCALES:
        count, scale = _BYTE_SCALES[format]
        data[:, :, :count] = scale
    else:
        position, step, ratio = _SCALES[format]
        _scale(format, data, position, factor * STD * step, generator)
        if ratio is not None:
            _scale(format, data, position + 2, factor * STD * step * ratio, generator)
    return data.reshape(rows, -1)


def _scale(
    format: str, data: np.ndarray, position: int, size: float, generator: np.random.Generator
) -> None:
    scales = (size * generator.uniform(0.9, 1.1, data.shape[:2])).astype(np.float16)
    halves = scales[:, :, None].view(np.uint8)
    if format == "IQ1_M":  # in the upper quarters of four words
        data[:, :, position + 1 :: 2] &= 15
        data[:, :, position + 1 :: 4] |= halves << 4
        data[:, :, position + 3 :: 4] |= halves & 240
        return
    data[:, :, position : position + 2] = halves


def write(
    path: Path, shape: Shape, format: str, exits: EarlyExits | None = None, seed: int = 0
) -> int:
    """Write the file; return the bytes of its weights."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_block_count(shape.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
    _add_tokenizer(writer, shape.vocabulary)
    kind = gguf.GGMLQuantizationType[format]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    total = 0
    for name, (*rows, columns) in matrices(shape).items():
        stored = (*rows, columns // values * size)
        total += math.prod(stored)
        writer.add_tensor_info(
            f"{name}.weight", stored, np.dtype(np.uint8), math.prod(stored), kind
        )
    floats: dict[str, tuple[int, ...]] = dict.fromkeys(
        routers(shape), (shape.experts, shape.hidden)
    )
    floats |= {name: (shape.hidden,) for name in norms(shape)}
    for name, stored in floats.items():
        num_bytes = 4 * math.prod(stored)
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.float32), num_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(seed)
    for name, (*rows, columns) in matrices(shape).items():
        factor = 1.0 if exits is None else exits.factor(name, shape.hidden)
        blocks = random_blocks(format, math.prod(rows), columns, generator, factor)
        writer.write_tensor_data(blocks)
    for _ in routers(shape):
        router = generator.standard_normal((shape.experts, shape.hidden), np.float32)
        writer.write_tensor_data(router * np.float32(STD))
    for _ in norms(shape):
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    writer.close()
    return total


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(token_names(vocabulary))
    writer.add_token_types([1] * BEGIN + [3, 3] + [1] * (vocabulary - END - 1))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)


def bench_shapes(
    folder: Annotated[Path, typer.Option("--folder", help="Folder to write the model to.")],
    shape: Annotated[
        str, typer.Option("--shape", help=f"Shape of the model: {', '.join(SHAPES)}.")
    ] = "1b",
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"Format of the weights: {', '.join(FORMATS)} (a GGUF file), or"
            f" {', '.join(shape_folders.FORMATS)} (a folder in the layout of bitsandbytes).",
        ),
    ] = FORMATS[0],
    early_layers: Annotated[
        int,
        typer.Option(
            "--early-layers", min=0, help="First layers, behind which each adds less; 0: none does."
        ),
    ] = 0,
    change: Annotated[
        float,
        typer.Option(
            "--change",
            min=0,
            max=1,
            help="With --early-layers: what the next layer adds, relative to the first ones.",
        ),
    ] = 0.05,
    decay: Annotated[
        float,
        typer.Option(
            "--decay",
            min=0,
            max=1,
            help="With --early-layers: what each later layer adds, relative to the one before it.",
        ),
    ] = 0.7,
    json_file: JsonFile = None,
) -> None:
    """Write a model of random weights, on which other benchmarks can measure speed. With
    --early-layers, its early exits often predict what the last layer does.

    Example: anydecode bench shapes --folder models --shape 1b
    """
    formats = (*FORMATS, *shape_folders.FORMATS)
    for option, value, allowed in (("shape", shape, SHAPES), ("format", format, formats)):
        if value not in allowed:
            raise InvalidRequestError(
                f"unknown {option} {value!r}; choose from {', '.join(allowed)}"
            )
    name, sizes, exits = "random", SHAPES[shape], None
    if early_layers:
        if early_layers >= sizes.layers:
            raise InvalidRequestError(
                f"--early-layers {early_layers} leaves no layer of {shape}, which has"
                f" {sizes.layers}; choose less"
            )
        if format not in _SCALES:
            raise InvalidRequestError(
                f"--early-layers writes no {format}; choose from {', '.join(_SCALES)}"
            )
        # The head's weights are larger than those of the embedding.
        name, sizes = "early", replace(sizes, tied=False)
        exits = EarlyExits(early_layers, change, decay)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{shape}.{format}"
    if format in shape_folders.FORMATS:
        if sizes.experts:
            raise InvalidRequestError(
                f"{shape} has experts, which are not written in {format}; choose another shape"
            )
        size = shape_folders.write_folder(path, sizes, format)
    else:
        path = path.with_name(f"{path.name}.gguf")
        size = write(path, sizes, format, exits)
    result = {"path": str(path), "format": format, "weight_bytes": size, **asdict(sizes)}
    write_report(result, json_file, lambda: print(f"{path}: {size / 1e9:.2f} GB of weights"))
