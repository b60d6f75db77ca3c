"""The measurements of `anydecode bench gpu`. They need torch, triton and transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from anydecode.benchmarks.passes import first_logits, prefill, sequence_rows
from anydecode.kernels.cuda.available import kernel_device
from anydecode.kernels.interface import Rows
from anydecode.kernels.torch_arrays import as_numpy, as_tensor
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Setting:
    """What is timed: the shape of the model, by name and as a config, its format, positions before
    the new tokens, and calls per timing."""

    shape: str
    config: Mapping[str, Any]
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


def random_model(shape: Mapping[str, Any], device: torch.device) -> Any:
    """A bfloat16 model of transformers with random weights, created on the device."""
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=8192, rms_norm_eps=1e-5,
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


@torch.no_grad()
def measure(setting: Setting, with_baseline: bool) -> dict[str, Any]:
    """Run all checks and timings and return the report."""
    import triton

    device = torch.device(kernel_device())
    rate = bandwidth(device)
    baseline = random_model(setting.config, device)
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
