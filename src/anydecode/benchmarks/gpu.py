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

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from anydecode.benchmarks.passes import first_logits, prefill, sequence_rows
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cuda.available import kernel_device, unavailable_reason
from anydecode.kernels.interface import Rows
from anydecode.kernels.torch_arrays import as_numpy, as_tensor
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from anydecode.report import JsonFile, write_report

COUNTS = (1, 2, 4, 8, 16, 32, 64)
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


@dataclass(frozen=True)
class Setting:
    """What is timed: the shape and format of the model, positions before the new tokens, and calls
    per timing."""

    shape: str
    dtype: str
    context: int
    repeats: int


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median time of a call over three batches of `repeats` calls, including the host's time."""
    run()
    times = []
    for _ in range(3):
        synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times)


def bandwidth(device: torch.device) -> float:
    """Bandwidth of a copy on the device, in bytes read and written per second."""
    size = 1 << 32 if device.type == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), 10)


def random_model(shape: str, device: torch.device) -> Any:
    """A bfloat16 model of transformers with random weights, created on the device."""
    import transformers

    config = transformers.LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, rms_norm_eps=1e-5,
        tie_word_embeddings=False, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default_dtype)


def own_model(model: Any, dtype: str | None) -> Any:
    """The same weights in anydecode with the Triton kernels."""
    config = model.config.to_dict()
    tensors = {name: as_numpy(tensor) for name, tensor in model.state_dict().items()}
    checkpoint = Checkpoint("random", Path("random"), config, tensors)
    return build_model(checkpoint, dtype, executor=choose_executor("triton"))


def run_logits(model: Any, rows: Rows, cache: Any) -> torch.Tensor:
    """A copy of the logits of every row, in main memory."""
    return as_tensor(model.run(rows, cache, first_logits(len(rows))).logits).clone()


def time_passes(model: Any, cache: Any, setting: Setting) -> dict[int, float]:
    """Seconds of a pass over n rows after the context, with logits of every row on the device."""
    layers = model.spec.num_layers
    times = {}
    for count in COUNTS:
        rows = sequence_rows([5] * count, setting.context, layers)
        run = partial(model.run, rows, cache, first_logits(count))
        times[count] = seconds(run, setting.repeats)
    return times


def time_multi_step(model: Any, cache: Any, setting: Setting) -> float:
    """Seconds per token of a greedy multi-step pass on the device."""
    from anydecode.kernels.cuda.executor import SampleState

    rows = sequence_rows([5], setting.context, model.spec.num_layers)
    steps = min(32, setting.repeats)
    slots = np.arange(setting.context + 1, setting.context + steps, dtype=np.int32)[None]
    state = [SampleState()]
    run = lambda: model.executor.multi_step(rows, cache, slots, state)  # noqa: E731
    return seconds(run, 3) / steps


def time_products(executor: Any, repeats: int) -> list[dict[str, Any]]:
    """Bytes per second of each matrix shape, over all layers, so that none stays in the cache."""
    from anydecode.kernels.cuda.products import product

    by_shape: dict[tuple[int, int, int], list[Any]] = {}
    backend = executor.backend
    grouped = {weight for group in backend._groups for weight in group}
    single = [packed for weight, packed in backend._packed.items() if weight not in grouped]
    for packed in (*backend._groups.values(), *single):
        key = (packed.out_features, packed.in_features, packed.bits)
        by_shape.setdefault(key, []).append(packed)
    results = []
    for (out, width, bits), matrices in by_shape.items():
        size = sum(packed.num_bytes for packed in matrices)
        row: dict[str, Any] = {
            "out": out, "in": width, "bits": bits, "matrices": len(matrices), "bytes": size,
            "tile": str(matrices[0].tile),
        }  # fmt: skip
        for count in (1, 16):
            x = torch.randn(count, width, device=executor.device)

            def run(x: torch.Tensor = x, matrices: list[Any] = matrices) -> None:
                for packed in matrices:
                    product(x, packed)

            timed = _graph(run) if executor.device.type == "cuda" else run
            row[f"bytes_per_second_{count}"] = size / seconds(timed, repeats)
        results.append(row)
    return results


def _graph(run: Callable[[], None]) -> Callable[[], None]:
    from anydecode.kernels.cuda.graphs import CudaGraphs

    return CudaGraphs().capture(run)


def time_baseline(model: Any, setting: Setting) -> dict[str, float]:
    """Seconds per greedy token of transformers' `generate`, and of its forward over 16 rows."""
    device = model.device
    prompt = torch.full((1, setting.context), 5, device=device)
    steps = min(32, setting.repeats)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generate(count: int) -> float:
        run = lambda: model.generate(  # noqa: E731
            prompt, max_new_tokens=count, min_new_tokens=count, **options
        )
        return seconds(run, 1)

    with torch.no_grad():
        times = {"token": (generate(steps + 1) - generate(1)) / steps}
        for count in (1, 16):
            past = model(prompt, use_cache=True).past_key_values
            more = torch.full((1, count), 5, device=device)

            def run(past: Any = past, more: torch.Tensor = more) -> None:
                model(more, past_key_values=past, use_cache=True)
                past.crop(-more.shape[1])

            times[f"pass_{count}"] = seconds(run, setting.repeats)
    return times


def run_checks(model: Any, baseline: Any) -> dict[str, Any]:
    """The divergence from transformers, and whether a row has the same bits alone and among 16."""
    layers, generator = model.spec.num_layers, np.random.default_rng(0)
    tokens = generator.integers(0, model.spec.vocab_size, 16).tolist()
    cache = model.new_cache(64)
    together = run_logits(model, sequence_rows(tokens, 0, layers), cache)
    with torch.no_grad():
        other = baseline(torch.tensor([tokens], device=baseline.device)).logits[0].float().cpu()
    p, q = (values.double().log_softmax(-1) for values in (other, together))
    cache, alone = model.new_cache(64), []
    for position, token in enumerate(tokens):
        alone.append(run_logits(model, sequence_rows([token], position, layers), cache))
    return {
        "divergence_from_transformers": float((p.exp() * (p - q)).sum(-1).mean()),
        "same_bits_alone_and_in_sixteen": bool(torch.equal(torch.cat(alone), together)),
    }


def measure(setting: Setting, with_baseline: bool) -> dict[str, Any]:
    """Run all checks and timings and return the report."""
    import transformers
    import triton

    device = torch.device(kernel_device())
    rate = bandwidth(device)
    baseline = random_model(setting.shape, device)
    model = own_model(baseline, None if setting.dtype == "bfloat16" else setting.dtype)
    executor = model.executor
    cache = model.new_cache(setting.context + max(COUNTS))
    if setting.context:
        prefill(model, cache, setting.context)
    # A pass reads single rows of the embedding, and every other weight once.
    embedding = executor.backend.packed(executor._embedding).num_bytes
    size = executor.backend.num_bytes - embedding
    name = torch.cuda.get_device_name() if device.type == "cuda" else "interpreter"
    result: dict[str, Any] = {
        "gpu": name, "torch": torch.__version__, "triton": triton.__version__,
        "transformers": transformers.__version__, "shape": setting.shape, "dtype": setting.dtype,
        "context": setting.context, "copy_bytes_per_second": rate, "weight_bytes": size,
        "bound": size / rate, "checks": run_checks(model, baseline),
        "passes": time_passes(model, cache, setting),
        "multi-step": time_multi_step(model, cache, setting),
        "products": time_products(executor, setting.repeats),
    }  # fmt: skip
    if with_baseline:
        result["transformers_seconds"] = time_baseline(baseline, setting)
    return result


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
    problem = unavailable_reason()
    if problem is not None:
        raise UnsupportedCombinationError(f"the Triton kernels cannot run here: {problem}")
    with torch.no_grad():
        result = measure(Setting(shape, dtype, context, repeats), baseline)
    write_report(result, json_file, lambda: print_results(result))
