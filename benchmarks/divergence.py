"""Error of quantised arithmetic: the Kullback-Leibler divergence per token of anydecode and
llama.cpp from the same weights dequantised to float32.

python benchmarks/divergence.py [model.gguf] [--text FILE] [--tokens 512] [--window 256]
    [--baseline PYTHON] [--threads N] [--backend native] [--json]

All engines read the same file and the same token ids, window by window from an empty context.
`--baseline` is a Python interpreter with llama-cpp-python; its logits are returned through a file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.benchmarks.baselines import find_file
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.machine import cpu_name
from anydecode.models.families import build_model
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.tasks.prompts import PROMPTS

_BASELINE = """
import json, sys
import numpy as np
import llama_cpp
model, threads, ids_file, target = sys.argv[1:]
threads, ids = int(threads), json.load(open(ids_file))
size = max(map(len, ids))
llm = llama_cpp.Llama(model, n_ctx=size, n_batch=size, n_threads=threads, n_threads_batch=threads,
                      logits_all=True, verbose=False)
logits = []
for window in ids:
    llm.reset()
    llm.eval(window)
    logits.append(np.array(llm.scores[:len(window)], np.float32))
np.save(target, np.concatenate(logits))
print(llama_cpp.__version__)
"""


def windows(model: Any, text: str, count: int, size: int) -> list[list[int]]:
    """The first `count` token ids of `text`, split into windows of `size`."""
    ids = model.encode(text)[:count]
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    """Logits float32 `[len(ids), vocab_size]` of one window, from one forward pass."""
    count = len(ids)
    table = np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, np.int32)
    rows = Rows(
        np.array(ids, np.int32), table, table, [table], zeros, table + 1, np.zeros(0, np.int32),
        zeros, zeros, zeros, np.full(count, model.spec.num_layers, np.int32),
    )  # fmt: skip
    output = model.run(rows, model.new_cache(count), OutputSpec(np.arange(count, dtype=np.int32)))
    logits: np.ndarray = output.logits.cpu().numpy().copy()
    return logits


def baseline_logits(
    python: str, path: str, threads: int, ids: list[list[int]]
) -> tuple[np.ndarray, str]:
    """Logits of all windows from llama.cpp, concatenated, and its version."""
    with tempfile.TemporaryDirectory(prefix="anydecode-divergence-") as folder:
        ids_file, target = Path(folder, "ids.json"), Path(folder, "logits.npy")
        ids_file.write_text(json.dumps(ids))
        command = [python, "-c", _BASELINE, path, str(threads), str(ids_file), str(target)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"llama.cpp failed: {process.stderr.strip().splitlines()[-1]}")
        return np.load(target), f"llama-cpp-python {process.stdout.split()[-1]}"


def divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || other) of each row in nats, float64 `[rows]`."""
    result = np.empty(len(reference))
    for row, (one, other) in enumerate(zip(reference, logits, strict=True)):
        p, q = (_log_softmax(values.astype(np.float64)) for values in (one, other))
        result[row] = (np.exp(p) * (p - q)).sum()
    return result


def _log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max()
    shifted: np.ndarray = values - np.log(np.exp(values).sum())
    return shifted


def summary(reference: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Statistics of the divergences over all rows."""
    values = divergences(reference, logits)
    return {
        "mean": float(values.mean()),
        "standard_error": float(values.std(ddof=1) / len(values) ** 0.5),
        "median": float(np.median(values)),
        "99%": float(np.quantile(values, 0.99)),
        "largest": float(values.max()),
        "same_top_token": float((reference.argmax(-1) == logits.argmax(-1)).mean()),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines and return the report."""
    path = find_file(args.model)
    text = Path(args.text).read_text() if args.text else "\n\n".join(p.text for p in PROMPTS)
    own = build_model(load_checkpoint(path), executor=choose_executor(args.backend, args.threads))
    exact = load_checkpoint(path)
    ids = windows(exact.tokenizer, text, args.tokens, args.window)
    model = build_model(exact, "float32")
    reference = np.concatenate([logits_of(model, window) for window in ids])
    engines = {f"anydecode, {type(own.executor).__name__}": _all_logits(own, ids)}
    if args.baseline:
        logits, version = baseline_logits(args.baseline, path, args.threads, ids)
        engines[version] = logits[:, : reference.shape[1]]
    return {
        "machine": cpu_name(),
        "model": Path(path).name,
        "tokens": len(reference),
        "window": args.window,
        "engines": {name: summary(reference, logits) for name, logits in engines.items()},
    }


def _all_logits(model: Any, ids: list[list[int]]) -> np.ndarray:
    return np.concatenate([logits_of(model, window) for window in ids])


def show(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    print(
        f"{result['model']}, {result['tokens']} tokens in windows of {result['window']}, on"
        f" {result['machine']}: divergence from the dequantised float32 model, in nats"
    )
    print(f"{'':42} {'mean':>9} {'+-':>8} {'median':>9} {'99%':>9} {'largest':>9}  same top token")
    for name, statistics in result["engines"].items():
        numbers = (
            statistics[key] for key in ("mean", "standard_error", "median", "99%", "largest")
        )
        cells = " ".join(
            f"{value:{width}.5f}" for value, width in zip(numbers, (9, 8, 9, 9, 9), strict=True)
        )
        print(f"{name:42} {cells}  {statistics['same_top_token']:.1%}")


def main() -> None:
    """Run the benchmark with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--text", help="a text file; default: the package's own prompts")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--baseline", help="a Python interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", help="native, torch or triton; default: the best available")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = compare(args)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    sys.exit(main())
