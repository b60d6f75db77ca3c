"""`anydecode bench constrained`: coverage, correctness and cost of constraints.

Instances of JSONSchemaBench and of the JSON-Schema-Test-Suite are walked through the constraint
token by token and then through the validator, as by a decoder. With a model, answers are generated
and validated by jsonschema-rs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer

from anydecode.benchmarks import constrained_worker
from anydecode.benchmarks.baselines import find_file
from anydecode.benchmarks.constrained_answers import (
    ANYDECODE,
    VARIANTS,
    Baseline,
    OwnEngine,
    Setting,
    percentile,
    print_results,
    run,
    summary,
    unconstrained_seconds_per_token,
)
from anydecode.benchmarks.spelling import spelling
from anydecode.constraints.grammar.canvas_grammar import CanvasGrammar
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.json.schema_grammar import canvas_grammar_of
from anydecode.constraints.vocabulary import vocabulary
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.machine import usable_cores
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.tokenizer import Tokenizer
from anydecode.progress import progress
from anydecode.report import split_names
from anydecode.results_log import ResultsLog

#: The name of a model of random bytes, with which constraints can be tried on many schemas.
SCRIPTED = "scripted"
ENGINE_NAMES = (*VARIANTS, *constrained_worker.BASELINES)


@dataclass
class Tally:
    """Counts and times of one split (or keyword).

    Attributes:
        schemas: Schemas measured.
        compiled: Schemas that compiled.
        all_right: Compiled schemas with no wrongly accepted or refused instance.
        valid: Valid instances.
        invalid: Invalid instances.
        wrongly_refused: Valid instances that the constraint refuses as they are written.
        respelled: Of these, those accepted with their properties in another order or whole numbers
            without ".0".
        wrongly_allowed: Invalid instances that the constraint accepts.
        with_checks: Schemas that need a validator in addition to the mask.
        canvas_compiled: Schemas that compiled to a grammar for `diffusion-cfg`.
        canvas_valid: Valid instances of these.
        canvas_invalid: Invalid instances of those of these that need no validator.
        canvas_refused: Valid instances that the grammar refuses as they are written.
        canvas_allowed: Invalid instances of `canvas_invalid` that the grammar allows.
        compile_ms: Wall time to compile each schema, in milliseconds.
        compile_cpu_ms: CPU time to compile each schema, in milliseconds.
        warm_ms: Wall time to compile the same schema again, in milliseconds.
        mask_us: Time of each mask, in microseconds.
        refusals: One line per schema that did not compile and per wrongly refused instance.
    """

    schemas: int = 0
    compiled: int = 0
    all_right: int = 0
    valid: int = 0
    invalid: int = 0
    wrongly_refused: int = 0
    respelled: int = 0
    wrongly_allowed: int = 0
    with_checks: int = 0
    canvas_compiled: int = 0
    canvas_valid: int = 0
    canvas_invalid: int = 0
    canvas_refused: int = 0
    canvas_allowed: int = 0
    compile_ms: list[float] = field(default_factory=list)
    compile_cpu_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts and times of `other`."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """The counts, and the times as median, 95th and 99th percentile and maximum."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        names = ("compile_ms", "compile_cpu_ms", "warm_ms", "mask_us")
        times = {name: getattr(self, name) for name in names}
        return {**plain, **{name: _summary(all) for name, all in times.items()},
                "refusals": self.refusals}  # fmt: skip


def walk(constraint: JsonSchema, tokenizer: Tokenizer, text: str) -> bool:
    """Whether `constraint` accepts `text`, token by token."""
    return refused_at(constraint, tokenizer, text) is None


def refused_at(
    constraint: JsonSchema, tokenizer: Tokenizer, text: str, times: list[float] | None = None
) -> int | None:
    """The number of tokens of `text` before `constraint` refuses; None if it accepts all of `text`:
    every token is in the mask, and the validator finds no error. Appends the time of each mask, in
    microseconds, to `times`."""
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    validator = constraint.incremental_validator(tokenizer)
    tokens = tokenizer.encode(text, special=False)
    for number, token in enumerate(tokens):
        if times is not None:
            start = perf_counter()
            state.mask()
            times.append(1e6 * (perf_counter() - start))
        if not state.allows(token):
            return number
        state.advance(token)
        if validator is not None and validator.push(token) is not None:
            return number + 1
    if not state.can_stop or (validator is not None and validator.end() is not None):
        return len(tokens)
    return None


def measure_schema(
    schema: Any,
    tests: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    name: str,
    resources: dict[str, Any] | None = None,
    formats: bool = True,
    canvas: bool = False,
) -> Tally:
    """Measure one schema with its instances, with `canvas` its grammar for `diffusion-cfg` too."""
    tally = Tally(schemas=1)
    options: dict[str, Any] = {"resources": resources, "formats": formats}
    start, cpu_start = perf_counter(), thread_time()
    try:
        constraint = JsonSchema(schema, **options)
        state = constraint.start(tokenizer, tokenizer.vocab_size)
    except ConstraintError as error:
        tally.refusals.append(f"{name}: {error}")
        return tally
    tally.compile_ms.append(1e3 * (perf_counter() - start))
    tally.compile_cpu_ms.append(1e3 * (thread_time() - cpu_start))
    start = perf_counter()
    JsonSchema(schema, **options).start(tokenizer, tokenizer.vocab_size)
    tally.warm_ms.append(1e3 * (perf_counter() - start))
    tally.compiled = 1
    tally.with_checks = int(constraint.incremental_validator(tokenizer) is not None)
    tests = list(tests)
    if canvas:
        _measure_canvas(tally, state, tests, tokenizer, name)
    num_wrong = 0
    for test in tests:
        times: list[float] = []
        try:
            text = json.dumps(test["data"], ensure_ascii=False)
            refused_after = refused_at(constraint, tokenizer, text, times)
        except (ConstraintError, UnicodeEncodeError):
            refused_after, text = 0, ""
        accepted = refused_after is None
        tally.mask_us += times
        valid = bool(test["valid"])
        if valid and not accepted:
            respelling = spelling(
                constraint.start(tokenizer, tokenizer.vocab_size), tokenizer, test["data"]
            )
            is_respelled = respelling is not None and walk(constraint, tokenizer, respelling)
            tally.respelled += is_respelled
            prefix = tokenizer.decode(tokenizer.encode(text, special=False)[:refused_after])[-60:]
            where = "in this spelling" if is_respelled else "in every spelling tried"
            case = " ".join((name, test.get("description", ""))).strip()
            tally.refusals.append(f"{case}: refused {where} after {prefix!r}")
        tally.valid += valid
        tally.invalid += not valid
        tally.wrongly_refused += valid and not accepted
        tally.wrongly_allowed += accepted and not valid
        num_wrong += accepted != valid
    tally.all_right = int(not num_wrong)
    return tally


def _measure_canvas(
    tally: Tally, state: Any, tests: list[dict[str, Any]], tokenizer: Tokenizer, name: str
) -> None:
    """Add to `tally` what the grammar for `diffusion-cfg` of a started constraint accepts."""
    tokens = vocabulary(tokenizer, tokenizer.vocab_size)
    try:
        grammar = CanvasGrammar(canvas_grammar_of(state.origin), tokens, frozenset())
    except ConstraintError as error:
        tally.refusals.append(f"{name}: {error}")
        return
    tally.canvas_compiled = 1
    for test in tests:
        try:
            text = json.dumps(test["data"], ensure_ascii=False)
            accepted = grammar.is_completable(tokenizer.encode(text, special=False))
        except UnicodeEncodeError:
            accepted = False
        if test["valid"]:
            tally.canvas_valid += 1
            tally.canvas_refused += not accepted
        elif not tally.with_checks:
            tally.canvas_invalid += 1
            tally.canvas_allowed += accepted


def measure_splits(
    rows: Iterable[tuple[str, str, dict[str, Any]]], tokenizer: Tokenizer, canvas: bool = False
) -> dict[str, Tally]:
    """Measure `rows` of JSONSchemaBench, by split."""
    tallies: dict[str, Tally] = {}
    for name, key, row in rows:
        tally = measure_schema(row["schema"], row["tests"], tokenizer, key, canvas=canvas)
        tallies.setdefault(name, Tally()).add(tally)
    return tallies


def load_rows(
    data: Path, limit: int | None, split: str, every: int = 1
) -> list[tuple[str, str, dict[str, Any]]]:
    """Split, id and row of the selected schemas: of each split (or only of `split`) the first of
    every `every`, at most `limit`."""
    files = sorted(file for file in data.glob("*.jsonl") if split in ("", file.stem))
    if not files:
        raise InvalidRequestError(f"no split {split!r} in {data}" if split else f"{data} is empty")
    rows = []
    for file in files:
        lines = [line for line in file.read_text("utf-8").split("\n") if line.strip()]
        for line in lines[::every][:limit]:
            row = json.loads(line)
            rows.append((file.stem, row["id"], row))
    return rows


def measure_suite(
    suite: Path, tokenizer: Tokenizer, limit: int | None, canvas: bool = False
) -> dict[str, Tally]:
    """Measure the required part of the JSON-Schema-Test-Suite (draft 2020-12), by keyword. Formats
    are annotations there, the specification's default."""
    remotes = suite / "remotes"
    files = sorted((remotes / "draft2020-12").rglob("*.json"))
    base_url = "http://localhost:1234/"
    resources = {
        base_url + file.relative_to(remotes).as_posix(): json.loads(file.read_text())
        for file in files
    }
    tallies: dict[str, Tally] = {}
    for file in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        tally = tallies[file.stem] = Tally()
        for case in json.loads(file.read_text())[:limit]:
            name = f"{file.stem}: {case['description']}"
            case_resources = resources if "localhost:1234" in json.dumps(case["schema"]) else None
            tally.add(
                measure_schema(
                    case["schema"], case["tests"], tokenizer, name, case_resources, False, canvas
                )
            )
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
    """Generate answers with this engine and baselines for every schema, and return the results by
    split. Rows of an earlier run in `file` are reused."""
    settings = {**asdict(setting), "model": Path(model).name, "decoder": decoder}
    results_log = ResultsLog(file, settings)
    active: dict[str, OwnEngine | Baseline] = {}
    missing: dict[str, str] = {}
    for name in engines:
        if name in VARIANTS:
            active[name] = OwnEngine(llm, setting, decoder, name)
        else:
            baseline = Baseline(name, find_file(model), threads, python, setting)
            if baseline.missing is None:
                active[name] = baseline
            else:
                missing[name] = baseline.missing
    plain = [(split, name, row["schema"]) for split, name, row in schemas]
    token_seconds = unconstrained_seconds_per_token(
        llm, [schema for _, _, schema in plain[:: len(plain) // 8 + 1]], setting
    )
    all_rows = []
    try:
        with progress("schemas", len(plain)) as bar:
            for schema_rows in run(
                active, plain, setting, results_log.entries, results_log.write, llm
            ):
                all_rows += schema_rows
                bar.advance()
    finally:
        for one in active.values():
            one.close()
    results: dict[str, dict[str, Any]] = {}
    for split in [*dict.fromkeys(row["split"] for row in all_rows), "all"]:
        results[split] = {
            name: summary(
                [r for r in all_rows if r["engine"] == name and split in ("all", r["split"])],
                setting,
            )
            for name in active
        }
    print_results(results)
    typer.echo(f"{1e3 * token_seconds:.1f} ms per token without a constraint")
    for name, reason in missing.items():
        typer.echo(f"{name}: missing ({reason})")
    return {"setting": settings, "unconstrained_token_ms": 1e3 * token_seconds, "missing": missing,
            "figures": results}  # fmt: skip


def bench_constrained(
    data: Annotated[Path, typer.Option(help="Folder of JSONSchemaBench, one .jsonl per split.")],
    suite: Annotated[Path | None, typer.Option(help="The JSON-Schema-Test-Suite.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write results here; answers go beside it, so that a run can be resumed."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Schemas per split.")] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Only the first of every N schemas of a split.")
    ] = 1,
    split: Annotated[str, typer.Option(help="Only this split.")] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Generate answers with this model too; {SCRIPTED!r}: random bytes, at no cost."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Token limit of an answer.")] = 256,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per schema and engine.")] = 10,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.7,
    close: Annotated[
        bool, typer.Option("--close", help="Complete this engine's answers within the limit.")
    ] = False,
    decoder: Annotated[str, typer.Option(help="Decoder of this engine.")] = "auto",
    engines: Annotated[
        str,
        typer.Option(
            help=f"Any of {', '.join(ENGINE_NAMES)}; the names with 'without' are ablations of this"
            " engine."
        ),
    ] = ANYDECODE,
    canvas: Annotated[
        bool, typer.Option("--canvas", help="Compile the schemas for diffusion-cfg too.")
    ] = False,
    guards: Annotated[
        bool,
        typer.Option(
            help="Limit strings to 256 characters and leave out properties that the schema does not"
            " list; without, a schema means what the specification says."
        ),
    ] = False,
    python: Annotated[
        str, typer.Option("--python", help="Python interpreter with the baselines installed.")
    ] = sys.executable,
    threads: Annotated[
        int, typer.Option("--threads", help="CPU threads per engine; 0: every core.")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="Maximum seconds per baseline answer.")] = 60.0,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Answers of this engine that are decoded together; changes only times."
        ),
    ] = 1,
) -> None:
    """Measure coverage, correctness and cost of constraints.

    Example: anydecode bench constrained --data jsonschemabench --limit 10
    """
    if not data.is_dir():
        raise InvalidRequestError(f"{data} is not a folder")
    names = split_names(engines)
    unknown = sorted(set(names) - set(ENGINE_NAMES))
    if unknown:
        raise InvalidRequestError(
            f"unknown engines {', '.join(unknown)}; choose from {', '.join(ENGINE_NAMES)}"
        )
    schemas = load_rows(data, limit, split, every)
    llm = None
    tokenizer: Tokenizer = ByteTokenizer()
    if model is not None:
        from anydecode.api.llm import LLM

        if model == SCRIPTED:
            llm = LLM(ScriptedModel(seed=1), tokenizer=tokenizer, cache_positions=1 << 14)
        else:
            llm = LLM(model, threads=threads or None)
        tokenizer = llm.tokenizer
    results: dict[str, Any] = {"splits": _report(measure_splits(schemas, tokenizer, canvas))}
    if suite is not None:
        results["suite"] = _report(measure_suite(suite, tokenizer, limit, canvas))
    if llm is not None and model is not None:
        base_file = Path("constrained.json") if json_file is None else json_file
        results["answers"] = measure_answers(
            llm,
            model,
            schemas,
            Setting(seeds, tokens, temperature, close, seconds, batch, guards),
            decoder=decoder,
            engines=names,
            python=python,
            file=base_file.with_suffix(".answers.jsonl"),
            threads=threads or usable_cores(),
        )
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


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
    if total.canvas_compiled:
        typer.echo(
            f"diffusion-cfg: {total.canvas_compiled} of {total.compiled} schemas compile;"
            f" {total.canvas_refused} of {total.canvas_valid} valid instances are refused as they"
            f" are written, and {total.canvas_allowed} of {total.canvas_invalid} invalid ones"
            " allowed that no validator is needed for"
        )
    for refusal in total.refusals:
        typer.echo(f"  {refusal}")
    return {name: tally.to_dict() for name, tally in [*tallies.items(), ("all", total)]}


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
        "max": max(values, default=0.0),
    }
