"""Oracle test of learn2pd (Learning to Parallel, arXiv:2509.25188): the output of the filter
network, computed by hand from the confidences of the block."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    StepState,
    bidirectional,
    ending,
    naive,
    softmax,
    steps,
)
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.decoders.diffusion.learn2pd import model_facts
from anydecode.models.scripted import EOS, MASK


@oracle_test("learn2pd")
def learn2pd() -> Iterator[Check]:
    """The filter network's output decides, computed by hand from the confidences of the block."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(3)
    hidden, output = random.normal(size=(5, 8)), random.normal(size=(8, 5))
    hidden_bias, output_bias = random.normal(size=5), random.normal(size=8)

    def rule(state: StepState) -> list[int]:
        start = state.memory.setdefault("start", len(PROMPT))
        while max(state.probabilities) >= start + 8:
            start = state.memory["start"] = start + 8
        c = np.array(
            [
                state.max_probability(i) if i in state.probabilities else 1.0
                for i in range(start, start + 8)
            ]
        )
        logits = output @ np.maximum(hidden @ c + hidden_bias, 0) + output_bias
        return [
            i for i in state.probabilities if 1 / (1 + math.exp(-logits[i - start])) > 0.7
        ] or state.order()[:1]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "filter.safetensors"
        tensors = {"hidden.weight": hidden, "hidden.bias": hidden_bias}
        tensors |= {"output.weight": output, "output.bias": output_bias}
        with bidirectional(CONFIDENT) as llm:
            model = model_facts(llm.model, MASK)
        save_file(
            {name: value.astype(np.float32) for name, value in tensors.items()},
            path,
            metadata={"learn2pd": json.dumps({"block": 8, "model": model})},
        )
        decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7, foresee_end=False)
        with bidirectional(CONFIDENT) as llm:
            actual = steps(llm, decoder, 24)
            yield Check(
                "fills the positions that the filter selects",
                actual == naive(CONFIDENT, 24, 8, rule),
            )
            one_by_one = len(naive(CONFIDENT, 24, 8, lambda state: state.order()[:1])[1])
            yield Check("the filter saves passes", len(actual[1]) < one_by_one, f"{len(actual[1])}")
        with bidirectional(ending()) as llm:
            decoder = catalogue.build("learn2pd", filter=str(path), threshold=0.7)
            answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=40, trace=True)
            lengths = [len(record["canvas"]) for record in answer.trace or ()]
            yield Check("the canvas is cut at the predicted end", min(lengths) < 40)
            decoder = catalogue.build("learn2pd", filter=str(path), threshold=1.0)
            answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=40, trace=True)
            found = len((answer.trace or [])[0]["canvas"])
            yield Check("and that is the likeliest one", found == _cut(40), f"{found}")
            yield Check("the text ends at the predicted end", answer.finish_reason == "stop")


def _cut(length: int) -> int:
    """The length of the canvas after one step that unmasks the most confident mask: it ends with a
    committed end of text, else with the likeliest predicted one, but never at the first mask."""
    canvas = [*PROMPT, *[MASK] * length]
    first = len(PROMPT)
    p = {i: softmax(ending()((*canvas, i))) for i in range(first, len(canvas))}
    block = range(first, first + 8)
    best = max(block, key=lambda i: (p[i].max(), -i))
    if p[best].argmax() == EOS:
        return best + 1 - first
    ends = [i for i in p if i not in (first, best) and p[i].argmax() == EOS]
    return max(ends, key=lambda i: (p[i][EOS], -i)) + 1 - first


register_losses("learn2pd", "learn2pd", accuracy=0.05, passes=0.5)
