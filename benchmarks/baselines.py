"""Times anydecode and baselines (transformers, llama.cpp, OpenVINO GenAI); see `--help`."""

from __future__ import annotations

from anydecode.cli.bench import run_bench

if __name__ == "__main__":
    run_bench("baselines")
