"""Runs one baseline for JSON-schema-constrained generation in its own process: JSON in, JSON out.

Run as a file, so that it works in an environment that has the baseline but not anydecode. A request
has `schema`, `prompt`, `tokens`, `seed` and `temperature`. The answer has the `text`, the seconds
to compile (`compile`, near 0 if an earlier seed compiled the schema), to the first token (`first`)
and in total (`total`), and the number of `tokens`; or an `error`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any


class LlamaCppGrammar:
    """llama.cpp's grammars, converted from the schema by llama.cpp."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self.library = llama_cpp
        self.version = llama_cpp.__version__
        self.llm = llama_cpp.Llama(
            model, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def compiled(self, schema: Any) -> Any:
        return self.library.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)

    def answer(self, grammar: Any, prompt: str, **options: Any) -> list[str]:
        chunks = self.llm.create_completion(
            prompt,
            max_tokens=options["tokens"],
            temperature=options["temperature"],
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
            seed=options["seed"],
            grammar=grammar,
            stream=True,
        )
        return _collect((chunk["choices"][0]["text"] for chunk in chunks), options["first"])


class Outlines(LlamaCppGrammar):
    """outlines on llama.cpp: compiles the schema's regular expression to an index over the
    vocabulary."""

    def __init__(self, model: str, threads: int) -> None:
        super().__init__(model, threads)
        import outlines

        self.outlines = outlines
        self.version = getattr(outlines, "__version__", "") or _version("outlines")
        self.model = outlines.from_llamacpp(self.llm)

    def compiled(self, schema: Any) -> Any:
        from outlines.types import JsonSchema

        return self.outlines.Generator(self.model, JsonSchema(json.dumps(schema)))

    def answer(self, grammar: Any, prompt: str, **options: Any) -> list[str]:
        chunks = grammar.stream(
            prompt,
            max_tokens=options["tokens"],
            temperature=options["temperature"],
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
            seed=options["seed"],
        )
        return _collect(chunks, options["first"])


BASELINES = {"llama.cpp": LlamaCppGrammar, "outlines": Outlines}


def _collect(texts: Iterable[str], on_first: Callable[[], None]) -> list[str]:
    """All `texts`; calls `on_first` when the first one has come."""
    collected: list[str] = []
    for text in texts:
        if not collected:
            on_first()
        collected.append(text)
    return collected


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _run_request(worker: Any, request: dict[str, Any], cache: dict[str, Any]) -> dict[str, Any]:
    key = json.dumps(request["schema"])
    start = perf_counter()
    try:
        if cache.get("key") != key:
            cache.clear()
            cache["grammar"] = worker.compiled(request["schema"])
            cache["key"] = key
        compiled = perf_counter()
        first: list[float] = []
        texts = worker.answer(
            cache["grammar"],
            request["prompt"],
            tokens=request["tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            first=lambda: first.append(perf_counter()),
        )
    except Exception as error:  # each baseline has its own exception types
        cache.clear()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {
        "text": "".join(texts),
        "tokens": len(texts),
        "compile": compiled - start,
        "first": (first[0] if first else perf_counter()) - compiled,
        "total": perf_counter() - compiled,
    }


def main() -> None:
    """`constrained_worker.py BASELINE MODEL --threads N`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("baseline", choices=BASELINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr

    def respond(value: dict[str, Any]) -> None:
        output.write(json.dumps(value) + "\n")
        output.flush()

    try:
        worker = BASELINES[arguments.baseline](arguments.model, arguments.threads)
    except Exception as error:
        respond({"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    respond({"version": worker.version})
    cache: dict[str, Any] = {}
    for line in sys.stdin:
        respond(_run_request(worker, json.loads(line), cache))


if __name__ == "__main__":
    main()
