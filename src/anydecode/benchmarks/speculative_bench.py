"""`anydecode bench speculative`: drafting methods, plain decoding and multi-step decoding,
interleaved in one run: single answers (`speculative_answers`), then groups of prompts that are
answered together (`speculative_company`)."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from anydecode.api.llm import LLM
from anydecode.api.methods import build_decoder
from anydecode.benchmarks import baseline_worker, llama_server
from anydecode.benchmarks.baselines import Worker, find_file, start_workers
from anydecode.benchmarks.llama_server import LlamaServer
from anydecode.benchmarks.speculative_answers import (
    PLAIN,
    TimedAnswer,
    memory,
    num_answers_left,
    run,
    with_multi_step,
)
from anydecode.benchmarks.speculative_company import (
    TimedGroup,
    company_summary,
    group_sizes,
    num_groups_left,
    run_groups,
)
from anydecode.benchmarks.speculative_drafts import find_llm, open_llms, parse_drafts, split_method
from anydecode.benchmarks.speculative_summary import summary
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import note, progress
from anydecode.report import JsonFile, PlotFile, split_methods, split_names, write_report
from anydecode.results_log import ResultsLog
from anydecode.tasks.spec_bench import questions

DEFAULT_METHODS = "auto,prompt-lookup,suffix,copyspec,token-recycling"
DATA_HINT = (
    "no --data given: running on the package's own prompts. Spec-Bench's questions are"
    " data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench; put that file into a folder"
    " and pass it as --data"
)


def bench_speculative(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="A folder with Spec-Bench's question.jsonl, or a .jsonl file of Spec-Bench, GSM8K"
            " or HumanEval; may be repeated.",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Methods with parameters, separated by ; or ,. METHOD@NAME uses the draft model"
            " NAME of --draft. autoregressive and multi-step, the two baselines, run in any case.",
        ),
    ] = DEFAULT_METHODS,
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="<[name=]draft>",
            help="A draft model, for methods that use one: NAME=PATH is that of METHOD@NAME, PATH"
            " that of the others; may be repeated. Default: the drafter that comes with the model.",
        ),
    ] = None,
    drafting: Annotated[
        str,
        typer.Option(
            "--drafting",
            help="Draft policy: how much requests together draft; fixed: what their methods say.",
        ),
    ] = "smartspec-server",
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per answer.")] = 128,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts per category; default: all.")
    ] = None,
    skip: Annotated[
        int,
        typer.Option(
            "--skip", min=0, help="Prompts of each category before those, in the same order."
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the order in which prompts are drawn.")
    ] = 0,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Sampling temperatures, separated by commas.")
    ] = "0,0.8",
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="Also report warm results.")
    ] = True,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", min=1, help="Cold answers per prompt or group; the fastest counts."
        ),
    ] = 1,
    company: Annotated[
        str,
        typer.Option(
            "--company",
            help="Numbers of prompts that are also answered together, separated by commas, and"
            " compared with multi-step decoding; 1: the single answers; '': none.",
        ),
    ] = "1,4,8,16",
    baselines: Annotated[
        str,
        typer.Option(
            "--baselines",
            help="Baselines to run interleaved, separated by commas, such as"
            " llama.cpp-prompt-lookup; all: every speculative one, each also without drafts.",
        ),
    ] = "",
    python: Annotated[
        str, typer.Option("--python", help="Python interpreter with the baselines installed.")
    ] = sys.executable,
    llama_program: Annotated[
        str | None,
        typer.Option(
            "--llama-server",
            metavar="<path>",
            help="llama.cpp's program llama-server, which answers the same prompts, without drafts"
            " and in each mode of --spec-types.",
        ),
    ] = None,
    spec_types: Annotated[
        str,
        typer.Option(
            "--spec-types",
            help="Speculative modes of llama-server, separated by commas; those with a draft model"
            " as TYPE=FILE.gguf.",
        ),
    ] = llama_server.NGRAM_TYPES,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Record answers here; a later run resumes from it."),
    ] = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Time drafting methods against plain and multi-step decoding: each prompt alone, and prompts
    together.

    Prompts are drawn in a shuffled order, which --seed fixes: a run with --skip 4 --limit 4 has
    those that follow those of --limit 4. Ratios are paired by prompt or group, with 95% bootstrap
    intervals. Answers that do not loop are reported first, then all answers. Groups have each
    prompt once, in a fixed shuffled order; their prompts are in the target's prefix cache before
    any method is timed.

    Draft models are compared in one run: --draft a=FOLDER --draft b=FOLDER --methods auto@a,auto@b.

    Example: anydecode bench speculative --methods auto,prompt-lookup --limit 2 --json out.json
    """
    from anydecode.benchmarks.speculative_report import draw, print_report

    if not data:
        note(DATA_HINT)
    chosen, sizes = split_methods(methods), group_sizes(company)
    temperature_values, drafts = _temperatures(temperatures), parse_drafts(draft or ())
    for method in chosen:
        build_decoder(split_method(drafts, method)[1])
    question_list = questions(data or None, limit, skip, seed)
    names = _baseline_names(baselines)
    server_names = () if llama_program is None else llama_server.names(spec_types)
    for size in sizes:
        if size > len(question_list):
            note(f"--company {size}: no group, as there are {len(question_list)} prompts only")
    settings = {
        "model": model, "draft": drafts, "drafting": drafting, "methods": with_multi_step(chosen),
        "baselines": names + server_names, "tokens": tokens, "warm": warm, "rounds": rounds,
        "questions": len(question_list), "skip": skip, "seed": seed,
    }  # fmt: skip
    results_log = None if keep is None else ResultsLog(keep, settings)
    runs: list[TimedAnswer] = []
    groups: list[TimedGroup] = []
    extra_memory: dict[str, int] = {}
    draft_models: dict[str, list[str]] = {}
    was_interrupted = False
    with ExitStack() as stack:
        open_llm = partial(LLM, drafting=drafting)
        llms = open_llms(open_llm, model, drafts, threads or None, stack)
        for method in (PLAIN, *chosen):
            llm, key = find_llm(llms, method)
            needs = llm.decoder(key).requirements
            if needs.finds_draft and llm.finds_draft:
                llm.open_own_draft()  # as its first request does
            llm.resources.check_decoder(key, needs)
            draft_models[method] = llm.resources.draft_models(needs)
        workers: list[Worker | LlamaServer] = []
        if names or llama_program is not None:
            file, count = find_file(model), threads or usable_cores()
            workers += start_workers(names, file, count, python, stack, note)
            if llama_program is not None:
                workers += llama_server.start_llama_servers(
                    llama_program, spec_types, file, count, stack, note
                )
        left = num_answers_left(
            len(question_list),
            chosen,
            temperature_values,
            warm,
            rounds,
            [*names, *server_names],
            results_log,
        )
        groups_left = num_groups_left(len(question_list), sizes, temperature_values, results_log)
        try:
            with progress("answers", left) as bar:
                timed = run(
                    llms,
                    question_list,
                    chosen,
                    temperature_values,
                    tokens,
                    warm,
                    bar.advance,
                    rounds,
                    workers,
                    results_log,
                )
                runs.extend(timed)
            with progress("groups", groups_left) as bar:
                timed_groups = run_groups(
                    llms,
                    question_list,
                    chosen,
                    runs,
                    sizes,
                    tokens,
                    rounds,
                    bar.advance,
                    results_log,
                )
                groups.extend(timed_groups)
            extra_memory = memory(llms, question_list[0], chosen, tokens)
        except KeyboardInterrupt:
            resumed = "" if keep is None else f"; the same command resumes the run from {keep}"
            note(f"interrupted: the results cover the answers so far{resumed}")
            was_interrupted = True
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "drafts": {name: path for name, path in drafts.items() if path is not None},
        "draft_models": draft_models,
        "drafting": drafting,
        "tokens": tokens,
        "data": [file.name for file in data] if data else "own prompts",
        "rows": summary(runs),
        "company": company_summary(groups),
        "memory": extra_memory,
        "baselines": {worker.engine: worker.hello.get("settings", "") for worker in workers},
        "missing": {worker.engine: worker.missing for worker in workers if worker.missing},
        "runs": [asdict(one) for one in runs],
        "groups": [asdict(one) for one in groups],
    }
    if plot is not None:
        draw(report, plot)
    write_report(report, json_file, lambda: print_report(report))
    if was_interrupted:
        raise KeyboardInterrupt


def _temperatures(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"--temperatures is {text!r}; give numbers separated by commas"
        ) from None


def _baseline_names(text: str) -> tuple[str, ...]:
    names = baseline_worker.SPECULATIVE if text == "all" else tuple(split_names(text))
    if unknown := sorted(set(names) - set(baseline_worker.SPECULATIVE)):
        allowed = ", ".join(baseline_worker.SPECULATIVE)
        raise InvalidRequestError(f"unknown baselines {', '.join(unknown)}; choose from {allowed}")
    return names
