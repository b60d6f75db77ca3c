"""One peer that answers under JSON schemas, in a process of its own: JSON in, JSON out.

Run as a file, so that it works in an environment that has the peer and not anydecode. A request
has `schema`, `prompt`, `tokens`, `seed` and `temperature`; the answer has the `text`, seconds to
compile (0 where that was done for an earlier seed), to the first token and in all, and the number
of `tokens`; or an `error`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from time import perf_counter
from typing import Any


class LlamaCppGrammar:
    """llama.cpp's own grammars, made from the schema by its converter."""

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
        pieces = self.llm.create_completion(
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
        texts: list[str] = []
        for piece in pieces:
            if not texts:
                options["first"]()
            texts.append(piece["choices"][0]["text"])
        return texts


class Outlines(LlamaCppGrammar):
    """outlines over llama.cpp: an index of the schema's regular expression over the vocabulary."""

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
        pieces = grammar.stream(
            prompt,
            max_tokens=options["tokens"],
            temperature=options["temperature"],
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
            seed=options["seed"],
        )
        texts: list[str] = []
        for piece in pieces:
            if not texts:
                options["first"]()
            texts.append(piece)
        return texts


BASELINES = {"llama.cpp": LlamaCppGrammar, "outlines": Outlines}


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _answered(worker: Any, request: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    key = json.dumps(request["schema"])
    began = perf_counter()
    try:
        if held.get("key") != key:
            held.clear()
            held["grammar"] = worker.compiled(request["schema"])
            held["key"] = key
        compiled = perf_counter()
        first: list[float] = []
        texts = worker.answer(
            held["grammar"],
            request["prompt"],
            tokens=request["tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            first=lambda: first.append(perf_counter()),
        )
    except Exception as error:  # every peer has errors of its own kinds
        held.clear()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {
        "text": "".join(texts),
        "tokens": len(texts),
        "compile": compiled - began,
        "first": (first[0] if first else perf_counter()) - compiled,
        "total": perf_counter() - compiled,
    }


def main() -> None:
    """`constrained_worker.py PEER MODEL --threads N`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("peer", choices=BASELINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is kept off the pipe

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        worker = BASELINES[arguments.peer](arguments.model, arguments.threads)
    except Exception as error:
        say({"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    say({"version": worker.version})
    held: dict[str, Any] = {}
    for line in sys.stdin:
        say(_answered(worker, json.loads(line), held))


if __name__ == "__main__":
    main()
