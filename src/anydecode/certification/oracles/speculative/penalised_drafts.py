"""Drafts under penalties: each draft counts for those after it, as the tokens of the text do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.chi_square import VOCABULARY
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING
from anydecode.certification.rounds import accepted, rounds, scripted, wordy
from anydecode.certification.tiny import tiny_model
from anydecode.models.scripted import ByteTokenizer

TARGET = wordy()
PENALTIES = {"presence_penalty": 2.0, "frequency_penalty": 1.0}


def same_layers() -> LLM:
    """A model whose layers add nothing, so that the first ones predict what all do."""
    model = tiny_model(layers=8, residual=0.0, vocabulary=VOCABULARY)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024, drafting="fixed")


def penalty_checks(
    decoder: str, open_llm: Callable[[], LLM] = partial(scripted, TARGET, TARGET)
) -> Iterator[Check]:
    """Checks that a target that drafts for itself accepts all levels of its drafts under penalties.
    `open_llm` opens such a target."""
    with open_llm() as llm:
        prompt = REPEATING if llm.model.spec.vocab_size == VOCABULARY else "abcabcabd"
        trace = rounds(llm, decoder, prompt, 40, temperature=0.8, **PENALTIES)
    depths = [max(map(len, one.paths), default=0) for one in trace]
    pairs = list(zip(depths, trace, strict=True))[:-1]  # the last round may end the text
    is_accepted = all(depth == len(one.accepted) for depth, one in pairs)
    name = f"{decoder}: drafts count for the penalties of those after them"
    detail = f"{accepted(trace)} of {sum(depths)} levels accepted"
    yield Check(name, is_accepted and max(depths) > 1, detail)
