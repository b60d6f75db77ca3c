"""`anydecode bench diffusion`: throughput of cached and uncached denoising on a LLaDA-shaped model
with random weights.

The checkpoint (2 GB by default) is written in LLaDA's published layout, unless it exists. With
random weights no prediction is confident, so both variants fill one token per pass. Every block of
a canvas costs the same, so the cached variant is timed over one block (an opening pass over all
rows, then passes over the block's rows), and the uncached one over a few passes (over all rows).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name
from anydecode.models.scripted import ByteTokenizer
from anydecode.report import JsonFile, write_report


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    vocab: int

    @property
    def num_parameters(self) -> int:
        """Parameters of the matrices."""
        layer = self.hidden * (4 * self.hidden + 3 * self.mlp)
        return 2 * self.vocab * self.hidden + self.layers * layer


@dataclass(frozen=True)
class Setting:
    """What is timed: tokens of the canvas, the prompt and a block, passes without a cache, the
    format of the weights, and threads (None: all cores)."""

    canvas: int
    prompt: int
    block: int
    uncached: int
    dtype: str
    threads: int | None


def write(parent: Path, shape: Shape) -> Path:
    """Write the checkpoint unless it exists, and return its folder."""
    folder = parent / f"llada-{shape.layers}x{shape.hidden}x{shape.mlp}"
    file = folder / "model.safetensors"
    if file.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": shape.hidden,
        "embedding_size": shape.vocab,
        "eos_token_id": 1,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": 2,
        "max_sequence_length": 4096,
        "mlp_hidden_size": shape.mlp,
        "n_heads": shape.heads,
        "n_kv_heads": shape.heads,
        "n_layers": shape.layers,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "vocab_size": shape.vocab,
        "weight_tying": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random, ones = np.random.default_rng(0), np.ones(shape.hidden, bfloat16)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = random.standard_normal((rows, columns), np.float32)
        return (values / np.float32(columns**0.5)).astype(bfloat16)

    tensors = {
        "model.transformer.wte.weight": matrix(shape.vocab, shape.hidden),
        "model.transformer.ff_out.weight": matrix(shape.vocab, shape.hidden),
        "model.transformer.ln_f.weight": ones,
    }
    for layer in range(shape.layers):
        name = f"model.transformer.blocks.{layer}"
        for norm in ("attn_norm", "ff_norm"):
            tensors[f"{name}.{norm}.weight"] = ones
        for part in ("q_proj", "k_proj", "v_proj", "attn_out"):
            tensors[f"{name}.{part}.weight"] = matrix(shape.hidden, shape.hidden)
        for part in ("ff_proj", "up_proj"):
            tensors[f"{name}.{part}.weight"] = matrix(shape.mlp, shape.hidden)
        tensors[f"{name}.ff_out.weight"] = matrix(shape.hidden, shape.mlp)
    save_file(tensors, file)
    return folder


def seconds(llm: LLM, decoder: str, passes: int, setting: Setting) -> float:
    """Seconds of the first `passes` passes of a canvas."""
    prompt = np.random.default_rng(1).integers(3, 250, setting.prompt).tolist()
    request = llm.request(prompt, decoder=decoder, max_tokens=setting.canvas, ignore_eos=True)
    [job] = request.jobs
    start = time.perf_counter()
    llm.start(request, background=False)
    llm.driver.advance(lambda: job.sequence.num_passes >= passes)
    elapsed = time.perf_counter() - start
    llm.driver.cancel(job)
    return elapsed


def measure(folder: Path, shape: Shape, setting: Setting) -> dict[str, Any]:
    """Tokens per second of both variants, and their ratio."""
    with LLM(
        write(folder, shape), tokenizer=ByteTokenizer(), dtype=setting.dtype,
        threads=setting.threads, cache_positions=4 * (setting.prompt + setting.canvas),
    ) as llm:  # fmt: skip
        block = f"fast-dllm:threshold=1,block={setting.block},mask=2"
        seconds(llm, f"{block},cache=none", 1, setting)  # pages in the weights
        uncached = seconds(llm, f"{block},cache=none", setting.uncached, setting) / setting.uncached
        cached = seconds(llm, f"{block},cache=dual", setting.block, setting) / setting.block
    return {
        "machine": cpu_name(),
        "threads": setting.threads,
        "parameters": shape.num_parameters,
        "canvas": setting.canvas,
        "block": setting.block,
        "uncached_tokens_per_second": 1 / uncached,
        "cached_tokens_per_second": 1 / cached,
        "ratio": uncached / cached,
    }


def print_results(result: dict[str, Any]) -> None:
    """Print the report."""
    print(f"{result['parameters'] / 1e9:.2f}B parameters, canvas of {result['canvas']}:")
    print(f"  uncached {result['uncached_tokens_per_second']:.2f} tokens/s")
    print(f"  cached   {result['cached_tokens_per_second']:.2f} tokens/s")
    print(f"  ratio    {result['ratio']:.1f}x on {result['machine']}")


def bench_diffusion(
    folder: Annotated[Path, typer.Option("--folder", help="Folder for the checkpoint.")],
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers.")] = 16,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Width of a hidden state.")] = 2048,
    mlp: Annotated[int, typer.Option("--mlp", min=1, help="Width of the MLP.")] = 5632,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads.")] = 32,
    vocab: Annotated[int, typer.Option("--vocab", min=259, help="Vocabulary size.")] = 32000,
    dtype: Annotated[str, typer.Option("--dtype", help="Format of the weights.")] = "int4",
    canvas: Annotated[int, typer.Option("--canvas", min=1, help="Tokens of the canvas.")] = 512,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 64,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens of a block.")] = 32,
    uncached: Annotated[
        int, typer.Option("--uncached", min=1, help="Passes timed without a cache.")
    ] = 4,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time denoising with and without a cache, on a model of random weights.

    Example: anydecode bench diffusion --folder models --threads 2
    """
    if hidden % heads:
        raise InvalidRequestError(f"--hidden {hidden} is not a multiple of --heads {heads}")
    if not block <= canvas:
        raise InvalidRequestError(f"--block {block} is longer than --canvas {canvas}")
    shape = Shape(layers, hidden, mlp, heads, vocab)
    setting = Setting(canvas, prompt, block, uncached, dtype, threads or None)
    result = measure(folder, shape, setting)
    write_report(result, json_file, lambda: print_results(result))
