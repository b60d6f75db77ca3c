"""An oracle test outside the package: the drafts of `bigram`, compared with a second implementation
that shares no code with it.

    anydecode certify bigram_oracle:bigram
"""

from __future__ import annotations

from collections.abc import Iterator

from bigram_drafter import bigram

from anydecode import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

__all__ = ["bigram"]


def expected_drafts(text: list[int], size: int) -> list[int]:
    """The drafts behind `text`, found by searching it from its end."""
    drafts: list[int] = []
    token = text[-1]
    while len(drafts) < size:
        earlier = [i for i in range(len(text) - 1) if text[i] == token]
        if not earlier:
            break
        token = text[earlier[-1] + 1]
        drafts.append(token)
    return drafts


@oracle_test("bigram")
def checks() -> Iterator[Check]:
    """Every round of one generation drafts what `expected_drafts` says."""
    prompt = list(b"the cat sat on the mat and the cat")
    with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer()) as llm:
        answer = llm.generate(
            prompt, decoder=bigram(size=3), trace=True, max_tokens=60, ignore_eos=True
        )
    text = prompt + answer.tokens
    wrong = [
        entry
        for entry in answer.trace
        if entry["drafted"] != expected_drafts(text[: entry["position"]], 3)
    ]
    drafted = sum(len(entry["drafted"]) for entry in answer.trace)
    yield Check("drafts", drafted > 0 and not wrong, f"{drafted} drafts, {len(wrong)} wrong rounds")
