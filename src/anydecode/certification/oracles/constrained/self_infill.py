"""Oracle test of self-infill (Self-Infilling Code Generation, arXiv:2311.17972): a run computed by
hand, and the order in which the model sees its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.constraints.languages import Regex
from anydecode.decoders.constrained.self_infill import SelfInfill
from anydecode.models.scripted import EOS, FillInTokenizer, ScriptedModel

_PREFIX, _SUFFIX, _MIDDLE = range(259, 262)


def filling_llm(seen: list[tuple[int, ...]]) -> LLM:
    """A model that generates "x" after "f(" and is then uncertain; it continues a suffix with "!",
    and fills the middle with "m"."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        seen.append(path)
        fillers = {_MIDDLE: "m", _SUFFIX: "!"}
        logits = np.zeros(262)
        mark = max((path.index(m), m) for m in (_PREFIX, _SUFFIX, _MIDDLE) if m in path)[1]
        if mark == _PREFIX:
            if path[-1] == ord("("):
                logits[ord("x")] = 20.0
            return logits
        logits[EOS if path[-1] == ord(fillers[mark]) else ord(fillers[mark])] = 20.0
        return logits

    model = ScriptedModel(script, vocab_size=262)
    return LLM(model, tokenizer=FillInTokenizer(), cache_positions=1024)


def uncertain_llm(confidence: float, endless: bool = False) -> LLM:
    """A model that generates "x" from left to right with this probability, and then fills as
    `filling_llm`. An `endless` suffix does not end."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(262)
        mark = max((path.index(m), m) for m in (_PREFIX, _SUFFIX, _MIDDLE) if m in path)[1]
        if mark == _PREFIX:
            logits[ord("x")] = np.log(261 * confidence / (1 - confidence))
            return logits
        filler = ord("!" if mark == _SUFFIX else "m")
        ends = path[-1] == filler and not (endless and mark == _SUFFIX)
        logits[EOS if ends else filler] = 20.0
        return logits

    model = ScriptedModel(script, vocab_size=262)
    return LLM(model, tokenizer=FillInTokenizer(), cache_positions=1024)


@oracle_test("self-infill")
def self_infill() -> Iterator[Check]:
    """A run computed by hand: the generated text, and the order in which the model sees its
    parts."""
    seen: list[tuple[int, ...]] = []
    with filling_llm(seen) as llm:
        text = llm.generate("f(", decoder=SelfInfill(begins="r"), max_tokens=12).text
        yield Check("prefix, middle and suffix", text == "xmr!", text)
        prompt_of_middle = (_PREFIX, *b"f(x", _SUFFIX, *b"r!", _MIDDLE)
        yield Check("the prompt for the middle", prompt_of_middle in seen, "prefix, suffix, middle")
        twice = llm.generate("f(", decoder=SelfInfill(begins="r", cycles=2), max_tokens=12).text
        between = (_PREFIX, *b"f(xm", _SUFFIX, *b"r")
        yield Check("a second cycle", twice == text and between in seen, "after the first middle")
        sure = llm.generate("f(", decoder=SelfInfill(threshold=0.0), max_tokens=3)
        yield Check(
            "no interruption at threshold 0",
            len(sure.tokens) == 3 and sure.text[0] == "x",
            sure.text,
        )
        gap = llm.generate("f(", decoder="self-infill:suffix=)", constraint=Regex("[a-k]+"))
        inside = set(gap.text) <= set("abcdefghijk")
        yield Check("a constraint on a gap", bool(gap.text) and inside, gap.text)
        given = llm.generate("f(", decoder="self-infill:suffix=)").text
        yield Check("fills a given gap", given == "m", given)
        default = llm.generate("f(", decoder="self-infill", max_tokens=100).text
        yield Check("the default suffix and cycles", default == "xmreturn!", default)
    for confidence, expected in ((0.11, "x" * 100), (0.09, "mreturn!")):
        with uncertain_llm(confidence) as llm:
            text = llm.generate("f(", decoder="self-infill", max_tokens=100).text
        yield Check(f"probability {confidence} and the default threshold", text == expected, text)
    with uncertain_llm(0.09, endless=True) as llm:
        text = llm.generate("f(", decoder="self-infill", max_tokens=100).text
    expected = "mreturn" + "!" * 58  # 64 tokens of suffix
    yield Check("the default length of the suffix", text == expected, text)


@measure("self-infill", "answers that do not end with the generated suffix", samples=40, margin=0.0)
def infill_loss(samples: int) -> float:
    """The share of answers that do not end with their suffix."""
    with filling_llm([]) as llm:
        options: dict[str, Any] = {
            "decoder": SelfInfill(begins="r"),
            "temperature": 0.7,
            "max_tokens": 12,
        }
        texts = [llm.generate("f(", seed=seed, **options).text for seed in range(samples)]
    return sum(not text.endswith("r!") for text in texts) / samples
