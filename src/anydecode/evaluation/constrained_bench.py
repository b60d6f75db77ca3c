"""`anydecode bench constrained`: what the constraints accept, what they get wrong, what they cost.

Instances of JSONSchemaBench and of the JSON-Schema-Test-Suite are walked through the constraint
token by token and then through the validator, as a decoder would; with a model, answers are
generated and judged by the `jsonschema` package.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from anydecode.constraints.json_schema import JsonSchema
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.tokenizer import Tokenizer


@dataclass
class Tally:
    """Counts and times of one split (or keyword). Times in milliseconds and microseconds."""

    schemas: int = 0
    compiled: int = 0
    all_right: int = 0
    valid: int = 0
    invalid: int = 0
    wrongly_refused: int = 0
    wrongly_allowed: int = 0
    with_checks: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what `other` counted."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Counts, with times as median, 95th, 99th percentile and largest."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        times = {"compile_ms": self.compile_ms, "mask_us": self.mask_us}
        return {**plain, **{name: _summary(all) for name, all in times.items()},
                "refusals": self.refusals}  # fmt: skip


def walk(
    constraint: JsonSchema, tokenizer: Tokenizer, text: str, times: list[float] | None = None
) -> bool:
    """Whether a decoder under `constraint` could say `text`: every token is in its mask, and no
    check refuses. The times of the masks, in microseconds, go into `times`."""
    state = constraint.start(tokenizer, tokenizer.vocab_size)
    watch = constraint.watch(tokenizer)
    for token in tokenizer.encode(text, special=False):
        if times is not None:
            began = perf_counter()
            state.mask()
            times.append(1e6 * (perf_counter() - began))
        if not state.allows(token):
            return False
        state.advance(token)
        if watch is not None and watch.push(token) is not None:
            return False
    return state.may_stop and (watch is None or watch.end() is None)


def measure_schema(
    schema: Any,
    tests: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    name: str,
    resources: dict[str, Any] | None = None,
) -> Tally:
    """One schema with its instances."""
    tally = Tally(schemas=1)
    began = perf_counter()
    try:
        constraint = JsonSchema(schema, max_string=0, resources=resources)
        constraint.start(tokenizer, tokenizer.vocab_size)
    except ConstraintError as error:
        tally.refusals.append(f"{name}: {error}")
        tally.compile_ms.append(1e3 * (perf_counter() - began))
        return tally
    tally.compile_ms.append(1e3 * (perf_counter() - began))
    tally.compiled = 1
    tally.with_checks = int(constraint.watch(tokenizer) is not None)
    wrong = 0
    for test in tests:
        times: list[float] = []
        try:
            text = json.dumps(test["data"], ensure_ascii=False)
            accepted = walk(constraint, tokenizer, text, times)
        except (ConstraintError, UnicodeEncodeError):
            accepted = False
        tally.mask_us += times
        valid = bool(test["valid"])
        tally.valid += valid
        tally.invalid += not valid
        tally.wrongly_refused += valid and not accepted
        tally.wrongly_allowed += accepted and not valid
        wrong += accepted != valid
    tally.all_right = int(not wrong)
    return tally


def measure_splits(data: Path, tokenizer: Tokenizer, limit: int | None) -> dict[str, Tally]:
    """JSONSchemaBench, by split; `limit` schemas of each."""
    tallies: dict[str, Tally] = {}
    for file in sorted(data.glob("*.jsonl")):
        tally = tallies[file.stem] = Tally()
        for line in file.read_text().splitlines()[:limit]:
            row = json.loads(line)
            tally.add(measure_schema(row["schema"], row["tests"], tokenizer, row["id"]))
    return tallies


def measure_suite(suite: Path, tokenizer: Tokenizer, limit: int | None) -> dict[str, Tally]:
    """The required part of the JSON-Schema-Test-Suite (draft 2020-12), by keyword."""
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
            tally.add(measure_schema(case["schema"], case["tests"], tokenizer, name, needed))
    return tallies


def generate_answers(
    llm: Any, data: Path, limit: int | None, tokens: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Answers of a model to the schemas of each split, judged by `jsonschema`, and the time per
    token beside unconstrained decoding."""
    judges = import_module("jsonschema.validators")
    result: dict[str, Any] = {}
    for file in sorted(data.glob("*.jsonl")):
        counts: dict[str, int] = defaultdict(int)
        paces: list[float] = []
        free: list[float] = []
        for row in _rows(file, limit):
            schema = row["schema"]
            prompt = f"A JSON object for this schema:\n{json.dumps(schema)[:1500]}\n\nJSON: "
            counts["schemas"] += 1
            try:
                answer = llm.generate(
                    prompt, constraint=JsonSchema(schema), max_tokens=tokens, **options
                )
            except ConstraintError:
                counts["errors"] += 1
                continue
            counts[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                judge = judges.validator_for(schema, judges.Draft202012Validator)(schema)
                counts["valid"] += judge.is_valid(json.loads(answer.text))
            paces.append(_pace(answer))
            free.append(_pace(llm.generate(prompt, max_tokens=tokens, ignore_eos=True, **options)))
        result[file.stem] = {
            **counts,
            "seconds_per_token": statistics.median(paces) if paces else None,
            "unconstrained_seconds_per_token": statistics.median(free) if free else None,
        }
    return result


def bench_constrained(
    data: Annotated[Path, typer.Option(help="Folder of JSONSchemaBench, one .jsonl per split.")],
    suite: Annotated[Path | None, typer.Option(help="The JSON-Schema-Test-Suite.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where figures go.")] = None,
    limit: Annotated[int | None, typer.Option(help="Schemas per split.")] = None,
    model: Annotated[str | None, typer.Option(help="Generate answers with this model too.")] = None,
    tokens: Annotated[int, typer.Option(help="Token limit of an answer.")] = 256,
) -> None:
    """What the constraints accept, what they get wrong, and what they cost.

    Example: anydecode bench constrained --data jsonschemabench --limit 10
    """
    if not data.is_dir():
        raise InvalidRequestError(f"{data} is no folder")
    llm = None
    tokenizer: Tokenizer = ByteTokenizer()
    if model is not None:
        from anydecode.engine.llm import LLM

        llm = LLM(model)
        assert llm.tokenizer is not None
        tokenizer = llm.tokenizer
    figures: dict[str, Any] = {"splits": _report(measure_splits(data, tokenizer, limit))}
    if suite is not None:
        figures["suite"] = _report(measure_suite(suite, tokenizer, limit))
    if llm is not None:
        figures["answers"] = generate_answers(llm, data, limit, tokens, {"temperature": 0.0})
        typer.echo(json.dumps(figures["answers"], indent=2))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


def _report(tallies: dict[str, Tally]) -> dict[str, Any]:
    total = Tally()
    typer.echo(f"{'':24} schemas compiled  right  refused  allowed  compile p50/p99 ms  mask us")
    for name, tally in [*tallies.items(), ("all", total)]:
        if tally is not total:
            total.add(tally)
        ms, us = _summary(tally.compile_ms), _summary(tally.mask_us)
        typer.echo(
            f"{name:24} {tally.schemas:7} {tally.compiled:8} {tally.all_right:6}"
            f" {tally.wrongly_refused:4}/{tally.valid:<4}"
            f" {tally.wrongly_allowed:3}/{tally.invalid:<4}"
            f" {ms['p50']:8.1f} {ms['p99']:8.1f} {us['p50']:8.0f} {us['p99']:8.0f}"
        )
    return {name: tally.to_dict() for name, tally in [*tallies.items(), ("all", total)]}


def _rows(file: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines()[:limit]:
        yield json.loads(line)


def _pace(answer: Any) -> float:
    stats = answer.stats
    return float((stats.seconds - stats.time_to_first_token) / max(1, stats.num_tokens - 1))


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": ordered[-1]}
