"""Generates answers under JSON schemas, with this engine and with baselines, and validates them
with jsonschema-rs.

A schema counts as accepted if at least `MIN_ACCEPTED_SHARE` of its seeds give a finished, valid
answer. Each row is written as soon as it is complete, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from time import perf_counter
from typing import Any
from unittest.mock import patch

import jsonschema_rs

from anydecode.benchmarks import constrained_worker
from anydecode.benchmarks.baselines import Worker
from anydecode.constraints.constraint import IncrementalValidator
from anydecode.constraints.json import narrowing
from anydecode.constraints.json.completion_hints import SchemaHints
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.json.shortest_completion import shortest_completion
from anydecode.constraints.patterns import pattern_options
from anydecode.errors import AnydecodeError
from anydecode.models.tokenizer import Tokenizer

#: Share of seeds with a finished, valid answer from which a schema counts as accepted.
MIN_ACCEPTED_SHARE = 0.8
ANYDECODE = "anydecode"
UNCHECKED = "xgrammar"
#: The names of ablations begin so.
WITHOUT = "without "
#: Options of `JsonSchema` with which strings are limited and objects closed.
GUARDS: dict[str, Any] = {"max_string": 256, "extra_properties": False}

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Settings for every engine.

    Attributes:
        seeds: Answers per schema.
        tokens: Token limit of an answer.
        temperature: Sampling temperature.
        close: Whether this engine completes an answer within the limit.
        seconds: Maximum seconds that a baseline may take for one answer.
        batch: Answers of this engine that are decoded together; changes only their times.
        guards: Whether this engine limits strings to 256 characters and leaves out properties that
            the schema does not list.
    """

    seeds: int = 10
    tokens: int = 256
    temperature: float = 0.7
    close: bool = False
    seconds: float = 60.0
    batch: int = 1
    guards: bool = False

    @property
    def schema_options(self) -> dict[str, Any]:
        """The options of `JsonSchema`."""
        return GUARDS if self.guards else {}


def prompt_for(schema: Any) -> str:
    """The prompt for `schema`, the same for every engine."""
    return f"A JSON object for this schema:\n{json.dumps(schema)[:1500]}\n\nJSON: "


class OwnEngine:
    """This engine. `decoder` is a key of the catalogue, `variant` a key of `VARIANTS`."""

    def __init__(self, llm: Any, setting: Setting, decoder: str, variant: str = ANYDECODE):
        self.llm = llm
        self.setting = setting
        self.decoder = decoder
        self.constraint_class = VARIANTS[variant]
        self.engine = "xgrammar" if variant == UNCHECKED else "llguidance"
        self._cached: tuple[Any, JsonSchema, float] | None = None

    def ask(self, schema: Any, seeds: range) -> list[Row]:
        """One row per seed, decoded together."""
        start = perf_counter()
        try:
            constraint, compiled = self._constraint(schema)
        except AnydecodeError as error:
            return [{"error": str(error)[:200], "total": perf_counter() - start}]
        rows = []
        for seed, answer in zip(seeds, self._generate(schema, constraint, seeds), strict=True):
            if isinstance(answer, AnydecodeError):
                total = perf_counter() - start
                rows.append({"error": str(answer)[:200], "drawn": True, "total": total})
            else:
                rows.append(self._row(answer, compiled if seed == seeds[0] else 0.0))
        return rows

    def _generate(self, schema: Any, constraint: JsonSchema, seeds: range) -> list[Any]:
        """One generation or error per seed."""
        options = {
            "constraint": constraint,
            "decoder": self.decoder,
            "max_tokens": self.setting.tokens,
            "temperature": self.setting.temperature,
        }
        prompt = prompt_for(schema)
        if len(seeds) == 1:
            try:
                return [self.llm.generate(prompt, seed=seeds[0], **options)]
            except AnydecodeError as error:
                return [error]

        async def generate_all() -> list[Any]:
            calls = (self.llm.agenerate(prompt, seed=seed, **options) for seed in seeds)
            return await asyncio.gather(*calls, return_exceptions=True)

        answers = asyncio.run(generate_all())
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, AnydecodeError):
                raise answer
        return answers

    @staticmethod
    def _row(answer: Any, compiled: float) -> Row:
        stats = answer.stats
        return {
            "text": answer.text,
            "finished": answer.finish_reason == "stop",
            "tokens": stats.num_tokens,
            "passes": stats.passes,
            "compile": compiled,
            "first": stats.time_to_first_token,
            "total": stats.seconds,
            "tries": answer.constraint["tries"],
            "steered": answer.constraint["steered"],
            "narrowed": answer.constraint["narrowed"],
            "guards": answer.constraint["guards"],
        }

    def _constraint(self, schema: Any) -> tuple[JsonSchema, float]:
        if self._cached is None or self._cached[0] is not schema:
            start = perf_counter()
            constraint = self.constraint_class(
                schema,
                close=self.setting.close,
                engine=self.engine,
                **self.setting.schema_options,
            )
            constraint.start(self.llm.tokenizer, self.llm.model.spec.vocab_size)
            self._cached = (schema, constraint, perf_counter() - start)
            return constraint, self._cached[2]
        return self._cached[1], 0.0

    def close(self) -> None:
        """Do nothing."""


class _Unchecked(JsonSchema):
    """A constraint that only masks, without validating, as in the servers that use xgrammar."""

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        return None


class _WithoutNarrowing(JsonSchema):
    """An ablation: an answer that keeps failing validation is not tried under narrowed schemas."""

    def narrowed(self, index: int) -> None:
        return None


class _WithoutWitnesses(JsonSchema):
    """An ablation: narrowed schemas do not name the properties that negations require."""

    def narrowed(self, index: int) -> JsonSchema | None:
        with patch.object(narrowing, "witnesses", lambda schema, index: []):
            return super().narrowed(index)


class _NoHints(SchemaHints):
    """Hints without values and names."""

    @cached_property
    def values(self) -> list[bytes]:
        return []

    @cached_property
    def names(self) -> dict[str, bytes]:
        return {}


class _WithoutHints(JsonSchema):
    """An ablation: the shortest completion is searched without values and names of the schema."""

    @cached_property
    def completion_hints(self) -> SchemaHints:
        return _NoHints({})


#: The variants of this engine, by the name of the engine in the results.
VARIANTS: dict[str, type[JsonSchema]] = {
    ANYDECODE: JsonSchema,
    UNCHECKED: _Unchecked,
    WITHOUT + "narrowing": _WithoutNarrowing,
    WITHOUT + "witnesses": _WithoutWitnesses,
    WITHOUT + "hints": _WithoutHints,
}


class Baseline:
    """A baseline in its own process, which is restarted if it exceeds its time limit."""

    def __init__(self, name: str, model: str, threads: int, python: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self._start_worker: Callable[[], Worker] = lambda: Worker(
            name, model, threads, python, constrained_worker.__file__
        )
        self._worker: Worker | None = self._start_worker()
        self.missing = self._worker.missing

    def ask(self, schema: Any, seeds: range) -> list[Row]:
        """One row per seed, in sequence, up to the first error."""
        rows: list[Row] = []
        for seed in seeds:
            rows.append(self._ask(schema, seed))
            if "error" in rows[-1]:
                break
        return rows

    def _ask(self, schema: Any, seed: int) -> Row:
        if self._worker is None:
            self._worker = self._start_worker()
        setting = self.setting
        timer = threading.Timer(setting.seconds, self._worker.process.kill)
        timer.start()
        answer = self._worker.ask(
            schema=schema,
            prompt=prompt_for(schema),
            tokens=setting.tokens,
            temperature=setting.temperature,
            seed=seed,
        )
        timer.cancel()
        if "missing" in answer:
            self._worker.close()
            self._worker = None
            return {"error": f"no answer within {setting.seconds:g} s", "late": True}
        return answer

    def close(self) -> None:
        """End the baseline's process."""
        if self._worker is not None:
            self._worker.close()


def judged(schema: Any, row: Row) -> Row:
    """`row` with `finished` and `valid` added, as validated by jsonschema-rs with formats as
    annotations. Answers to a schema that jsonschema-rs rejects are not valid."""
    try:
        value = json.loads(row.get("text", ""))
    except (ValueError, RecursionError):
        return {**row, "finished": False, "valid": False}
    finished = row.get("finished", True)
    return {**row, "finished": finished, "valid": bool(finished and _is_valid(schema, value))}


def _is_valid(schema: Any, value: Any) -> bool:
    try:
        validator = jsonschema_rs.validator_for(
            schema, validate_formats=False, pattern_options=pattern_options(schema), offline=True
        )
        return bool(validator.is_valid(value))
    except (AnydecodeError, ValueError):
        return False


def run(
    engines: dict[str, OwnEngine | Baseline],
    schemas: Iterable[tuple[str, str, Any]],
    setting: Setting,
    previous_rows: list[Row],
    write: Callable[[Row], None],
    llm: Any,
) -> Iterator[list[Row]]:
    """Run every engine on every schema (split, id, schema), except for rows in `previous_rows`.
    Yields the rows of each schema."""
    done: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in previous_rows:
        done[row["id"], row["engine"]].append(row)
    for split, name, schema in schemas:
        rows: list[Row] = []
        fits = smallest_fits(llm, schema, setting)
        for engine, runner in engines.items():
            previous = done[name, engine]
            rows += previous
            labels = {"split": split, "id": name, "engine": engine, "fits": fits}
            for first in range(len(previous), setting.seeds, setting.batch):
                seeds = range(first, min(first + setting.batch, setting.seeds))
                new = [
                    judged(schema, row) | labels | {"seed": seed}
                    for seed, row in zip(seeds, runner.ask(schema, seeds), strict=False)
                ]
                for row in new:
                    row.pop("text", None)
                    write(row)
                rows += new
                if any("error" in row and not row.get("drawn") for row in new):
                    break  # the next seed would fail in the same way
        yield rows


def smallest_fits(llm: Any, schema: Any, setting: Setting) -> bool:
    """Whether the shortest completion that is found is within the token limit."""
    try:
        constraint = JsonSchema(schema, **setting.schema_options)
        state = constraint.start(llm.tokenizer, llm.model.spec.vocab_size)
        completion = shortest_completion(state, llm.tokenizer, constraint.completion_hints)
    except AnydecodeError:
        return False
    return completion is not None and len(completion) <= setting.tokens


def unconstrained_seconds_per_token(llm: Any, schemas: Iterable[Any], setting: Setting) -> float:
    """Median seconds per token over a few prompts without a constraint, at one token per pass."""
    token_seconds = []
    for schema in schemas:
        answer = llm.generate(
            prompt_for(schema),
            decoder="autoregressive",
            max_tokens=64,
            ignore_eos=True,
            temperature=setting.temperature,
            seed=0,
        )
        token_seconds.append(_seconds_per_token(answer.stats.num_tokens, answer.stats))
    return statistics.median(token_seconds) if token_seconds else 0.0


def _seconds_per_token(tokens: int, stats: Any) -> float:
    return float((stats.seconds - stats.time_to_first_token) / max(1, tokens - 1))


def summary(rows: list[Row], setting: Setting) -> dict[str, Any]:
    """The results of one engine's `rows`."""
    by_schema: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_schema[row["id"]].append(row)
    num_needed = ceil(MIN_ACCEPTED_SHARE * setting.seeds)
    answers = [row for row in rows if "error" not in row]
    fitting = [row for row in answers if row["fits"]]
    token_seconds = [
        (row["total"] - row["first"]) / (row["tokens"] - 1) for row in answers if row["tokens"] > 1
    ]
    compiles = [row["compile"] for row in answers if row["compile"]]
    passes = sum(row.get("passes", 0) for row in answers)
    return {
        "schemas": len(by_schema),
        "covered": sum(
            any("error" not in row for row in schema_rows) for schema_rows in by_schema.values()
        ),
        "accepted": sum(
            sum(r["valid"] for r in schema_rows) >= num_needed for schema_rows in by_schema.values()
        ),
        "answers": len(rows),
        "valid": sum(row["valid"] for row in rows),
        "finished_invalid": sum(row["finished"] and not row["valid"] for row in answers),
        "unfinished": sum(not row["finished"] for row in answers),
        "errors": len(rows) - len(answers),
        "steered": sum(row.get("steered", False) for row in answers),
        "narrowed": sum(row.get("narrowed", False) for row in answers),
        "finished_of_fitting": _share(sum(row["finished"] for row in fitting), len(fitting)),
        "compile_ms_p50": 1e3 * percentile(compiles, 0.5),
        "compile_ms_p99": 1e3 * percentile(compiles, 0.99),
        "first_ms_p50": 1e3 * percentile([row["first"] for row in answers], 0.5),
        "token_ms_p50": 1e3 * percentile(token_seconds, 0.5),
        "token_ms_mean": 1e3 * (statistics.mean(token_seconds) if token_seconds else 0.0),
        "tokens_per_pass": _share(sum(row["tokens"] for row in answers), passes),
        "guards": next((row["guards"] for row in answers if "guards" in row), None),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def percentile(values: list[float], share: float) -> float:
    """The value at `share` of the sorted `values`; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def print_results(results: dict[str, dict[str, Any]]) -> None:
    """Print one line per split and engine."""
    names = ("split", "engine", "accepted", "valid", "invalid", "open", "error", "fit%", "compile",
             "first", "ms/token", "tok/pass")  # fmt: skip
    print(_line(names))
    for split, engines in results.items():
        for engine, result in engines.items():
            fit = result["finished_of_fitting"]
            cells = (
                split, engine, f"{result['accepted']}/{result['schemas']}",
                f"{result['valid']}/{result['answers']}", result["finished_invalid"],
                result["unfinished"], result["errors"], "" if fit is None else f"{100 * fit:.0f}",
                f"{result['compile_ms_p50']:.1f}", f"{result['first_ms_p50']:.0f}",
                f"{result['token_ms_p50']:.1f}",
                "" if result["tokens_per_pass"] is None else f"{result['tokens_per_pass']:.2f}",
            )  # fmt: skip
            print(_line(cells))
    for name, points in ablation_points(results["all"]).items():
        print(f"{name}: {points:+.1f} points of accepted schemas")
    sys.stdout.flush()


def _line(cells: Iterable[Any]) -> str:
    """One line of the table; the first two columns hold names."""
    return "".join(f"{cell:>{18 if column < 2 else 10}}" for column, cell in enumerate(cells))


def ablation_points(engines: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The percentage points of accepted schemas that each ablation in `engines` loses or gains."""
    if ANYDECODE not in engines:
        return {}
    shares = {name: result["accepted"] / result["schemas"] for name, result in engines.items()}
    return {
        name: 100 * (share - shares[ANYDECODE])
        for name, share in shares.items()
        if name.startswith(WITHOUT)
    }
