"""Computes with llama.cpp on token ids: a request as JSON on stdin, the results as JSON on stdout.

Run as a file, so that it works in an environment that has `llama-cpp-python` but not anydecode.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

#: llama.cpp's formats of the key-value cache, by anydecode's names: GGML's numbers.
CACHES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8, "int4": 2}
#: Formats whose values llama.cpp computes with in flash attention only.
_QUANTIZED = ("int8", "int4")


def main() -> None:
    """Answer one request; output of libraries is redirected to stderr, away from the results."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import llama_cpp

    request = json.load(sys.stdin)
    found = WORK[request["work"]](request)
    json.dump({"version": llama_cpp.__version__, "found": found}, output)


def _opened(request: dict[str, Any], size: int, *, all_logits: bool) -> Any:
    """The model of a request, with a context of `size` tokens."""
    import llama_cpp

    threads, cache = request["threads"], request["cache"]
    return llama_cpp.Llama(
        request["model"], n_ctx=size, n_batch=size, n_threads=threads, n_threads_batch=threads,
        type_k=CACHES[cache], type_v=CACHES[cache], flash_attn=cache in _QUANTIZED,
        logits_all=all_logits, verbose=False,
    )  # fmt: skip


def _logits(request: dict[str, Any]) -> None:
    """Write the logits of all windows, one after the other, to a file: `[tokens, vocab_size]`."""
    windows = request["windows"]
    llm = _opened(request, max(map(len, windows)), all_logits=True)
    rows = []
    for window in windows:
        llm.reset()
        llm.eval(window)
        rows.append(np.array(llm.scores[: len(window)], np.float32))
    np.save(request["target"], np.concatenate(rows))


def _scores(request: dict[str, Any]) -> list[tuple[float, bool]]:
    """For each (context, continuation): its log-likelihood, and whether greedy decoding generates
    it."""
    pairs = request["pairs"]
    llm = _opened(request, max(len(head) + len(tail) for head, tail in pairs), all_logits=True)
    found = []
    for head, tail in pairs:
        llm.reset()
        llm.eval((head + tail)[:-1])
        rows = np.array(llm.scores[len(head) - 1 : len(head) + len(tail) - 1], np.float64)
        rows -= rows.max(1, keepdims=True)
        chosen = rows[np.arange(len(tail)), tail]
        total = float((chosen - np.log(np.exp(rows).sum(1))).sum())
        found.append((total, bool((rows.argmax(1) == tail).all())))
    return found


def _texts(request: dict[str, Any]) -> list[str]:
    """The greedy answer to each prompt, up to a stop string."""
    prompts, count = request["prompts"], request["count"]
    llm = _opened(request, max(map(len, prompts)) + count + 1, all_logits=False)
    found = []
    for prompt in prompts:
        answer = llm.create_completion(
            prompt, max_tokens=count, temperature=0.0, repeat_penalty=1.0, stop=request["stops"]
        )
        found.append(answer["choices"][0]["text"])
    return found


WORK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "logits": _logits,
    "scores": _scores,
    "texts": _texts,
}

if __name__ == "__main__":
    main()
