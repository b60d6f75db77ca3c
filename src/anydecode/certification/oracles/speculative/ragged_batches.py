"""Batches whose rows accept different numbers of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.oracles.speculative.draft_chains import chain_oracle
from anydecode.certification.oracles.speculative.reading_drafts import TARGET
from anydecode.certification.oracles.speculative.recording_model import RecordingModel
from anydecode.certification.rounds import VOCABULARY, blurred, scripted
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


def ragged_batch(key: str) -> Iterator[Check]:
    """Rows of a batch accept different numbers of drafts, which are those of the draft model alone,
    outputs equal those of each row alone, and no slot is copied between passes."""
    prompts = ["abcabcabd", "the cab had a bad cab", "h", "daddaddad"]
    options: dict[str, Any] = {
        "decoder": key,
        "max_tokens": 40,
        "ignore_eos": True,
        "trace": True,
        "seed": 1,
        "temperature": 0.0,
    }
    drafting = blurred(TARGET, error=0.6)
    with scripted(TARGET, drafting) as llm:
        alone = [llm.generate(prompt, **options) for prompt in prompts]
    target = RecordingModel(TARGET, vocab_size=VOCABULARY)
    draft = ScriptedModel(drafting, vocab_size=VOCABULARY)
    with LLM(
        target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=2048, drafting="fixed"
    ) as llm:
        batch = llm.generate(prompts, **options)
        texts = [
            llm.encode(prompt) + one.tokens for prompt, one in zip(prompts, batch, strict=True)
        ]
        llm.engine.check_integrity()
    wrong = 0
    for text, answer in zip(texts, batch, strict=True):
        for entry in answer.trace or ():
            at, drafts = entry["position"], entry["drafted"]
            wrong += drafts != chain_oracle(text[:at], len(drafts), 0.0, drafting)
            wrong += len(drafts) != 5 and at + 5 < len(text)
    yield Check("drafts are those of the draft model alone", wrong == 0, f"{wrong} differ")
    yield Check(
        "outputs equal each row alone", [a.tokens for a in batch] == [a.tokens for a in alone]
    )
    by_round = [[len(entry["accepted"]) for entry in answer.trace or ()] for answer in batch]
    mixed = sum(len(set(counts)) > 1 for counts in zip(*by_round, strict=False))
    yield Check("rows accept different numbers of drafts", mixed > 3, f"in {mixed} passes")
    yield Check("no slot is copied", target.copied == 0, f"{target.copied}")
    rows = sum(1 + len(entry["drafted"]) for answer in batch for entry in answer.trace or ())
    extra = sum(len(prompt) - 1 for prompt in prompts)
    yield Check("no row is computed twice", len(target.ran) == rows + extra, f"{len(target.ran)}")
    whole = [e for a in batch for e in a.trace or () if len(e["accepted"]) == len(e["drafted"])]
    yield Check(
        "if all drafts are accepted, one more token is generated",
        all(len(e["tokens"]) == 6 for e in whole) and whole != [],
    )
