"""`anydecode bench diffusion-schemas`: the share of valid answers of diffusion decoders under JSON
schemas.

Answers are sampled, with `close`: they are completed within the canvas. An answer that is not
finished is not valid. A validator that shares no code with the constraint (jsonschema-rs) judges
them. The schemas are those of JSONSchemaBench, or `SCHEMAS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.benchmarks.constrained_answers import judged, prompt_for
from anydecode.benchmarks.constrained_bench import load_rows
from anydecode.benchmarks.parallelbench.aup import fits
from anydecode.benchmarks.parallelbench.bench import diffusion_methods
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.errors import AnydecodeError, ConstraintError, InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.progress import progress
from anydecode.report import JsonFile, split_names, table_console, write_report


def _object(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """The schema of an object that has these properties alone, all of them by default."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else [*required],
        "additionalProperties": False,
    }


_CITIES = {"enum": ["Rome", "Oslo", "Lima"]}
_AGE = {"type": "integer", "minimum": 0, "maximum": 120}
#: Schemas of different kinds, by name.
SCHEMAS: dict[str, Any] = {
    "record": _object({"age": {"type": "integer"}, "city": {"type": "string"}}),
    "choices": _object(
        {"city": _CITIES, "is_open": {"type": "boolean"}, "kind": {"const": "shop"}}
    ),
    "bounds": _object({"age": _AGE, "share": {"type": "number", "minimum": 0, "maximum": 1}}),
    "lengths": _object({"name": {"type": "string", "minLength": 2, "maxLength": 6}}),
    "pattern": _object({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}),
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "nested": _object({"at": _object({"x": {"type": "integer"}, "y": {"type": "integer"}})}),
    "optional": _object({"age": _AGE, "city": _CITIES, "note": {"type": "null"}}, ["city"]),
    "either": {"anyOf": [_object({"age": _AGE}), _object({"city": _CITIES}), {"type": "null"}]},
    "records": {"type": "array", "items": _object({"city": _CITIES}), "maxItems": 3},
}


class Answer(NamedTuple):
    """What became of an answer.

    Attributes:
        result: "valid", "invalid", "unfinished" or "error".
        tokens: Its tokens, with the end.
        passes: Its forward passes.
        text: The text, or the error.
    """

    result: str
    tokens: int
    passes: int
    text: str


def constrained_decoders() -> list[str]:
    """The diffusion decoders that work with constraints."""
    entries = catalogue.entries()
    return [key for key in diffusion_methods() if "constraints" in entries[key].card.works_with]


def answers(
    llm: LLM, decoder: str, schema: Any, seeds: Sequence[int], tokens: int, temperature: float
) -> Iterator[Answer]:
    """One answer per seed.

    Raises:
        ConstraintError: The schema is not supported.
    """
    constraint = JsonSchema(schema, close=True)
    constraint.start(llm.tokenizer, llm.model.spec.vocab_size)
    # Schemas may be longer than the context of a small model.
    prompt = llm.encode(prompt_for(schema))[: llm.max_length // 2]
    for seed in seeds:
        try:
            answer = llm.generate(
                prompt,
                decoder=decoder,
                constraint=constraint,
                max_tokens=tokens,
                temperature=temperature,
                seed=seed,
            )
        except AnydecodeError as error:
            yield Answer("error", 0, 0, " ".join(str(error).split()))
            continue
        is_finished = answer.finish_reason == "stop"
        row = judged(schema, {"text": answer.text, "finished": is_finished})
        result = "valid" if row["valid"] else "invalid" if is_finished else "unfinished"
        yield Answer(result, answer.stats.num_tokens, answer.stats.passes, answer.text)


def measure(
    llm: LLM,
    decoder: str,
    schemas: Sequence[tuple[str, Any]],
    count: int,
    tokens: int,
    temperature: float,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The results of one decoder: numbers of answers by `Answer.result`, refused schemas, and
    answers that are not valid."""
    results: Counter[str] = Counter()
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    num_tokens = num_passes = 0
    for name, schema in schemas:
        try:
            for answer in answers(llm, decoder, schema, range(count), tokens, temperature):
                results[answer.result] += 1
                num_tokens, num_passes = num_tokens + answer.tokens, num_passes + answer.passes
                if answer.result != "valid":
                    failed[name] = f"{answer.result}: {answer.text}"
        except ConstraintError as error:
            refused[name] = " ".join(str(error).split())
        advance()
    return {
        "decoder": decoder,
        "schemas": len(schemas) - len(refused),
        "answers": results.total(),
        "valid": results["valid"],
        "invalid": results["invalid"],
        "unfinished": results["unfinished"],
        "errors": results["error"],
        "tokens_per_pass": num_tokens / num_passes if num_passes else 0.0,
        "refused": refused,
        "failed": failed,
    }


def bench_schemas(
    models: Annotated[
        str, typer.Option("--models", help="Names or folders, separated by commas.")
    ] = "tiny-diffusion,tiny-blocks",
    uniform: Annotated[
        str, typer.Option("--uniform", help="The same of models whose noise is random tokens.")
    ] = "tiny-uniform",
    methods: Annotated[
        str,
        typer.Option(
            "--methods", help="Keys, separated by commas; default: all that take constraints."
        ),
    ] = "",
    draft: Annotated[
        str, typer.Option("--draft", help="A draft model, for decoders that need one.")
    ] = "tiny-autoregressive",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONSchemaBench, one .jsonl per split; default: ten schemas."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Schemas per split.")] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Only the first of every N schemas of a split.")
    ] = 1,
    count: Annotated[int, typer.Option("--count", min=1, help="Answers per schema.")] = 1,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of the canvas.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 1.0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Print how many answers of diffusion decoders under JSON schemas are valid.

    Example: anydecode bench diffusion-schemas --methods llada,sdar --threads 1
    """
    known = constrained_decoders()
    keys = split_names(methods) or known
    if unknown := sorted({*keys} - {*known}):
        raise InvalidRequestError(
            f"{', '.join(unknown)}: no diffusion decoder that takes constraints; choose from"
            f" {', '.join(known)}"
        )
    schemas = [*SCHEMAS.items()]
    if data is not None:
        if not data.is_dir():
            raise InvalidRequestError(f"{data} is not a folder")
        schemas = [(name, row["schema"]) for _, name, row in load_rows(data, limit, "", every)]
    names = {name: False for name in split_names(models)} | dict.fromkeys(
        split_names(uniform), True
    )
    runs = [(name, key) for name, is_one in names.items() for key in keys if fits(key, is_one)]
    lines: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with progress("schemas", len(runs) * len(schemas)) as bar:
        for name in dict.fromkeys(name for name, _ in runs):
            with LLM(name, draft=draft, threads=threads or None) as llm:
                for key in (key for model, key in runs if model == name):
                    try:
                        llm.generate("json:", decoder=key, max_tokens=8)
                    except AnydecodeError as error:
                        left_out[f"{key} on {name}"] = " ".join(str(error).split())
                        continue
                    line = measure(llm, key, schemas, count, tokens, temperature, bar.advance)
                    lines.append({"model": name, **line})
    report = {
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "threads": threads},
        "max_tokens": tokens,
        "temperature": temperature,
        "count": count,
        "decoders": lines,
        "left_out": left_out,
    }
    write_report(report, json_file, lambda: print_report(report))


def print_report(report: dict[str, Any]) -> None:
    """Print a line per model and decoder, and the answers that are not valid."""
    from rich.table import Table

    console, lines = table_console(), report["decoders"]
    table = Table(box=None)
    for name in ("model", "decoder"):
        table.add_column(name, no_wrap=True)
    columns = ("schemas", "answers", "valid", "invalid", "unfinished", "errors")
    for name in (*columns, "tokens/pass"):
        table.add_column(name, justify="right")
    for line in lines:
        counts = [str(line[name]) for name in columns]
        table.add_row(line["model"], line["decoder"], *counts, f"{line['tokens_per_pass']:.2f}")
    console.print(table)
    valid, total = (sum(line[name] for line in lines) for name in ("valid", "answers"))
    console.print(
        f"{valid} of {total} answers are valid: canvas {report['max_tokens']}, temperature"
        f" {report['temperature']:g}",
        highlight=False,
    )
    for line in lines:
        for kind in ("failed", "refused"):
            for name, reason in line[kind].items():
                one = f"{line['decoder']} on {line['model']}, {name}: {kind}: {reason}"
                console.print(one, highlight=False, markup=False)
    for name, reason in report["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False, markup=False)
