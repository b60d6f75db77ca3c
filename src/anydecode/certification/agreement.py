"""How often the most probable token of a lossy method is the next one of the full model's text, and
how probable that one is."""

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
    """Makes the next token that of a text. Notes, per token, which one was the most probable, and
    the negative logarithm of the text's own probability at temperature 1."""

    is_stateful = True

    def __init__(self, text: Seq[int], found: dict[int, tuple[int, float]], count: int = 0) -> None:
        self.text, self.found, self.count = text, found, count

    def apply(self, candidates: Candidates) -> Candidates:
        scores, best = candidates.scores.astype(np.float64), candidates.argmax()
        index, _ = candidates.positions(np.array([self.text[self.count]]))
        nats = np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[index[0]]
        self.found[self.count] = best, float(nats)
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
        nats: The sum of the negative logarithms of the tokens' probabilities under the method.
        generation: The method's pass over the text, with its trace and times.
    """

    num_tokens: int
    num_equal: int
    nats: float
    generation: Generation


def teacher_forced(llm: LLM, decoder: Any, prompt: str | Seq[int], text: Seq[int]) -> Agreement:
    """Run `decoder` over `text`, the greedy text of the full model behind `prompt`, token by token
    with its own keys and values."""
    found: dict[int, tuple[int, float]] = {}
    generation = llm.generate(
        prompt,
        decoder=decoder,
        max_tokens=len(text),
        ignore_eos=True,
        trace=True,
        logits_processors=[_Forced(text, found)],
    )
    num_equal = sum(found[index][0] == token for index, token in enumerate(text))
    nats = sum(found[index][1] for index in range(len(text)))
    return Agreement(len(text), num_equal, nats, generation)
