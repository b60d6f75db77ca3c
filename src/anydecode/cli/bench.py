"""`anydecode bench`: measurements, each imported only when it is run.

A benchmark is a function whose parameters are typer options. To add one, add a line to `BENCHES`.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import typer

from anydecode.errors import InvalidRequestError


class Bench(NamedTuple):
    """Where a benchmark lives (`module:function`) and what it measures."""

    target: str
    help: str


BENCHES = {
    "constrained": Bench(
        "anydecode.evaluation.constrained_bench:bench_constrained",
        "What constraints accept, get wrong and cost, on JSONSchemaBench and the test suite.",
    ),
    "parallelbench": Bench(
        "anydecode.evaluation.parallelbench.bench:bench_parallelbench",
        "Diffusion methods: accuracy against passes per token, on tasks that can be checked.",
    ),
    "peers": Bench(
        "anydecode.evaluation.baselines:bench_baselines",
        "Against transformers, llama.cpp and OpenVINO GenAI, in one run.",
    ),
    "cost": Bench(
        "anydecode.evaluation.cost:bench_cost", "What a pass over n rows costs on this machine."
    ),
    "speculative": Bench(
        "anydecode.evaluation.speculative_bench:bench_speculative",
        "Drafting methods against plain decoding, prompt by prompt.",
    ),
    "quantization": Bench(
        "anydecode.evaluation.quantization:bench_quantization",
        "What a diffusion model loses in fewer bits, at the same number of passes.",
    ),
    "serving": Bench(
        "anydecode.evaluation.serving.bench:bench_serving",
        "A trace replayed against a server: latencies and goodput under an objective.",
    ),
    "overhead": Bench(
        "anydecode.evaluation.serving.overhead:bench_overhead",
        "What the server adds to the engine's time, per request and per streamed token.",
    ),
    "soak": Bench(
        "anydecode.evaluation.serving.soak:bench_soak",
        "Thousands of requests by unreliable clients: no leak, no wrong text, no hang.",
    ),
}

app = typer.Typer(
    help="Measure speed on this machine.\n\nExample: anydecode bench peers --tokens 64",
    rich_markup_mode=None,
    no_args_is_help=True,
)


def run_bench(name: str, arguments: list[str] | None = None) -> None:
    """Run one benchmark of `BENCHES` with command-line `arguments` (default: the process's own)."""
    if name not in BENCHES:
        raise InvalidRequestError(f"no benchmark {name!r}: there are {', '.join(BENCHES)}")
    module, _, function = BENCHES[name].target.partition(":")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(getattr(importlib.import_module(module), function))
    result = single(arguments, prog_name=f"anydecode bench {name}", standalone_mode=False)
    if isinstance(result, int) and result:
        raise typer.Exit(result)


def _register(name: str, help_line: str) -> None:
    """A command that hands its arguments on, `--help` too, so that listing it imports nothing."""
    handed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(name, help=help_line, context_settings=handed_on)
    def forward(context: typer.Context) -> None:
        run_bench(name, context.args)


for _name, _bench in BENCHES.items():
    _register(_name, _bench.help)
