"""`anydecode bench gpu`: the Triton kernels on a GPU, compared with the memory bound and with
transformers.

With random weights in the shape of a well-known model, it measures a pass over n rows as a replayed
graph, a token of a multi-step pass, each kind of product, and a step of transformers with the same
weights. The memory bound is the weights' bytes divided by the measured bandwidth of a
device-to-device copy. It also checks that logits are close to those of transformers, and that a row
has the same bits alone and among 16 rows.

It needs torch, triton and transformers. With TRITON_INTERPRET=1 and `--shape tiny` it runs without
a GPU; its times are then meaningless.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cuda.available import unavailable_reason
from anydecode.report import JsonFile, write_report

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97,
    },
}  # fmt: skip
DTYPES = ("bfloat16", "int8", "int4")


def print_results(result: dict[str, Any]) -> None:
    """Print the report as tables."""
    bound = result["bound"]
    print(
        f"{result['gpu']}, torch {result['torch']}, triton {result['triton']}: {result['shape']} in"
        f" {result['dtype']}, {result['weight_bytes'] / 1e9:.2f} GB read per pass, copied at"
        f" {result['copy_bytes_per_second'] / 1e12:.2f} TB/s: bound {bound * 1e3:.3f} ms"
    )
    for name, value in result["checks"].items():
        print(f"{name.replace('_', ' ')}: {value}")
    print("rows        ms   of one row   share of the bound")
    one = result["passes"][1]
    for count, duration in result["passes"].items():
        print(f"{count:4d} {duration * 1e3:9.3f} {duration / one:9.2f}x {bound / duration:16.0%}")
    duration = result["multi-step"]
    print(f"multi-step: {duration * 1e3:.3f} ms per token, {bound / duration:.0%} of the bound")
    for name, duration in result.get("transformers_seconds", {}).items():
        print(f"transformers {name.replace('_', ' over ')}: {duration * 1e3:.3f} ms")
    print("product (out x in)     bits  tile   GB/s of 1 row, of 16")
    for row in result["products"]:
        rates = (row[f"bytes_per_second_{count}"] / 1e9 for count in (1, 16))
        cells = " ".join(f"{rate:9.0f}" for rate in rates)
        print(f"{row['out']:8d} x {row['in']:<8d} {row['bits']:6d}  {row['tile']} {cells}")


def bench_gpu(
    shape: Annotated[
        str, typer.Option("--shape", help=f"Shape of the model: {', '.join(SHAPES)}.")
    ] = "8b",
    dtype: Annotated[
        str, typer.Option("--dtype", help=f"Format of the weights: {', '.join(DTYPES)}.")
    ] = DTYPES[0],
    context: Annotated[
        int, typer.Option("--context", min=0, help="Positions before the new tokens.")
    ] = 256,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Calls per timing.")] = 20,
    baseline: Annotated[bool, typer.Option(help="Also time transformers.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Time the Triton kernels, beside the memory bound and transformers.

    Example: anydecode bench gpu --shape 8b --dtype int4 --no-baseline
    """
    for option, value, allowed in (("shape", shape, SHAPES), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise InvalidRequestError(
                f"unknown {option} {value!r}; choose from {', '.join(allowed)}"
            )
    from anydecode.benchmarks.gpu_passes import Setting, measure

    problem = unavailable_reason()
    if problem is not None:
        raise UnsupportedCombinationError(f"the Triton kernels cannot run here: {problem}")
    result = measure(Setting(shape, SHAPES[shape], dtype, context, repeats), baseline)
    write_report(result, json_file, lambda: print_results(result))
