"""What the oracle tests of methods with fewer layers share: texts and sublayers replayed token by
token, and the loss of agreement with the full model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.agreement import teacher_forced
from anydecode.certification.checks import Check
from anydecode.certification.rounds import plain_token, rounds
from anydecode.certification.tiny import tiny_model
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer

PROMPTS = ("the cat sat on the mat", "abcabc", "q")
LENGTH = 60
#: Adds a position: (token, its number in the generated text, below 0 in the prompt) to its logits,
#: and how many attention sublayers and MLPs it ran.
Step = Callable[[int, int], tuple[np.ndarray, int, int]]


def text_checks(
    key: str, open_llm: Callable[[], LLM], make: Callable[[Network], Step]
) -> Iterator[Check]:
    """Checks that texts and the sublayers of each token equal the replay.

    Args:
        key: The method.
        open_llm: An engine over a tiny model.
        make: Starts the replay of a text.
    """
    for temperature in (0.0, 0.9):
        wrong, wrong_counts, counts = 0, 0, set[tuple[int, int]]()
        with open_llm() as llm:
            network: Network = llm.model.network  # type: ignore[attr-defined]
            for prompt in PROMPTS:
                trace = rounds(llm, key, prompt, LENGTH, temperature=temperature)
                step, text = make(network), list(prompt.encode())
                for index, token in enumerate(text, -len(text)):
                    logits, *ran = step(token, index)
                for index, one in enumerate(trace):
                    expected = plain_token(logits, len(text), temperature)
                    wrong += one.generated != [expected]
                    entry = one.entry
                    wrong_counts += [entry["mixers"], entry["mlps"]] != ran
                    counts.add((ran[0], ran[1]))
                    text += one.generated
                    logits, *ran = step(text[-1], index)
        where = f"T={temperature}"
        yield Check(f"tokens equal the replay, {where}", wrong == 0, f"{wrong} differ")
        yield Check(f"sublayers of each token equal the replay, {where}", wrong_counts == 0)
        detail = ", ".join(f"{mixers}+{mlps}" for mixers, mlps in sorted(counts))
        yield Check(f"tokens run different numbers of sublayers, {where}", len(counts) > 2, detail)


def layered(layers: int, residual: float) -> LLM:
    """An engine over a tiny model of so many layers, which add `residual` times what they usually
    do."""
    return LLM(tiny_model(layers=layers, residual=residual), tokenizer=ByteTokenizer())


def agreement_lost(
    key: str, samples: int, open_llm: Callable[[], LLM] = partial(layered, 10, 0.1)
) -> float:
    """The share of tokens of the full model's texts that are not the method's most probable ones,
    over `samples` texts of a tiny model whose layers change little."""
    num_tokens = num_equal = 0
    with open_llm() as llm:
        for number in range(samples):
            prompt = [(7 * number + 3 * i) % 251 for i in range(1 + number % 5)]
            options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
            text = llm.generate(prompt, decoder="autoregressive", **options).tokens
            found = teacher_forced(llm, key, prompt, text)
            num_tokens += found.num_tokens
            num_equal += found.num_equal
    return 1 - num_equal / num_tokens
