"""One process of `anydecode bench footprint`: opens a model step by step, generates, and prints
the time and the resident memory after each step as one JSON object.

Arguments: the start time of the process, in seconds since the epoch; then the settings as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

#: The steps from the start of the process to the first token, in order.
STEPS = (
    "start Python",
    "import anydecode",
    "read the file, build the tokenizer",
    "pack the weights",
    "create the engine",
    "first token",
)
_NUM_TOKENS = 16


def resident() -> int | None:
    """The resident memory of this process in bytes, or None if the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    """Run the steps, then as many prompts of as many tokens as the settings say."""
    started, settings = float(sys.argv[1]), json.loads(sys.argv[2])
    steps: dict[str, dict[str, Any]] = {}

    def measure(step: str) -> None:
        seconds = time.time() - started - sum(done["seconds"] for done in steps.values())
        steps[step] = {"seconds": seconds, "resident": resident()}

    names = iter(STEPS)
    measure(next(names))
    from anydecode.api.llm import LLM
    from anydecode.benchmarks.baseline_worker import peak_memory
    from anydecode.kernels.cache import bytes_per_position
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.opening import open_checkpoint

    measure(next(names))
    checkpoint = load_checkpoint(settings["model"])
    measure(next(names))
    model, tokenizer = open_checkpoint(checkpoint, threads=settings["threads"])
    del checkpoint
    measure(next(names))
    llm = LLM(model, tokenizer=tokenizer)
    measure(next(names))
    next(llm.stream("The", max_tokens=2))
    measure(next(names))
    words = llm.tokenizer.encode("The harbour was built of stone. ") * settings["context"]
    prompts = [words[i : settings["context"] + i] for i in range(settings["sequences"])]
    generations = llm.generate(prompts, max_tokens=_NUM_TOKENS)
    assert all(generation.tokens for generation in generations)
    positions = sum(len(prompt) + _NUM_TOKENS for prompt in prompts)
    cache_bytes = positions * bytes_per_position(llm.engine.runners["target"].pool.cache)
    print(json.dumps({"steps": steps, "peak": peak_memory(), "cache": cache_bytes}))
    llm.close()


if __name__ == "__main__":
    main()
