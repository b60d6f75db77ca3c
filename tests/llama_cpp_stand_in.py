"""A module `llama_cpp` that computes with anydecode: a benchmark finds no difference, unless it
asks another thing of one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_MODULE = """
from anydecode import LLM
from anydecode.benchmarks.divergence import logits_of

__version__ = "0"
_CACHES = {0: "float32", 1: "float16", 30: "bfloat16", 8: "int8", 2: "int4"}


class Llama:
    def __init__(self, path, *, n_ctx, type_k, type_v, flash_attn, logits_all, **options):
        assert type_k == type_v and flash_attn == (type_k in (2, 8))
        self.cache, self.n_ctx, self.logits_all = _CACHES[type_k], n_ctx, logits_all
        self.llm = LLM(path, cache=self.cache, threads=1)

    def reset(self):
        self.scores = None

    def eval(self, tokens):
        assert self.logits_all and self.scores is None and len(tokens) <= self.n_ctx
        self.scores = logits_of(self.llm.model, tokens, self.cache)

    def create_completion(self, prompt, *, max_tokens, temperature, repeat_penalty, stop):
        assert (temperature, repeat_penalty) == (0.0, 1.0)
        assert len(prompt) + max_tokens <= self.n_ctx
        generation = self.llm.generate(prompt, max_tokens=max_tokens, stop=stop)
        return {"choices": [{"text": generation.text}]}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that has the module, which is written to `folder`."""
    (folder / "llama_cpp.py").write_text(_MODULE)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return sys.executable
