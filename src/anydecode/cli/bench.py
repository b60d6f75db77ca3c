"""`anydecode bench`: benchmarks, each imported only when it runs.

A benchmark is a function whose parameters are typer options. To add one, add a line to `BENCHES`.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer

from anydecode.cli.command_list import CommandListGroup
from anydecode.errors import InvalidRequestError


class Bench(NamedTuple):
    """The function of a benchmark (`module:function`) and its help text."""

    target: str
    help: str


BENCHES = {
    "constrained": Bench(
        "anydecode.benchmarks.constrained_bench:bench_constrained",
        "Constrained decoding: coverage, errors and cost on JSONSchemaBench and the JSON Schema"
        " test suite.",
    ),
    "parallelbench": Bench(
        "anydecode.benchmarks.parallelbench.bench:bench_parallelbench",
        "Diffusion methods: accuracy against passes per token, on tasks with checkable answers.",
    ),
    "aup": Bench(
        "anydecode.benchmarks.parallelbench.aup:bench_aup",
        "Diffusion decoders: area under the accuracy-parallelism curve, tokens per pass, seconds.",
    ),
    "diffusion-batches": Bench(
        "anydecode.benchmarks.parallelbench.batches:bench_batches",
        "Diffusion decoders: tokens per second of 1, 8 and 32 requests, beside the same weights"
        " decoded causally.",
    ),
    "diffusion-schemas": Bench(
        "anydecode.benchmarks.parallelbench.schemas:bench_schemas",
        "Diffusion decoders: the share of valid answers under JSON schemas.",
    ),
    "reasoning": Bench(
        "anydecode.benchmarks.reasoning:bench_reasoning",
        "Decoding methods: accuracy against tokens, passes, rows, seconds and memory, on questions"
        " with checkable answers.",
    ),
    "search": Bench(
        "anydecode.benchmarks.search:bench_search",
        "Methods that write several texts for one prompt: time per step, peak of the cache, and"
        " rows beside the fewest possible.",
    ),
    "baselines": Bench(
        "anydecode.benchmarks.baselines:bench_baselines",
        "anydecode against transformers, llama.cpp and OpenVINO GenAI, in one run.",
    ),
    "compare": Bench(
        "anydecode.benchmarks.compare:bench_compare",
        "This work tree against another commit: speed, peak memory and start-up.",
    ),
    "footprint": Bench(
        "anydecode.benchmarks.footprint:bench_footprint",
        "Disk by package, start-up by step, and memory by number and length of prompts.",
    ),
    "cost": Bench(
        "anydecode.benchmarks.cost:bench_cost", "The cost of a pass over n rows on this machine."
    ),
    "kernels": Bench(
        "anydecode.benchmarks.kernel_bench:bench_kernels",
        "Passes of the compiled kernels over 1 to 512 tokens, beside the memory's read bound.",
    ),
    "gpu": Bench(
        "anydecode.benchmarks.gpu:bench_gpu",
        "The Triton kernels on a GPU, beside the memory's bound and transformers.",
    ),
    "batched": Bench(
        "anydecode.benchmarks.batched:bench_batched",
        "Prefill and decoding of one or many sequences, beside llama.cpp's llama-batched-bench.",
    ),
    "divergence": Bench(
        "anydecode.benchmarks.divergence:bench_divergence",
        "Error of quantised arithmetic: divergence from the same weights in float32.",
    ),
    "depth": Bench(
        "anydecode.benchmarks.depth:bench_depth",
        "Methods that run fewer layers: layers per token, agreement with the full model, seconds.",
    ),
    "diffusion": Bench(
        "anydecode.benchmarks.diffusion:bench_diffusion",
        "Denoising with and without a cache, on a LLaDA-shaped model of random weights.",
    ),
    "shapes": Bench(
        "anydecode.benchmarks.shapes:bench_shapes",
        "Write GGUF files of random weights in the shapes of well-known models, to time on.",
    ),
    "speculative": Bench(
        "anydecode.benchmarks.speculative_bench:bench_speculative",
        "Speculative methods against plain decoding, per prompt.",
    ),
    "draft-priors": Bench(
        "anydecode.benchmarks.draft_priors:bench_draft_priors",
        "Acceptance rates of copies and of earlier passes' most probable tokens, by kind.",
    ),
    "quantization": Bench(
        "anydecode.benchmarks.quantization:bench_quantization",
        "Accuracy lost by a diffusion model in quantised formats, at the same number of passes.",
    ),
    "perplexity": Bench(
        "anydecode.benchmarks.perplexity:bench_perplexity",
        "The perplexity of a text under several models, or one model in several formats.",
    ),
    "lm-eval": Bench(
        "anydecode.benchmarks.lm_eval_bench:bench_lm_eval",
        "Tasks of lm-eval with formats of weights and of the cache, beside llama.cpp.",
    ),
    "serving": Bench(
        "anydecode.benchmarks.serving.bench:bench_serving",
        "A request trace replayed against a server: latencies and goodput under an SLO.",
    ),
    "users": Bench(
        "anydecode.benchmarks.serving.users:bench_users",
        "Servers under 1, 8 and 32 users: texts, typed answers and tools; rates and latencies.",
    ),
    "overhead": Bench(
        "anydecode.benchmarks.serving.overhead:bench_overhead",
        "Time that the server adds to the engine's, per request and per streamed token.",
    ),
    "fleet": Bench(
        "anydecode.benchmarks.fleet:bench_fleet",
        "Hand-overs between workers, the proxy, and fleets beside one process on all cores.",
    ),
    "published-fleets": Bench(
        "anydecode.benchmarks.published_fleets:bench_published_fleets",
        "Simulated fleets on the settings of DistServe, Mooncake and xLLM.",
    ),
    "neighbour": Bench(
        "anydecode.benchmarks.serving.neighbour:bench_neighbour",
        "The time between a client's tokens, alone and while others attack the server.",
    ),
    "soak": Bench(
        "anydecode.benchmarks.serving.soak:bench_soak",
        "Thousands of requests from unreliable clients: checks for leaks, wrong text and hangs.",
    ),
}

app = typer.Typer(
    cls=CommandListGroup,
    help="Measure speed on this machine.\n\nExample: anydecode bench baselines --tokens 64",
    rich_markup_mode=None,
    no_args_is_help=True,
)


def bench_command(name: str) -> Any:
    """The command of one benchmark of `BENCHES`, which is imported."""
    if name not in BENCHES:
        raise InvalidRequestError(f"no benchmark {name!r}: choose from {', '.join(BENCHES)}")
    module, _, function = BENCHES[name].target.partition(":")
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command(name)(getattr(importlib.import_module(module), function))
    return typer.main.get_command(command)


def run_bench(name: str, arguments: list[str] | None = None) -> None:
    """Run one benchmark of `BENCHES` with these command-line arguments (default: the process's
    own).
    """
    command = bench_command(name)
    result = command(arguments, prog_name=f"anydecode bench {name}", standalone_mode=False)
    if isinstance(result, int) and result:
        raise typer.Exit(result)


def _register(name: str, help_line: str) -> None:
    """Add a command that passes its arguments on, including `--help`, so that listing it imports
    nothing."""
    pass_through = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }

    @app.command(name, help=help_line, context_settings=pass_through)
    def forward(context: typer.Context) -> None:
        run_bench(name, context.args)


for _name, _bench in BENCHES.items():
    _register(_name, _bench.help)
