"""`anydecode bench speculative`: drafting methods and plain decoding, interleaved in one run.

Each prompt is answered by every method in turn, in an order that rotates, so that whatever else the
machine does falls on all alike. Drafter memories and shared prefixes are cleared before each timed
answer; a warm figure, with memories kept from prompt to prompt, stands beside the cold one.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from anydecode.decoders.decoder import Decoder
from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.evaluation import baseline_worker
from anydecode.evaluation.baselines import Worker, find_file, started
from anydecode.evaluation.machine_info import cpu_name, usable_cores
from anydecode.evaluation.prompts import PROMPTS
from anydecode.evaluation.report import JsonFile, PlotFile, write_report
from anydecode.evaluation.results_log import ResultsLog
from anydecode.scoring.cost import CostModel

PLAIN = "autoregressive"
DEFAULT_METHODS = "auto,prompt-lookup,suffix,copyspec,token-recycling"
#: Spec-Bench takes these from MT-Bench, a handful each; they are one category here.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "stem", "humanities", "extraction")
)
#: Small enough to stand alone in MT-Bench, but named in the figures to reach.
KEPT = frozenset(("extraction",))
RESAMPLES = 2000
WHERE_TO_GET = (
    "no benchmark data given: running on the package's own prompts. Spec-Bench's questions are"
    " data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench; put that file into a folder"
    " and pass it as --data"
)


class Question(NamedTuple):
    """One user message."""

    category: str
    text: str


@dataclass(frozen=True)
class Run:
    """One answer. `seconds` is from the first token to the last, `draft_seconds` what drafting took
    of it, `modelled` the speed-up if every pass cost what the cost table says: free of the noise of
    a busy machine. Other engines show no `passes`, and nothing is modelled of them."""

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
        return (self.num_tokens - 1) / self.seconds if self.seconds > 0 else 0.0


def questions(data: Path | None, limit: int | None) -> list[Question]:
    """The first turns of Spec-Bench's questions, `limit` per category; our own without `data`."""
    if data is None:
        found = [Question(prompt.category, prompt.text) for prompt in PROMPTS]
    else:
        file = data / "question.jsonl" if data.is_dir() else data
        try:
            lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
            found = [Question(_category(line["category"]), line["turns"][0]) for line in lines]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(f"{file} holds no Spec-Bench questions: {error}") from None
    counts: dict[str, int] = {}
    kept = []
    for question in found:
        counts[question.category] = counts.get(question.category, 0) + 1
        if limit is None or counts[question.category] <= limit:
            kept.append(question)
    return kept


def _category(name: str) -> str:
    return "mt-bench" if name in MT_BENCH - KEPT else name


def loops(tokens: Sequence[int], longest: int = 64, least: int = 32) -> bool:
    """Whether an answer ends in repetition: four times the same stretch of up to `longest` tokens,
    `least` tokens in all."""
    for period in range(1, longest + 1):
        size = max(4 * period, least)
        if len(tokens) < size:
            continue
        tail = tokens[-size:]
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def run(
    llm: LLM,
    asked: Sequence[Question],
    methods: Sequence[str],
    temperatures: Sequence[float],
    tokens: int,
    warm: bool = True,
    on_answer: Callable[[str], None] = lambda told: None,
    rounds: int = 1,
    peers: Sequence[Worker] = (),
    results_log: ResultsLog | None = None,
) -> Iterator[Run]:
    """Every question, by every method and plainly, cold and with memories kept (`warm`), and by
    other engines. The fastest of `rounds` cold answers counts. What `results_log` holds is not
    asked again. `on_answer` is told what is done, answer by answer."""
    kept = {method: llm.decoder(method) for method in methods}
    entrants = [(PLAIN, False), *((method, False) for method in methods)]
    entrants += [(method, True) for method in methods] if warm else []
    llm.generate([1] * 8, max_tokens=4, ignore_eos=True)
    llm.cost_model.seconds(1, 0)  # costs are measured once per machine, not per answer
    held = {} if results_log is None else _held(results_log)
    for temperature in temperatures:
        options = {"max_tokens": tokens, "trace": True, "temperature": temperature, "seed": 1}
        for number, question in enumerate(asked):
            head = f"question {number + 1} of {len(asked)}, T={temperature:g}"
            told = partial(_tell, on_answer, head)
            known = held.get((temperature, number), [])
            if not known:
                known = _ours(llm, question, number, entrants, kept, options, rounds, told)
                _keep(results_log, known)
            yield from known
            answered = {one.method for one in known}
            for worker in _in_turn([w for w in peers if w.engine not in answered], number):
                found = _theirs(llm, question, number, worker, options, known[0])
                told(worker.engine if worker.missing is None else f"{worker.engine} is missing")
                if found is not None:
                    _keep(results_log, [found])
                    yield found


def _tell(on_answer: Callable[[str], None], head: str, who: str) -> None:
    on_answer(f"{head}: {who}")


def _keep(results_log: ResultsLog | None, runs: Sequence[Run]) -> None:
    if results_log is not None:
        results_log.write([asdict(one) for one in runs])


def _in_turn(parts: Sequence[Any], number: int) -> Sequence[Any]:
    turn = number % max(len(parts), 1)
    return [*parts[turn:], *parts[:turn]]


def _ours(
    llm: LLM,
    question: Question,
    number: int,
    entrants: list[tuple[str, bool]],
    kept: dict[str, Decoder],
    options: dict[str, Any],
    rounds: int,
    told: Callable[[str], None],
) -> list[Run]:
    """One question by all of our methods, plain decoding first in the result."""
    answers: dict[tuple[str, bool], Generation] = {}
    for method, keeps in list(_in_turn(entrants, number)) * rounds:
        if keeps and (method, keeps) in answers:
            continue  # a second time it would remember this very answer
        llm.clear()
        decoder = kept[method] if keeps else llm.decoder(method)
        message = [{"role": "user", "content": question.text}]
        answer = llm.chat(message, decoder=decoder, **options)
        best = answers.get((method, keeps), answer)
        answers[method, keeps] = min(best, answer, key=_decode_seconds)
        told(f"{method}, warm" if keeps else method)
    plain = answers[PLAIN, False].tokens
    return [
        Run(
            question.category,
            number,
            method,
            options["temperature"],
            keeps,
            (stats := answers[method, keeps].stats).num_tokens,
            stats.passes,
            _decode_seconds(answers[method, keeps]),
            sum(r.get("draft_seconds", 0.0) for r in answers[method, keeps].trace or ()),
            _modelled(answers[method, keeps], llm.cost_model),
            loops(answers[method, keeps].tokens),
            answers[method, keeps].tokens == plain,
        )
        for method, keeps in entrants
    ]


def _theirs(
    llm: LLM,
    question: Question,
    number: int,
    worker: Worker,
    options: dict[str, Any],
    plain: Run,
) -> Run | None:
    """The same question by another engine, which shows neither passes nor drafts. Whether an answer
    loops is what our plain one did."""
    if worker.missing is not None:
        return None
    heat = options["temperature"]
    told = worker.ask(
        prompt=llm.tokenizer.render_chat([{"role": "user", "content": question.text}]),
        tokens=options["max_tokens"],
        temperature=heat,
        ends=True,
    )
    worker.missing = told.get("missing")
    if worker.missing is not None or told["tokens"] < 2:
        return None
    seconds = told["total"] - told["first"]
    return Run(
        question.category, number, worker.engine, heat, False, told["tokens"], 0, seconds, 0.0,
        0.0, plain.loops, False,
    )  # fmt: skip


def _held(results_log: ResultsLog) -> dict[tuple[float, int], list[Run]]:
    """What the diary has, by temperature and number of the question; plain decoding comes first."""
    found: dict[tuple[float, int], list[Run]] = {}
    try:
        for answers in results_log.entries:
            runs = [Run(**one) for one in answers]
            found.setdefault((runs[0].temperature, runs[0].prompt), []).extend(runs)
    except (TypeError, LookupError):
        raise results_log.format_error() from None
    return found


def _decode_seconds(answer: Generation) -> float:
    return answer.stats.seconds - answer.stats.time_to_first_token


def _modelled(answer: Generation, cost_model: CostModel) -> float:
    """Plain passes for the same tokens over the passes that were made, both by the cost table."""
    records = answer.trace or ()
    spent = sum(cost_model.seconds(1 + len(r["drafted"]), r["position"]) for r in records)
    spent += sum(r.get("draft_seconds", 0.0) for r in records)
    plain = sum(
        cost_model.seconds(1, r["position"] + position)
        for r in records
        for position in range(len(r["tokens"]))
    )
    return plain / spent if spent else 1.0


def memory(llm: LLM, question: Question, methods: Sequence[str], tokens: int) -> dict[str, int]:
    """Peak bytes that each method allocates beyond plain decoding, on one question, untimed."""
    peaks = {}
    for method in (PLAIN, *methods):
        llm.clear()
        tracemalloc.start()
        llm.chat([{"role": "user", "content": question.text}], decoder=method, max_tokens=tokens)
        peaks[method] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {method: max(0, peaks[method] - peaks[PLAIN]) for method in methods}


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per temperature, warm or cold, with or without looping answers, method and category;
    the category "overall" is the mean over categories."""
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
            head = {"temperature": temperature, "warm": warm, "loops": with_loops, "method": method}
            parts = [
                {**head, "category": category, **_figures(category_runs, plain)}
                for category, category_runs in _by_category(chosen)
            ]
            if parts:
                rows += [*parts, {**head, "category": "overall", **_overall(parts, chosen, plain)}]
    return rows


def _by_category(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    for category in dict.fromkeys(r.category for r in runs):
        yield category, [r for r in runs if r.category == category]


def _ratios(runs: Sequence[Run], plain: dict[tuple[float, int], Run]) -> np.ndarray:
    """float64 `[len(runs)]`: tokens per second over plain's, prompt by prompt."""
    return np.array([r.rate / plain[r.temperature, r.prompt].rate for r in runs])


def _figures(runs: Sequence[Run], plain: dict[tuple[float, int], Run]) -> dict[str, Any]:
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
    parts: Sequence[dict[str, Any]], runs: Sequence[Run], plain: dict[tuple[float, int], Run]
) -> dict[str, Any]:
    groups = [_ratios(category_runs, plain) for _, category_runs in _by_category(runs)]
    whole = _figures(runs, plain)
    mean = {
        name: float(np.mean([part[name] for part in parts]))
        for name in ("tokens_per_pass", "speedup", "modelled")
    }
    return {**whole, **mean, "interval": list(interval(groups))}


def interval(groups: Sequence[np.ndarray], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95% bootstrap interval of the mean over groups of each group's mean; prompts are drawn anew
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
        str | None, typer.Option("--draft", help="A smaller model, for methods that want one.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens per answer.")] = 128,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts per category; all if absent.")
    ] = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Separated by commas.")
    ] = "0,0.8",
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="Warm figures as well.")] = True,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="The fastest of so many cold answers counts.")
    ] = 1,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            help="Other engines in the same run, separated by commas, as"
            " llama.cpp-prompt-lookup; all: every speculative one, and each without.",
        ),
    ] = "",
    python: Annotated[
        str, typer.Option("--python", help="The interpreter that has the peers.")
    ] = sys.executable,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Write answers here as they come, and go on from there."),
    ] = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Time drafting methods against plain decoding, prompt by prompt.

    Example: anydecode bench speculative --methods auto,prompt-lookup --limit 2 --json out.json
    """
    from anydecode.evaluation.speculative_report import note, print_report, progress, to_svg

    if data is None:
        note(WHERE_TO_GET)
    chosen = [name.strip() for name in methods.replace(";", ",").split(",") if name.strip()]
    try:
        heats = [float(part) for part in temperatures.split(",")]
    except ValueError:
        raise InvalidRequestError(f"{temperatures!r} is no list of temperatures") from None
    asked = questions(data, limit)
    names = baseline_worker.SPECULATIVE if peers == "all" else tuple(filter(None, peers.split(",")))
    if unknown := sorted(set(names) - set(baseline_worker.SPECULATIVE)):
        known = ", ".join(baseline_worker.SPECULATIVE)
        raise InvalidRequestError(f"no peer {', '.join(unknown)}: there are {known}")
    settings = {
        "model": model, "draft": draft, "methods": chosen, "peers": names, "tokens": tokens,
        "warm": warm, "rounds": rounds, "questions": len(asked),
    }  # fmt: skip
    results_log = None if keep is None else ResultsLog(keep, settings)
    runs: list[Run] = []
    beyond: dict[str, int] = {}
    stopped = False
    with LLM(model, draft=draft, threads=threads or None) as llm, ExitStack() as stack:
        for method in chosen:
            llm.decoder(method)
        workers = []
        if names:
            file, count = find_file(model), threads or usable_cores()
            workers = started(names, file, count, python, stack, note)
        own = (1 + len(chosen)) * rounds + (len(chosen) if warm else 0)
        answers = len(asked) * len(heats) * (own + len(workers))
        for answered in _held(results_log).values() if results_log else ():
            answers -= own + sum(one.method in names for one in answered)
        try:
            with progress("answers", max(0, answers)) as advance:
                asking = run(
                    llm, asked, chosen, heats, tokens, warm, advance, rounds, workers, results_log
                )
                runs.extend(asking)
            beyond = memory(llm, asked[0], chosen, tokens)
        except KeyboardInterrupt:
            note("stopped: the figures are of what was answered")
            stopped = True
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "model": Path(model).name,
        "tokens": tokens,
        "data": "own prompts" if data is None else "Spec-Bench",
        "rows": summary(runs),
        "memory": beyond,
        "peers": {worker.engine: worker.hello.get("settings", "") for worker in workers},
        "missing": {worker.engine: worker.missing for worker in workers if worker.missing},
        "runs": [asdict(one) for one in runs],
    }
    if plot is not None:
        plot.write_text(to_svg(report), encoding="utf-8")
    write_report(report, json_file, lambda: print_report(report))
    if stopped:
        raise KeyboardInterrupt
