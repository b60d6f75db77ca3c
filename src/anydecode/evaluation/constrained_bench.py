"""`anydecode bench constrained`: what the constraints accept, what they get wrong, what they cost.

Instances of JSONSchemaBench and of the JSON-Schema-Test-Suite are walked through the constraint
token by token and then through the validator, as a decoder would; with a model, answers are
generated and judged by jsonschema-rs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer

from anydecode.constraints.json_schema import JsonSchema
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.evaluation import constrained_worker
from anydecode.evaluation.baselines import find_file
from anydecode.evaluation.constrained_answers import (
    OURS,
    UNCHECKED,
    Baseline,
    Ours,
    Setting,
    print_figures,
    run,
    summary,
    unconstrained_pace,
)
from anydecode.evaluation.machine_info import usable_cores
from anydecode.evaluation.results_log import ResultsLog
from anydecode.evaluation.spelling import spelling
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.tokenizer import Tokenizer


@dataclass
class Tally:
    """Counts and times of one split (or keyword). Times in milliseconds and microseconds; `warm_ms`
    is the same schema once more, `compile_cpu_ms` leaves out what other processes took. Of the
    instances `wrongly_refused` as they are written, `respelled` can be said with their properties
    in another order or whole numbers without ".0"."""

    schemas: int = 0
    compiled: int = 0
    all_right: int = 0
    valid: int = 0
    invalid: int = 0
    wrongly_refused: int = 0
    respelled: int = 0
    wrongly_allowed: int = 0
    with_checks: int = 0
    compile_ms: list[float] = field(default_factory=list)
    compile_cpu_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what `other` counted."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Counts, with times as median, 95th, 99th percentile and largest."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        names = ("compile_ms", "compile_cpu_ms", "warm_ms", "mask_us")
        times = {name: getattr(self, name) for name in names}
        return {**plain, **{name: _summary(all) for name, all in times.items()},
                "refusals": self.refusals}  # fmt: skip


def walk(constraint: JsonSchema, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a decoder under `constraint` could say `text`."""
    return refused_at(constraint, tokenizer, text) is None


def refused_at(
    constraint: JsonSchema, tokenizer: Tokenizer, text: str, times: list[float] | None = None
) -> int | None:
    """None if a decoder under `constraint` could say `text`: every token is in its mask, and no
    check refuses. Else how many tokens it could say. The times of the masks, in microseconds, go
    into `times`."""
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    watch = constraint.incremental_validator(tokenizer)
    tokens = tokenizer.encode(text, special=False)
    for number, token in enumerate(tokens):
        if times is not None:
            began = perf_counter()
            state.mask()
            times.append(1e6 * (perf_counter() - began))
        if not state.allows(token):
            return number
        state.advance(token)
        if watch is not None and watch.push(token) is not None:
            return number + 1
    if not state.may_stop or (watch is not None and watch.end() is not None):
        return len(tokens)
    return None


def measure_schema(
    schema: Any,
    tests: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    name: str,
    resources: dict[str, Any] | None = None,
    formats: bool = True,
) -> Tally:
    """One schema with its instances."""
    tally = Tally(schemas=1)
    options: dict[str, Any] = {
        "max_string": 0,
        "extra_properties": True,
        "resources": resources,
        "formats": formats,
    }
    began, worked = perf_counter(), thread_time()
    try:
        constraint = JsonSchema(schema, **options)
        constraint.start(tokenizer, tokenizer.vocab_size)
    except ConstraintError as error:
        tally.refusals.append(f"{name}: {error}")
        return tally
    tally.compile_ms.append(1e3 * (perf_counter() - began))
    tally.compile_cpu_ms.append(1e3 * (thread_time() - worked))
    began = perf_counter()
    JsonSchema(schema, **options).start(tokenizer, tokenizer.vocab_size)
    tally.warm_ms.append(1e3 * (perf_counter() - began))
    tally.compiled = 1
    tally.with_checks = int(constraint.incremental_validator(tokenizer) is not None)
    wrong = 0
    for test in tests:
        times: list[float] = []
        try:
            text = json.dumps(test["data"], ensure_ascii=False)
            stopped = refused_at(constraint, tokenizer, text, times)
        except (ConstraintError, UnicodeEncodeError):
            stopped, text = 0, ""
        accepted = stopped is None
        tally.mask_us += times
        valid = bool(test["valid"])
        if valid and not accepted:
            other = spelling(
                constraint.start(tokenizer, tokenizer.vocab_size), tokenizer, test["data"]
            )
            spelled = other is not None and walk(constraint, tokenizer, other)
            tally.respelled += spelled
            said = tokenizer.decode(tokenizer.encode(text, special=False)[:stopped])[-60:]
            how = "in this spelling" if spelled else "in any spelling found"
            case = " ".join((name, test.get("description", ""))).strip()
            tally.refusals.append(f"{case}: refused {how} behind {said!r}")
        tally.valid += valid
        tally.invalid += not valid
        tally.wrongly_refused += valid and not accepted
        tally.wrongly_allowed += accepted and not valid
        wrong += accepted != valid
    tally.all_right = int(not wrong)
    return tally


def measure_splits(
    data: Path, tokenizer: Tokenizer, limit: int | None, split: str = ""
) -> dict[str, Tally]:
    """JSONSchemaBench, by split; `limit` schemas of each, or of the one called `split`."""
    tallies: dict[str, Tally] = {}
    for name, key, row in rows_of(data, limit, split):
        tally = measure_schema(row["schema"], row["tests"], tokenizer, key)
        tallies.setdefault(name, Tally()).add(tally)
    return tallies


def rows_of(data: Path, limit: int | None, split: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Split, id and row of the schemas to look at."""
    files = sorted(file for file in data.glob("*.jsonl") if split in ("", file.stem))
    if not files:
        raise InvalidRequestError(f"no split {split!r} in {data}" if split else f"{data} is empty")
    found = []
    for file in files:
        for line in file.read_text().splitlines()[:limit]:
            row = json.loads(line)
            found.append((file.stem, row["id"], row))
    return found


def measure_suite(suite: Path, tokenizer: Tokenizer, limit: int | None) -> dict[str, Tally]:
    """The required part of the JSON-Schema-Test-Suite (draft 2020-12), by keyword. There formats
    are annotations, as the specification has it where nothing else is said."""
    remotes = suite / "remotes"
    files = sorted((remotes / "draft2020-12").rglob("*.json"))
    home = "http://localhost:1234/"
    resources = {
        home + file.relative_to(remotes).as_posix(): json.loads(file.read_text()) for file in files
    }
    tallies: dict[str, Tally] = {}
    for file in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        tally = tallies[file.stem] = Tally()
        for case in json.loads(file.read_text())[:limit]:
            name = f"{file.stem}: {case['description']}"
            needed = resources if "localhost:1234" in json.dumps(case["schema"]) else None
            tally.add(measure_schema(case["schema"], case["tests"], tokenizer, name, needed, False))
    return tallies


def measure_answers(
    llm: Any,
    model: str,
    schemas: list[tuple[str, str, dict[str, Any]]],
    setting: Setting,
    *,
    decoder: str,
    engines: list[str],
    python: str,
    file: Path,
    threads: int,
) -> dict[str, Any]:
    """Answers of this engine and of peers to every schema, by split; what `file` has of an earlier
    run is kept."""
    told = {**asdict(setting), "model": Path(model).name, "decoder": decoder}
    results_log = ResultsLog(file, told)
    asked: dict[str, Ours | Baseline] = {}
    missing: dict[str, str] = {}
    for name in engines:
        if name == OURS:
            asked[name] = Ours(llm, setting, decoder)
        elif name == UNCHECKED:
            asked[name] = Ours(llm, setting, decoder, UNCHECKED)
        else:
            peer = Baseline(name, find_file(model), threads, python, setting)
            if peer.missing is None:
                asked[name] = peer
            else:
                missing[name] = peer.missing
    plain = [(split, name, row["schema"]) for split, name, row in schemas]
    free = unconstrained_pace(
        llm, [schema for _, _, schema in plain[:: len(plain) // 8 + 1]], setting
    )
    every = []
    try:
        with progress(len(plain)) as step:
            for own in run(asked, plain, setting, results_log.entries, results_log.write, llm):
                every += own
                step()
    finally:
        for one in asked.values():
            one.close()
    figures: dict[str, dict[str, Any]] = {}
    for split in [*dict.fromkeys(row["split"] for row in every), "all"]:
        figures[split] = {
            name: summary(
                [r for r in every if r["engine"] == name and split in ("all", r["split"])], setting
            )
            for name in asked
        }
    print_figures(figures)
    typer.echo(f"{1e3 * free:.1f} ms per token without a constraint")
    for name, reason in missing.items():
        typer.echo(f"{name}: missing ({reason})")
    return {"setting": told, "unconstrained_token_ms": 1e3 * free, "missing": missing,
            "figures": figures}  # fmt: skip


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; each call is one schema."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress("schemas", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def bench_constrained(
    data: Annotated[Path, typer.Option(help="Folder of JSONSchemaBench, one .jsonl per split.")],
    suite: Annotated[Path | None, typer.Option(help="The JSON-Schema-Test-Suite.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Where figures go; answers beside it, so a run can go on."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Schemas per split.")] = None,
    split: Annotated[str, typer.Option(help="Only this split.")] = "",
    model: Annotated[str | None, typer.Option(help="Generate answers with this model too.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Token limit of an answer.")] = 256,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per schema and engine.")] = 10,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers.")] = 0.7,
    close: Annotated[
        bool, typer.Option("--close", help="Bring ours to an end within the limit.")
    ] = False,
    decoder: Annotated[str, typer.Option(help="Our decoder.")] = "auto",
    engines: Annotated[
        str, typer.Option(help="Of anydecode, xgrammar, llama.cpp, outlines.")
    ] = OURS,
    python: Annotated[
        str, typer.Option("--python", help="The interpreter that has the peers.")
    ] = sys.executable,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads for each.")] = 0,
    seconds: Annotated[float, typer.Option(help="Most a peer may take for one answer.")] = 60.0,
    batch: Annotated[
        int, typer.Option(min=1, help="Answers of ours decoded together; changes times only.")
    ] = 1,
) -> None:
    """What the constraints accept, what they get wrong, and what they cost.

    Example: anydecode bench constrained --data jsonschemabench --limit 10
    """
    if not data.is_dir():
        raise InvalidRequestError(f"{data} is no folder")
    names = [name.strip() for name in engines.split(",") if name.strip()]
    unknown = sorted(set(names) - {OURS, UNCHECKED, *constrained_worker.BASELINES})
    if unknown:
        raise InvalidRequestError(f"no engine is called {', '.join(unknown)}")
    schemas = rows_of(data, limit, split)
    llm = None
    tokenizer: Tokenizer = ByteTokenizer()
    if model is not None:
        from anydecode.engine.llm import LLM

        llm = LLM(model, threads=threads or None)
        tokenizer = llm.tokenizer
    figures: dict[str, Any] = {"splits": _report(measure_splits(data, tokenizer, limit, split))}
    if suite is not None:
        figures["suite"] = _report(measure_suite(suite, tokenizer, limit))
    if llm is not None and model is not None:
        beside = Path("constrained.json") if json_file is None else json_file
        figures["answers"] = measure_answers(
            llm,
            model,
            schemas,
            Setting(seeds, tokens, temperature, close, seconds, batch),
            decoder=decoder,
            engines=names,
            python=python,
            file=beside.with_suffix(".answers.jsonl"),
            threads=threads or usable_cores(),
        )
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


def _report(tallies: dict[str, Tally]) -> dict[str, Any]:
    total = Tally()
    typer.echo(
        f"{'':22} schemas compiled right  refused (spelling) allowed   cold p50/p99 ms"
        "  cpu p99  warm p50   mask us"
    )
    for name, tally in [*tallies.items(), ("all", total)]:
        if tally is not total:
            total.add(tally)
        ms, us, warm = map(_summary, (tally.compile_ms, tally.mask_us, tally.warm_ms))
        cpu = _summary(tally.compile_cpu_ms)
        typer.echo(
            f"{name:22} {tally.schemas:7} {tally.compiled:8} {tally.all_right:5}"
            f" {tally.wrongly_refused:4}/{tally.valid:<4} ({tally.respelled:3})"
            f" {tally.wrongly_allowed:7}/{tally.invalid:<4}"
            f" {ms['p50']:8.1f} {ms['p99']:8.1f} {cpu['p99']:8.1f}"
            f" {warm['p50']:8.2f} {us['p50']:5.0f} {us['p99']:6.0f}"
        )
    for refusal in total.refusals:
        typer.echo(f"  {refusal}")
    return {name: tally.to_dict() for name, tally in [*tallies.items(), ("all", total)]}


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": ordered[-1]}
