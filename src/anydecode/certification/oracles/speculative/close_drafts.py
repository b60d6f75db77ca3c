"""A target, and a draft model that mostly agrees with it, for the oracle tests of lossy acceptance
rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.chi_square import PROMPT, TARGET_SCRIPT, VOCABULARY, bigram_logits
from anydecode.certification.rounds import blurred, plain_token, rounds, scripted, wordy
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

TARGET = wordy(spread=1.7)
DRAFT = blurred(TARGET, error=1.0)
PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")

#: From the target's logits `[vocab_size]`, a draft token and the temperature to whether the rule
#: accepts the draft.
Rule = Callable[[np.ndarray, int, float], bool]


def rule_checks(key: str, rule: Rule, temperatures: Seq[float]) -> Iterator[Check]:
    """Checks that the default build of `key` drafts four tokens with the draft model, accepts the
    longest prefix that passes `rule`, and samples the next token from the target."""
    for temperature in temperatures:
        wrong = num_differing = num_rejected = 0
        with scripted(TARGET, DRAFT) as llm:
            for prompt in PROMPTS:
                for one in rounds(llm, key, prompt, 60, temperature=temperature):
                    drafts: list[int] = []
                    kept: list[int] = []
                    for _ in range(4):
                        seen = (*one.text, *drafts)
                        drafts.append(plain_token(DRAFT(seen), len(seen), temperature))
                    for draft in drafts:
                        row = TARGET((*one.text, *kept))
                        if not rule(row, draft, temperature):
                            num_rejected += 1
                            break
                        seen = (*one.text, *kept)
                        num_differing += draft != plain_token(row, len(seen), temperature)
                        kept.append(draft)
                    seen = (*one.text, *kept)
                    following = plain_token(TARGET(seen), len(seen), temperature)
                    wrong += one.tokens != drafts
                    wrong += one.generated != [*kept, following][: len(one.generated)]
                    wrong += len(one.accepted) != len(kept)
        yield Check(f"rounds at T={temperature} equal the oracle", wrong == 0)
        name = f"drafts are rejected, T={temperature}"
        yield Check(name, num_rejected > 0, f"{num_rejected}")
        if num_differing or temperature:
            name = f"drafts that plain decoding would not sample are accepted, T={temperature}"
            yield Check(name, num_differing > 0, f"{num_differing}")


def close_llm() -> LLM:
    """A small target, and a draft model that mostly agrees with it."""
    noise = bigram_logits(VOCABULARY, 6, spread=0.5)
    draft = ScriptedModel(lambda seen: TARGET_SCRIPT(seen) + noise(seen), vocab_size=VOCABULARY)
    target = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY)
    return LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096)


def saves_passes(key: str, temperature: float) -> Check:
    """Whether the method `key` needs fewer passes than speculative sampling."""
    options: dict[str, Any] = {"max_tokens": 120, "temperature": temperature, "seed": 5}
    with close_llm() as llm:
        exact = llm.generate(PROMPT, decoder="speculative-sampling", **options).stats
        lossy = llm.generate(PROMPT, decoder=key, **options).stats
    detail = f"{lossy.tokens_per_pass:.2f} against {exact.tokens_per_pass:.2f} tokens per pass"
    return Check(
        "accepts more drafts than speculative sampling", lossy.passes < exact.passes, detail
    )
