"""Times anydecode beside transformers, llama.cpp and OpenVINO GenAI; `--help` lists the options."""

from __future__ import annotations

from anydecode.cli.bench import run_bench

if __name__ == "__main__":
    run_bench("peers")
