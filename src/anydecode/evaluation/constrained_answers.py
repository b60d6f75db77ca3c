"""Answers under JSON schemas, ours and those of peers, judged by jsonschema-rs.

A schema counts as accepted where at least 8 of 10 seeds (or that share of fewer) give a finished,
valid answer. Every row is written down as it comes, so that a run that was cut off goes on.
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
from math import ceil
from time import perf_counter
from typing import Any

import jsonschema_rs

from anydecode.constraints.constraint import IncrementalValidator
from anydecode.constraints.json_schema import JsonSchema
from anydecode.constraints.patterns import pattern_options
from anydecode.constraints.shortest_completion import shortest_completion
from anydecode.errors import AnydecodeError
from anydecode.evaluation import constrained_worker
from anydecode.evaluation.baselines import Worker
from anydecode.models.tokenizer import Tokenizer

#: The share of seeds that must be answered for a schema to count as accepted.
ACCEPTED = 0.8
OURS = "anydecode"
UNCHECKED = "xgrammar"

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is asked of every engine. `seconds` is the most a peer may take for one answer; `batch`
    answers of ours are decoded together, which changes their times and nothing else."""

    seeds: int = 10
    tokens: int = 256
    temperature: float = 0.7
    close: bool = False
    seconds: float = 60.0
    batch: int = 1


def prompt_for(schema: Any) -> str:
    """The prompt every engine gets."""
    return f"A JSON object for this schema:\n{json.dumps(schema)[:1500]}\n\nJSON: "


class Ours:
    """This engine. `decoder` is a key of the catalogue; with `engine` "xgrammar" the masks are that
    library's and nothing is checked, as in the servers that use it."""

    def __init__(self, llm: Any, setting: Setting, decoder: str, engine: str = "llguidance"):
        self.llm = llm
        self.setting = setting
        self.decoder = decoder
        self.engine = engine
        self._held: tuple[Any, JsonSchema, float] | None = None

    def ask(self, schema: Any, seeds: range) -> list[Row]:
        """An answer per seed, decoded together."""
        began = perf_counter()
        try:
            constraint, compiled = self._constraint(schema)
        except AnydecodeError as error:
            return [{"error": str(error)[:200], "total": perf_counter() - began}]
        rows = []
        for seed, answer in zip(seeds, self._answers(schema, constraint, seeds), strict=True):
            if isinstance(answer, AnydecodeError):
                total = perf_counter() - began
                rows.append({"error": str(answer)[:200], "drawn": True, "total": total})
            else:
                rows.append(self._row(answer, compiled if seed == seeds[0] else 0.0))
        return rows

    def _answers(self, schema: Any, constraint: JsonSchema, seeds: range) -> list[Any]:
        """Generations, or the errors they ended in."""
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

        async def together() -> list[Any]:
            asked = (self.llm.agenerate(prompt, seed=seed, **options) for seed in seeds)
            return await asyncio.gather(*asked, return_exceptions=True)

        answers = asyncio.run(together())
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
            "guards": answer.constraint["guards"],
        }

    def _constraint(self, schema: Any) -> tuple[JsonSchema, float]:
        if self._held is None or self._held[0] is not schema:
            began = perf_counter()
            kind = JsonSchema if self.engine == "llguidance" else _Unchecked
            constraint = kind(schema, close=self.setting.close, engine=self.engine)
            constraint.start(self.llm.tokenizer, self.llm.model.spec.vocab_size)
            self._held = (schema, constraint, perf_counter() - began)
            return constraint, self._held[2]
        return self._held[1], 0.0

    def close(self) -> None:
        """Nothing to end."""


class _Unchecked(JsonSchema):
    """Masks alone."""

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        return None


class Baseline:
    """A peer in a process of its own; ended and begun anew where it takes too long."""

    def __init__(self, name: str, model: str, threads: int, python: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self._open: Callable[[], Worker] = lambda: Worker(
            name, model, threads, python, constrained_worker.__file__
        )
        self._worker: Worker | None = self._open()
        self.missing = self._worker.missing

    def ask(self, schema: Any, seeds: range) -> list[Row]:
        """An answer per seed, one after the other, up to the first that fails."""
        rows: list[Row] = []
        for seed in seeds:
            rows.append(self._ask(schema, seed))
            if "error" in rows[-1]:
                break
        return rows

    def _ask(self, schema: Any, seed: int) -> Row:
        if self._worker is None:
            self._worker = self._open()
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
        """End the process."""
        if self._worker is not None:
            self._worker.close()


def judged(schema: Any, row: Row) -> Row:
    """The row with `finished` and `valid` said, by jsonschema-rs with formats as annotations. No
    answer to a schema that it refuses is valid."""
    try:
        value = json.loads(row.get("text", ""))
    except (ValueError, RecursionError):
        return {**row, "finished": False, "valid": False}
    finished = row.get("finished", True)
    return {**row, "finished": finished, "valid": bool(finished and _is_valid(schema, value))}


def _is_valid(schema: Any, value: Any) -> bool:
    try:
        judge = jsonschema_rs.validator_for(
            schema, validate_formats=False, pattern_options=pattern_options(schema), offline=True
        )
        return bool(judge.is_valid(value))
    except (AnydecodeError, ValueError):
        return False


def run(
    engines: dict[str, Ours | Baseline],
    schemas: Iterable[tuple[str, str, Any]],
    setting: Setting,
    known: list[Row],
    write: Callable[[Row], None],
    llm: Any,
) -> Iterator[list[Row]]:
    """Ask every engine for every schema (split, id, schema) that is not among the `known` rows yet;
    yields the rows of a schema once it is done."""
    done: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in known:
        done[row["id"], row["engine"]].append(row)
    for split, name, schema in schemas:
        rows: list[Row] = []
        fits = smallest_fits(llm, schema, setting.tokens)
        for engine, asked in engines.items():
            old = done[name, engine]
            rows += old
            told = {"split": split, "id": name, "engine": engine, "fits": fits}
            for first in range(len(old), setting.seeds, setting.batch):
                seeds = range(first, min(first + setting.batch, setting.seeds))
                new = [
                    judged(schema, row) | told | {"seed": seed}
                    for seed, row in zip(seeds, asked.ask(schema, seeds), strict=False)
                ]
                for row in new:
                    row.pop("text", None)
                    write(row)
                rows += new
                if any("error" in row and not row.get("drawn") for row in new):
                    break  # the next seed would say the same
        yield rows


def smallest_fits(llm: Any, schema: Any, tokens: int) -> bool:
    """Whether some valid answer of at most `tokens` is easy to find: the shortest way to an end."""
    try:
        constraint = JsonSchema(schema)
        state = constraint.start(llm.tokenizer, llm.model.spec.vocab_size)
        ending = shortest_completion(state, llm.tokenizer, constraint.completion_hints)
    except AnydecodeError:
        return False
    return ending is not None and len(ending) <= tokens


def unconstrained_pace(llm: Any, schemas: Iterable[Any], setting: Setting) -> float:
    """Median seconds per token without a constraint, one token per pass, over a few prompts."""
    paces = []
    for schema in schemas:
        answer = llm.generate(
            prompt_for(schema),
            decoder="autoregressive",
            max_tokens=64,
            ignore_eos=True,
            temperature=setting.temperature,
            seed=0,
        )
        paces.append(_pace(answer.stats.num_tokens, answer.stats))
    return statistics.median(paces) if paces else 0.0


def _pace(tokens: int, stats: Any) -> float:
    return float((stats.seconds - stats.time_to_first_token) / max(1, tokens - 1))


def summary(rows: list[Row], setting: Setting) -> dict[str, Any]:
    """One engine's figures over the rows of some schemas."""
    by_schema: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_schema[row["id"]].append(row)
    needed = ceil(ACCEPTED * setting.seeds)
    answers = [row for row in rows if "error" not in row]
    fitting = [row for row in answers if row["fits"]]
    paces = [
        (row["total"] - row["first"]) / (row["tokens"] - 1) for row in answers if row["tokens"] > 1
    ]
    compiles = [row["compile"] for row in answers if row["compile"]]
    passes = sum(row.get("passes", 0) for row in answers)
    return {
        "schemas": len(by_schema),
        "covered": sum(any("error" not in row for row in own) for own in by_schema.values()),
        "accepted": sum(sum(r["valid"] for r in own) >= needed for own in by_schema.values()),
        "answers": len(rows),
        "valid": sum(row["valid"] for row in rows),
        "finished_invalid": sum(row["finished"] and not row["valid"] for row in answers),
        "unfinished": sum(not row["finished"] for row in answers),
        "errors": len(rows) - len(answers),
        "steered": sum(row.get("steered", False) for row in answers),
        "finished_of_fitting": _share(sum(row["finished"] for row in fitting), len(fitting)),
        "compile_ms_p50": 1e3 * _at(compiles, 0.5),
        "compile_ms_p99": 1e3 * _at(compiles, 0.99),
        "first_ms_p50": 1e3 * _at([row["first"] for row in answers], 0.5),
        "token_ms_p50": 1e3 * _at(paces, 0.5),
        "token_ms_mean": 1e3 * (statistics.mean(paces) if paces else 0.0),
        "tokens_per_pass": _share(sum(row["tokens"] for row in answers), passes),
        "guards": next((row["guards"] for row in answers if "guards" in row), None),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def print_figures(figures: dict[str, dict[str, Any]]) -> None:
    """One line per split and engine."""
    names = ("split", "engine", "accepted", "valid", "invalid", "open", "error", "fit%", "compile",
             "first", "ms/token", "tok/pass")  # fmt: skip
    print("".join(f"{name:>10}" for name in names))
    for split, engines in figures.items():
        for engine, got in engines.items():
            fit = got["finished_of_fitting"]
            cells = (
                split[:9], engine[:9], f"{got['accepted']}/{got['schemas']}",
                f"{got['valid']}/{got['answers']}", got["finished_invalid"], got["unfinished"],
                got["errors"], "" if fit is None else f"{100 * fit:.0f}",
                f"{got['compile_ms_p50']:.1f}", f"{got['first_ms_p50']:.0f}",
                f"{got['token_ms_p50']:.1f}",
                "" if got["tokens_per_pass"] is None else f"{got['tokens_per_pass']:.2f}",
            )  # fmt: skip
            print("".join(f"{cell:>10}" for cell in cells))
    sys.stdout.flush()
