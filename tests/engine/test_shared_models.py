"""One model object in several engines, which run it on threads of their own."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.engine.shared_models import Turns
from anydecode.kernels.interface import Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

OPTIONS: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "seed": 2, "ignore_eos": True}
PROMPTS = ("the cat sat on the mat", "one two three one two")


class OneBuffer(ScriptedModel):
    """A model whose passes return views of one buffer, as those of the compiled kernels do."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self._logits = np.empty((64, self.spec.vocab_size), np.float32)

    def run(self, rows: Rows, cache: Any, output_spec: OutputSpec) -> Output:
        output = super().run(rows, cache, output_spec)
        view = self._logits[: len(output.logits)]
        view[:] = output.logits
        output.logits = view
        time.sleep(0.0005)  # for the other thread
        return output


def _texts(model: ScriptedModel) -> list[list[list[int]]]:
    """The texts of two engines at the same time."""
    found: list[list[list[int]]] = [[], []]
    llms = [LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) for _ in PROMPTS]

    def generate(number: int) -> None:
        for _ in range(3):
            found[number].append(llms[number].generate(PROMPTS[number], **OPTIONS).tokens)

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for llm in llms:
        llm.close()
    return found


def _expected() -> list[list[list[int]]]:
    with LLM(OneBuffer(), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        return [[llm.generate(prompt, **OPTIONS).tokens] * 3 for prompt in PROMPTS]


def test_two_engines_of_one_model_have_the_texts_of_one() -> None:
    assert _texts(OneBuffer()) == _expected()


def test_without_copies_the_texts_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "kept", lambda self, output, spec: output)
    assert _texts(OneBuffer()) != _expected()


def test_outputs_of_a_single_engine_are_not_copied() -> None:
    model = OneBuffer()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512):
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) as other:
            assert len(other.engine.runners["target"].turns.users) == 2
        assert len(other.engine.runners["target"].turns.users) == 1
