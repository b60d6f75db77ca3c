"""How often the most probable token of a lossy method is the next one of the full model's text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor


class _Forced(LogitsProcessor):
    """Makes the next token that of a text, and notes which one was the most probable."""

    is_stateful = True

    def __init__(self, text: Seq[int], found: dict[int, int], count: int = 0) -> None:
        self.text, self.found, self.count = text, found, count

    def apply(self, candidates: Candidates) -> Candidates:
        best = int(candidates.scores.argmax())
        self.found[self.count] = best if candidates.tokens is None else int(candidates.tokens[best])
        index, _ = candidates.positions(np.array([self.text[self.count]]))
        return candidates.keep(index)

    def advance(self, token: int) -> None:
        self.count += 1

    def fork(self) -> _Forced:
        return _Forced(self.text, self.found, self.count)


@dataclass(frozen=True)
class Agreement:
    """A method's tokens on the full model's text.

    Attributes:
        num_tokens: Tokens of the text.
        num_equal: Where the method's most probable token is the text's.
        generation: The method's pass over the text, with its trace and times.
    """

    num_tokens: int
    num_equal: int
    generation: Generation


def teacher_forced(llm: LLM, decoder: Any, prompt: str | Seq[int], text: Seq[int]) -> Agreement:
    """Run `decoder` over `text`, the greedy text of the full model behind `prompt`, token by token
    with its own keys and values."""
    found: dict[int, int] = {}
    generation = llm.generate(
        prompt,
        decoder=decoder,
        max_tokens=len(text),
        ignore_eos=True,
        trace=True,
        logits_processors=[_Forced(text, found)],
    )
    num_equal = sum(found[index] == token for index, token in enumerate(text))
    return Agreement(len(text), num_equal, generation)
