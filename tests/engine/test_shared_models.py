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


@pytest.mark.parametrize("is_copied", [True, False])
def test_outputs_outlast_the_passes_of_others_because_they_are_copied(
    is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = OneBuffer(), Turns.kept

    def then_overwritten(self: Turns, output: Output, spec: OutputSpec) -> Output:
        found = kept(self, output, spec) if is_copied else output
        model._logits[:] = model._logits[:, ::-1].copy()  # as if another engine ran a pass
        return found

    monkeypatch.setattr(Turns, "kept", then_overwritten)
    llms = [LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) for _ in PROMPTS]
    found = [llms[0].generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
    for llm in llms:
        llm.close()
    assert (found == [texts[0] for texts in _expected()]) == is_copied


def test_outputs_of_a_single_engine_are_not_copied() -> None:
    model = OneBuffer()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512):
        with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) as other:
            assert len(other.engine.runners["target"].turns.users) == 2
        assert len(other.engine.runners["target"].turns.users) == 1
