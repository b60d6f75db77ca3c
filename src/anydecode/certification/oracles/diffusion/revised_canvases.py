"""A naive loop of denoising whose tokens may change, and the canvases of the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from anydecode.certification.checks import Check
from anydecode.certification.denoising import (
    PROMPT,
    VOCABULARY,
    Logits,
    bidirectional,
    softmax,
)
from anydecode.models.scripted import MASK
from anydecode.sampling.noise import Noise

#: No block of a test needs more steps.
_LIMIT = 400


@dataclass
class Revision:
    """A block before a step.

    Attributes:
        canvas: All tokens; a step changes them in place.
        cells: The positions of the block, without the prompt's.
        script: The model.
        temperature: Of sampling.
        seed: Of sampling.
        attempt: The number of steps before this one.
        block_step: The number of steps of the block before this one.
        memory: The rule's own state for this block.
    """

    canvas: list[int]
    cells: list[int]
    script: Logits
    temperature: float
    seed: int
    attempt: int
    block_step: int
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def masks(self) -> list[int]:
        """The masked positions of the block."""
        return [i for i in self.cells if self.canvas[i] == MASK]

    def row(self, position: int) -> np.ndarray:
        """Logits at a position, float64, without the mask token."""
        row = self.script((*self.canvas, position)).astype(np.float64)
        row[MASK] = -np.inf
        return row

    def token(self, position: int) -> int:
        """The sampled token."""
        row = self.row(position)
        if self.temperature:
            noise = Noise(self.seed).gumbel(range(len(row)), position, self.attempt)
            row = row / self.temperature + noise
        return int(row.argmax())

    def probability(self, position: int, token: int) -> float:
        """The model's probability of a token."""
        return float(softmax(self.row(position))[token])

    def clean(self, position: int) -> np.ndarray:
        """The distribution that tokens are sampled from; at temperature 0 one token."""
        row = self.row(position)
        if self.temperature:
            return softmax(row / np.float32(self.temperature))
        return np.eye(len(row))[int(row.argmax())]

    def coin(self, position: int, index: int) -> float:
        """A random number of the position and step."""
        return Noise(self.seed).with_purpose("unmask").coin(position, self.attempt, index)


#: Changes the canvas, and returns whether the block is finished.
Rule = Callable[[Revision], bool]


def revised(
    script: Logits,
    length: int,
    block: int,
    rule: Rule,
    prompt: Seq[int] = PROMPT,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    begin: Callable[[Revision], None] = lambda state: None,
) -> list[list[int]]:
    """The answer after every step, with -1 for masks.

    `begin` may change the canvas before the first step of a block.
    """
    canvas = [*prompt, *[MASK] * length]
    history: list[list[int]] = []
    for start in range(len(prompt), len(canvas), block):
        cells = list(range(start, min(start + block, len(canvas))))
        memory: dict[str, Any] = {}
        for block_step in range(_LIMIT):
            state = Revision(
                canvas, cells, script, temperature, seed, len(history), block_step, memory
            )
            if not block_step:
                begin(state)
            is_finished = rule(state)
            history.append([-1 if token == MASK else token for token in canvas[len(prompt) :]])
            if is_finished:
                break
        else:
            raise AssertionError(f"a block is not finished after {_LIMIT} steps")
    return history


def traced(decoder: Any, script: Logits, length: int, **options: Any) -> list[list[int]]:
    """The same of the engine."""
    prompt = list(options.pop("prompt", PROMPT))
    block_size = options.pop("block_size", None)
    options = {"ignore_eos": True, "max_tokens": length, **options}
    with bidirectional(script, block_size=block_size) as llm:
        answer = llm.generate(prompt, decoder=decoder, trace=True, **options)
    history = [list(record["canvas"]) for record in answer.trace]
    assert history[-1] == answer.tokens, "the last canvas is the answer"
    return history


class Case(NamedTuple):
    """A decoder with parameters, its rule, and the sizes of a block and of the answer."""

    decoder: str
    rule: Rule
    block: int
    length: int


def equal_canvases(
    scripts: Mapping[str, Logits],
    cases: Seq[Case],
    temperatures: Seq[float] = (0.0, 0.8),
    begin: Callable[[Revision], None] = lambda state: None,
) -> Generator[Check, None, int]:
    """A check of every case with every script: whether each canvas equals that of the rule. Returns
    how often a position went from a token to a mask or to another token."""
    num_returns = 0
    for name, script in scripts.items():
        for decoder, rule, block, length in cases:
            for temperature in temperatures:
                options: dict[str, Any] = {"temperature": temperature, "seed": 3}
                expected = revised(script, length, block, rule, begin=begin, **options)
                actual = traced(decoder, script, length, **options)
                where = f"{decoder} equals the oracle, {name}, T={temperature}"
                yield Check(where, actual == expected)
                num_returns += returns(actual)
    return num_returns


def returns(history: list[list[int]]) -> int:
    """How often a position went from a token to a mask or to another token."""
    return sum(
        one >= 0 and one != other
        for before, after in zip(history, history[1:], strict=False)
        for one, other in zip(before, after, strict=True)
    )


#: The name of the measure of `ideal_chi_square`, and its bound: with 3 degrees of freedom,
#: chi-square exceeds 16.27 (5.42 per degree) once in 1,000 times.
IDEAL_CHI_SQUARE = "chi-square of the tokens of an ideal model, per degree"
MAX_CHI_SQUARE = 5.42


def ideal_chi_square(decoder: str, samples: int) -> float:
    """Chi-square per degree of freedom of sampled tokens, against the distribution that the model
    gives whatever the canvas holds. If the model knows it, samples follow it."""
    counts = np.zeros(4)
    for seed in range(samples // 20):
        history = traced(decoder, _four_tokens, 20, temperature=1.0, seed=seed)
        counts += np.bincount(history[-1], minlength=VOCABULARY)[:4]
    expected = softmax(_four_tokens(()))[:4] * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum() / 3)


def _four_tokens(path: tuple[int, ...]) -> np.ndarray:
    row = np.full(VOCABULARY, -60.0)
    row[:4] = np.log([0.1, 0.2, 0.3, 0.4])
    return row.astype(np.float32)
