"""`anydecode bench speculative`: drafting methods and plain decoding, interleaved in one run.

Each prompt is answered by every method in turn, in a rotating order, so that other load on the
machine affects all methods equally. Drafter state and cached prefixes are cleared before each timed
answer (cold). Warm results, with drafter state kept from prompt to prompt, are reported beside
them."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.benchmarks import baseline_worker
from anydecode.benchmarks.baselines import Worker, find_file, start_workers
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import note, progress
from anydecode.report import JsonFile, PlotFile, split_names, write_report
from anydecode.results_log import ResultsLog
from anydecode.scoring.cost import CostModel
from anydecode.tasks.spec_bench import Question, questions

PLAIN = "autoregressive"
DEFAULT_METHODS = "auto,prompt-lookup,suffix,copyspec,token-recycling"
RESAMPLES = 2000
DATA_HINT = (
    "no --data given: running on the package's own prompts. Spec-Bench's questions are"
    " data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench; put that file into a folder"
    " and pass it as --data"
)


@dataclass(frozen=True)
class TimedAnswer:
    """One timed answer.

    Attributes:
        category: Category of the question.
        prompt: Index of the question.
        method: Decoding method, or name of a baseline.
        temperature: Sampling temperature.
        warm: Whether drafter state was kept from earlier prompts.
        num_tokens: Generated tokens.
        passes: Forward passes; 0 for baselines, which do not report them.
        seconds: Time from the first token to the last.
        draft_seconds: Part of `seconds` that was spent on drafting.
        modelled: Speed-up by the cost model instead of the clock, so without noise from other
            load; 0 for baselines.
        loops: Whether the answer ends in repetition.
        same_text: Whether the tokens equal those of plain decoding.
    """

    category: str
    prompt: int
    method: str
    temperature: float
    warm: bool
    num_tokens: int
    passes: int
    seconds: float
    draft_seconds: float
    modelled: float
    loops: bool
    same_text: bool

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (self.num_tokens - 1) / self.seconds if self.seconds > 0 else 0.0


def loops(tokens: Sequence[int], max_period: int = 64, min_length: int = 32) -> bool:
    """Whether `tokens` ends in a sequence of at most `max_period` tokens that is repeated four
    times or more, over at least `min_length` tokens."""
    for period in range(1, max_period + 1):
        size = max(4 * period, min_length)
        if len(tokens) < size:
            continue
        tail = tokens[-size:]
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def run(
    llm: LLM,
    question_list: Sequence[Question],
    methods: Sequence[str],
    temperatures: Sequence[float],
    tokens: int,
    warm: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
    rounds: int = 1,
    baselines: Sequence[Worker] = (),
    results_log: ResultsLog | None = None,
) -> Iterator[TimedAnswer]:
    """Time every question with plain decoding, every method and every baseline.

    Args:
        llm: The model.
        question_list: The questions.
        methods: Keys of decoding methods.
        temperatures: Sampling temperatures.
        tokens: Token limit of an answer.
        warm: Whether to also time each method with drafter state kept between questions.
        on_step: Called with a description after each answer.
        rounds: Cold answers per question, of which the fastest counts.
        baselines: Workers of other engines.
        results_log: Where answers are recorded; recorded ones are not generated again.

    Yields:
        The timed answers; for each question, plain decoding first.
    """
    warm_decoders = {method: llm.decoder(method) for method in methods}
    variants = [(PLAIN, False), *((method, False) for method in methods)]
    variants += [(method, True) for method in methods] if warm else []
    llm.generate([1] * 8, max_tokens=4, ignore_eos=True)
    llm.cost_model.seconds(1, 0)  # measures the costs before anything is timed
    recorded = {} if results_log is None else _recorded(results_log)
    for temperature in temperatures:
        options = {"max_tokens": tokens, "trace": True, "temperature": temperature, "seed": 1}
        for number, question in enumerate(question_list):
            label = f"question {number + 1} of {len(question_list)}, T={temperature:g}"
            report_step = partial(_report_step, on_step, label)
            answers = recorded.get((temperature, number), [])
            if not answers:
                answers = _run_methods(
                    llm, question, number, variants, warm_decoders, options, rounds, report_step
                )
                _record(results_log, answers)
            yield from answers
            engines_done = {one.method for one in answers}
            for worker in _rotated([w for w in baselines if w.engine not in engines_done], number):
                timed = _run_baseline(llm, question, number, worker, options, answers[0])
                report_step(
                    worker.engine if worker.missing is None else f"{worker.engine} is missing"
                )
                if timed is not None:
                    _record(results_log, [timed])
                    yield timed


def _report_step(on_step: Callable[[str], None], label: str, name: str) -> None:
    on_step(f"{label}: {name}")


def _record(results_log: ResultsLog | None, runs: Sequence[TimedAnswer]) -> None:
    if results_log is not None:
        results_log.write([asdict(one) for one in runs])


def _rotated(parts: Sequence[Any], number: int) -> Sequence[Any]:
    offset = number % max(len(parts), 1)
    return [*parts[offset:], *parts[:offset]]


def _run_methods(
    llm: LLM,
    question: Question,
    number: int,
    variants: list[tuple[str, bool]],
    warm_decoders: dict[str, Decoder],
    options: dict[str, Any],
    rounds: int,
    report_step: Callable[[str], None],
) -> list[TimedAnswer]:
    """One question with all variants (method, is warm); plain decoding is first in the result."""
    answers: dict[tuple[str, bool], Generation] = {}
    for method, is_warm in list(_rotated(variants, number)) * rounds:
        if is_warm and (method, is_warm) in answers:
            continue  # a second run would draft from this very answer
        llm.clear()
        decoder = warm_decoders[method] if is_warm else llm.decoder(method)
        message = [{"role": "user", "content": question.text}]
        answer = llm.chat(message, decoder=decoder, **options)
        best = answers.get((method, is_warm), answer)
        answers[method, is_warm] = min(best, answer, key=decode_seconds)
        report_step(f"{method}, warm" if is_warm else method)
    plain = answers[PLAIN, False].tokens
    return [
        TimedAnswer(
            question.category,
            number,
            method,
            options["temperature"],
            is_warm,
            (stats := answers[method, is_warm].stats).num_tokens,
            stats.passes,
            decode_seconds(answers[method, is_warm]),
            sum(r.get("draft_seconds", 0.0) for r in answers[method, is_warm].trace or ()),
            modelled_speedup(answers[method, is_warm], llm.cost_model),
            loops(answers[method, is_warm].tokens),
            answers[method, is_warm].tokens == plain,
        )
        for method, is_warm in variants
    ]


def _run_baseline(
    llm: LLM,
    question: Question,
    number: int,
    worker: Worker,
    options: dict[str, Any],
    plain: TimedAnswer,
) -> TimedAnswer | None:
    """The same question with a baseline, which reports neither passes nor drafts; None if it
    failed. `loops` is copied from our plain answer, since the baseline returns no tokens."""
    if worker.missing is not None:
        return None
    temperature = options["temperature"]
    response = worker.ask(
        prompt=llm.tokenizer.render_chat([{"role": "user", "content": question.text}]),
        tokens=options["max_tokens"],
        temperature=temperature,
        ends=True,
    )
    worker.missing = response.get("missing")
    if worker.missing is not None or response["tokens"] < 2:
        return None
    seconds = response["total"] - response["first"]
    return TimedAnswer(
        question.category, number, worker.engine, temperature, False, response["tokens"], 0,
        seconds, 0.0, 0.0, plain.loops, False,
    )  # fmt: skip


def _recorded(results_log: ResultsLog) -> dict[tuple[float, int], list[TimedAnswer]]:
    """Recorded answers by temperature and index of the question; plain decoding comes first."""
    result: dict[tuple[float, int], list[TimedAnswer]] = {}
    for runs in results_log.read(_timed_answers):
        result.setdefault((runs[0].temperature, runs[0].prompt), []).extend(runs)
    return result


def _timed_answers(entry: Any) -> list[TimedAnswer]:
    first, others = entry[0], entry[1:]
    return [TimedAnswer(**one) for one in (first, *others)]


def decode_seconds(answer: Generation) -> float:
    return answer.stats.seconds - answer.stats.time_to_first_token


def modelled_speedup(answer: Generation, cost_model: CostModel) -> float:
    """Modelled seconds of plain decoding for the same tokens, over those of the passes that were
    made and the drafting."""
    records = answer.trace or ()
    drafted_seconds = sum(cost_model.seconds(1 + len(r["drafted"]), r["position"]) for r in records)
    drafted_seconds += sum(r.get("draft_seconds", 0.0) for r in records)
    plain = sum(
        cost_model.seconds(1, r["position"] + position)
        for r in records
        for position in range(len(r["tokens"]))
    )
    return plain / drafted_seconds if drafted_seconds else 1.0


def memory(llm: LLM, question: Question, methods: Sequence[str], tokens: int) -> dict[str, int]:
    """Peak bytes of Python allocations of each method beyond plain decoding, on one question."""
    peaks = {}
    for method in (PLAIN, *methods):
        llm.clear()
        tracemalloc.start()
        llm.chat([{"role": "user", "content": question.text}], decoder=method, max_tokens=tokens)
        peaks[method] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {method: max(0, peaks[method] - peaks[PLAIN]) for method in methods}


def summary(runs: Sequence[TimedAnswer]) -> list[dict[str, Any]]:
    """Result rows by temperature, warm or cold, with or without looping answers, method and
    category. The category "overall" is the mean over categories."""
    rows: list[dict[str, Any]] = []
    plain = {(r.temperature, r.prompt): r for r in runs if r.method == PLAIN}
    keys = dict.fromkeys((r.temperature, r.warm, r.method) for r in runs if r.method != PLAIN)
    for temperature, warm, method in keys:
        for with_loops in (True, False):
            chosen = [
                r
                for r in runs
                if (r.temperature, r.warm, r.method) == (temperature, warm, method)
                and (with_loops or not (r.loops or plain[temperature, r.prompt].loops))
                and min(r.num_tokens, plain[temperature, r.prompt].num_tokens) > 1
            ]
            label = {
                "temperature": temperature,
                "warm": warm,
                "loops": with_loops,
                "method": method,
            }
            parts = [
                {**label, "category": category, **_results(category_runs, plain)}
                for category, category_runs in _by_category(chosen)
            ]
            if parts:
                rows += [*parts, {**label, "category": "overall", **_overall(parts, chosen, plain)}]
    return rows


def _by_category(runs: Sequence[TimedAnswer]) -> Iterator[tuple[str, list[TimedAnswer]]]:
    for category in dict.fromkeys(r.category for r in runs):
        yield category, [r for r in runs if r.category == category]


def _ratios(runs: Sequence[TimedAnswer], plain: dict[tuple[float, int], TimedAnswer]) -> np.ndarray:
    """float64 `[len(runs)]`: tokens per second over those of plain decoding, per prompt."""
    return np.array([r.rate / plain[r.temperature, r.prompt].rate for r in runs])


def _results(
    runs: Sequence[TimedAnswer], plain: dict[tuple[float, int], TimedAnswer]
) -> dict[str, Any]:
    ratios = _ratios(runs, plain)
    low, high = interval([ratios])
    return {
        "prompts": len(runs),
        "tokens_per_pass": sum(r.num_tokens for r in runs) / max(1, sum(r.passes for r in runs))
        if runs[0].passes
        else 0.0,
        "speedup": float(ratios.mean()),
        "interval": [low, high],
        "modelled": float(np.mean([r.modelled for r in runs])),
        "fifth_percentile": float(np.percentile(ratios, 5)),
        "draft_share": sum(r.draft_seconds for r in runs) / sum(r.seconds for r in runs),
        "same_text": sum(r.same_text for r in runs),
    }


def _overall(
    parts: Sequence[dict[str, Any]],
    runs: Sequence[TimedAnswer],
    plain: dict[tuple[float, int], TimedAnswer],
) -> dict[str, Any]:
    groups = [_ratios(category_runs, plain) for _, category_runs in _by_category(runs)]
    results = _results(runs, plain)
    mean = {
        name: float(np.mean([part[name] for part in parts]))
        for name in ("tokens_per_pass", "speedup", "modelled")
    }
    return {**results, **mean, "interval": list(interval(groups))}


def interval(groups: Sequence[np.ndarray], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95% bootstrap interval of the mean over groups of each group's mean. Values are resampled
    within their group."""
    random = np.random.default_rng(0)
    means = [
        group[random.integers(0, len(group), (resamples, len(group)))].mean(axis=1)
        for group in groups
    ]
    low, high = np.percentile(np.mean(means, axis=0), [2.5, 97.5])
    return float(low), float(high)


def bench_speculative(
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder with Spec-Bench's question.jsonl.")
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="Keys of the catalogue, separated by commas.")
    ] = DEFAULT_METHODS,
    model: Annotated[str, typer.Option("--model", "-m", help="A name, folder or .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    draft: Annotated[
        str | None, typer.Option("--draft", help="A draft model, for methods that need one.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per answer.")] = 128,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts per category; default: all.")
    ] = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Sampling temperatures, separated by commas.")
    ] = "0,0.8",
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="Also report warm results.")
    ] = True,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Cold answers per prompt; the fastest counts.")
    ] = 1,
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
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Record answers here; a later run resumes from it."),
    ] = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Time drafting methods against plain decoding, prompt by prompt.

    Example: anydecode bench speculative --methods auto,prompt-lookup --limit 2 --json out.json
    """
    from anydecode.benchmarks.speculative_report import draw, print_report

    if data is None:
        note(DATA_HINT)
    chosen = split_names(methods.replace(";", ","))
    try:
        temperature_values = [float(part) for part in temperatures.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"--temperatures is {temperatures!r}; give numbers separated by commas"
        ) from None
    question_list = questions(data, limit)
    names = baseline_worker.SPECULATIVE if baselines == "all" else tuple(split_names(baselines))
    if unknown := sorted(set(names) - set(baseline_worker.SPECULATIVE)):
        allowed = ", ".join(baseline_worker.SPECULATIVE)
        raise InvalidRequestError(f"unknown baselines {', '.join(unknown)}; choose from {allowed}")
    settings = {
        "model": model, "draft": draft, "methods": chosen, "baselines": names, "tokens": tokens,
        "warm": warm, "rounds": rounds, "questions": len(question_list),
    }  # fmt: skip
    results_log = None if keep is None else ResultsLog(keep, settings)
    runs: list[TimedAnswer] = []
    extra_memory: dict[str, int] = {}
    was_interrupted = False
    with LLM(model, draft=draft, threads=threads or None) as llm, ExitStack() as stack:
        for method in chosen:
            llm.decoder(method)
        workers = []
        if names:
            file, count = find_file(model), threads or usable_cores()
            workers = start_workers(names, file, count, python, stack, note)
        num_own = (1 + len(chosen)) * rounds + (len(chosen) if warm else 0)
        answers = len(question_list) * len(temperature_values) * (num_own + len(workers))
        for question_answers in _recorded(results_log).values() if results_log else ():
            answers -= num_own + sum(one.method in names for one in question_answers)
        try:
            with progress("answers", max(0, answers)) as bar:
                timed = run(
                    llm,
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
            extra_memory = memory(llm, question_list[0], chosen, tokens)
        except KeyboardInterrupt:
            note("interrupted: the results cover the answers so far")
            was_interrupted = True
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "tokens": tokens,
        "data": "own prompts" if data is None else "Spec-Bench",
        "rows": summary(runs),
        "memory": extra_memory,
        "baselines": {worker.engine: worker.hello.get("settings", "") for worker in workers},
        "missing": {worker.engine: worker.missing for worker in workers if worker.missing},
        "runs": [asdict(one) for one in runs],
    }
    if plot is not None:
        draw(report, plot)
    write_report(report, json_file, lambda: print_report(report))
    if was_interrupted:
        raise KeyboardInterrupt
