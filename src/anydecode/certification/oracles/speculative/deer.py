"""Oracle test of DEER: the distributions of the masked block are recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import (
    DRAFT_SCRIPT,
    TARGET_SCRIPT,
    VOCABULARY,
    expected,
    fit,
    sampled,
)
from anydecode.certification.oracles.speculative.masked_drafts import PROMPTS, marginals, open_llm
from anydecode.certification.rounds import VirtualClock, plain_token, rounds
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

BLOCK = 16


@oracle_test("deer")
def deer() -> Iterator[Check]:
    """One pass of the draft model per round fills sixteen masks; each is sampled from its own
    distribution, with the target's noise."""
    for temperature in (0.0, 0.8):
        wrong = num_accepted = num_rounds = num_passes = 0
        with open_llm() as llm:
            clock = VirtualClock(llm, target=1.0, draft=1.0)
            for prompt in PROMPTS:
                for one in rounds(llm, "deer", prompt, temperature=temperature):
                    rows = marginals(one.text, BLOCK)
                    wrong += one.tokens != [
                        plain_token(row, len(one.text) + ahead, temperature)
                        for ahead, row in enumerate(rows)
                    ]
                    num_accepted += len(one.accepted)
                    num_rounds += 1
            num_passes = sum(runner == "draft" for runner, *_ in clock.passes)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0, f"{num_rounds}")
        yield Check(f"drafts are accepted at T={temperature}", num_accepted > 9, f"{num_accepted}")
        yield Check("one draft pass per round", num_passes == num_rounds, f"{num_passes}")
    yield from _rejection()


def _rejection() -> Iterator[Check]:
    """The paper's acceptance rule: samples follow the target, and drafts are sampled."""

    def draft(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = np.append(DRAFT_SCRIPT(path[-1:]), np.float32(9.0))  # the mask is likely
        return row

    class MaskTokenizer(ByteTokenizer):
        vocab_size = VOCABULARY + 1
        mask_id = VOCABULARY

    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    proposing = ScriptedModel(draft, vocab_size=VOCABULARY + 1, causal=False)
    with LLM(target, tokenizer=MaskTokenizer(), draft=proposing, cache_positions=8192) as llm:
        decoder = catalogue.build("deer", size=2, acceptance="rejection")
        result = fit(sampled(llm, decoder, {}), expected({}))
    yield Check("with the paper's rule, samples follow the target", result.passed, str(result))
