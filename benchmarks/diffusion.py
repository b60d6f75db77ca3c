"""Throughput of cached and uncached denoising on a LLaDA-shaped model with random weights.

python benchmarks/diffusion.py --folder DIR [--layers 16] [--hidden 2048] [--mlp 5632] [--heads 32]
    [--vocab 32000] [--dtype int4] [--canvas 512] [--prompt 64] [--block 32] [--uncached 4]
    [--threads N] [--json]

Writes the checkpoint (2 GB) in LLaDA's published layout into DIR, unless it exists. With random
weights no prediction is confident, so both variants fill one token per pass. Every block of a
canvas costs the same, so the cached variant is timed over one block (an opening pass over all rows,
then passes over the block's rows), and the uncached one over `--uncached` passes (over all rows).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from anydecode import LLM
from anydecode.machine import cpu_name
from anydecode.models.scripted import ByteTokenizer


def write(args: argparse.Namespace) -> Path:
    """Write the checkpoint unless it exists, and return its folder."""
    folder = Path(args.folder) / f"llada-{args.layers}x{args.hidden}x{args.mlp}"
    file = folder / "model.safetensors"
    if file.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": args.hidden,
        "embedding_size": args.vocab,
        "eos_token_id": 1,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": 2,
        "max_sequence_length": 4096,
        "mlp_hidden_size": args.mlp,
        "n_heads": args.heads,
        "n_kv_heads": args.heads,
        "n_layers": args.layers,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "vocab_size": args.vocab,
        "weight_tying": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) / columns**0.5
        return values.to(torch.bfloat16)

    tensors = {
        "model.transformer.wte.weight": matrix(args.vocab, args.hidden),
        "model.transformer.ff_out.weight": matrix(args.vocab, args.hidden),
        "model.transformer.ln_f.weight": torch.ones(args.hidden, dtype=torch.bfloat16),
    }
    for layer in range(args.layers):
        name = f"model.transformer.blocks.{layer}"
        for norm in ("attn_norm", "ff_norm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(args.hidden, dtype=torch.bfloat16)
        for part in ("q_proj", "k_proj", "v_proj", "attn_out"):
            tensors[f"{name}.{part}.weight"] = matrix(args.hidden, args.hidden)
        for part in ("ff_proj", "up_proj"):
            tensors[f"{name}.{part}.weight"] = matrix(args.mlp, args.hidden)
        tensors[f"{name}.ff_out.weight"] = matrix(args.hidden, args.mlp)
    save_file(tensors, file)
    return folder


def seconds(llm: LLM, decoder: str, passes: int, args: argparse.Namespace) -> float:
    """Seconds of the first `passes` passes of a canvas."""
    prompt = np.random.default_rng(1).integers(3, 250, args.prompt).tolist()
    request = llm.request(prompt, decoder=decoder, max_tokens=args.canvas, ignore_eos=True)
    [job] = request.jobs
    start = time.perf_counter()
    llm.start(request, background=False)
    llm.driver.advance(lambda: job.sequence.num_passes >= passes)
    elapsed = time.perf_counter() - start
    llm.driver.cancel(job)
    return elapsed


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both variants, and their ratio."""
    options = {"dtype": args.dtype, "threads": args.threads}
    positions = 4 * (args.prompt + args.canvas)
    with LLM(write(args), tokenizer=ByteTokenizer(), cache_positions=positions, **options) as llm:
        block = f"fast-dllm:threshold=1,block={args.block},mask=2"
        seconds(llm, f"{block},cache=none", 1, args)  # pages in the weights
        uncached = seconds(llm, f"{block},cache=none", args.uncached, args) / args.uncached
        cached = seconds(llm, f"{block},cache=dual", args.block, args) / args.block
    return {
        "machine": cpu_name(),
        "threads": args.threads,
        "parameters": sum(
            2 * args.vocab * args.hidden * (layer == 0)
            + args.hidden * (4 * args.hidden + 3 * args.mlp)
            for layer in range(args.layers)
        ),
        "canvas": args.canvas,
        "block": args.block,
        "uncached_tokens_per_second": 1 / uncached,
        "cached_tokens_per_second": 1 / cached,
        "ratio": uncached / cached,
    }


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    for name, default in {
        "layers": 16, "hidden": 2048, "mlp": 5632, "heads": 32, "vocab": 32000,
        "canvas": 512, "prompt": 64, "block": 32, "uncached": 4, "threads": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['parameters'] / 1e9:.2f}B parameters, canvas of {result['canvas']}:")
    print(f"  uncached {result['uncached_tokens_per_second']:.2f} tokens/s")
    print(f"  cached   {result['cached_tokens_per_second']:.2f} tokens/s")
    print(f"  ratio    {result['ratio']:.1f}x on {result['machine']}")


if __name__ == "__main__":
    main()
