"""A decoder around another one has the requirements of that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.api.scoring import PromptLogprobsDecoder
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.constrained.banned_strings import BannedStrings
from anydecode.decoders.constrained.jump_forward import JumpForward
from anydecode.decoders.constrained.validate_and_retry import ValidateAndRetry
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.guidance.classifier_free_guidance import ClassifierFreeGuidance
from anydecode.decoders.speculative.taps import TapsDrafter
from anydecode.models.scripted import ByteTokenizer


def validated(inner: Any) -> ValidateAndRetry:
    constraint: Constraint = Regex("a*")
    return ValidateAndRetry(inner, constraint, ByteTokenizer(), 256)


def beside_copies(inner: Any) -> Speculative:
    copies = catalogue.build("prompt-lookup").drafter
    return Speculative(TapsDrafter({"copies": copies, "inner": inner.drafter}))


@pytest.mark.parametrize("key", ["specdiff-2", "omnidraft", "prompt-lookup"])
@pytest.mark.parametrize(
    "wrap",
    [
        validated,
        beside_copies,
        lambda inner: BannedStrings(inner, ["a"], False, ByteTokenizer()),
        lambda inner: PromptLogprobsDecoder(inner, 1),
        lambda inner: ClassifierFreeGuidance(inner=inner),
        lambda inner: Speculative(JumpForward(inner.drafter)),
    ],
    ids=["validated", "taps", "banned-strings", "prompt-logprobs", "guidance", "jump-forward"],
)
def test_wrappers_pass_the_requirements_on(wrap: Callable[[Any], Any], key: str) -> None:
    inner = catalogue.build(key)
    expected = inner.requirements
    if wrap is beside_copies:  # drafts with every draft model
        has_draft = bool(expected.runners)
        expected = replace(expected, takes_prediction=True, runners=(), every_draft=has_draft)
    assert wrap(inner).requirements == expected


@pytest.mark.parametrize("key", ["specdiff-2", "omnidraft", "beam", "autoregressive"])
@pytest.mark.parametrize("prefill", ["fastkv", "quickprefill", "mustdrop"])
def test_compressed_prompts_pass_the_requirements_on(prefill: str, key: str) -> None:
    inner = catalogue.build(key).requirements
    assert catalogue.build(prefill, decoder=key).requirements == replace(
        inner, takes_embeddings=True, attention_only=("target",)
    )


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_every_method_has_the_card_of_its_key(key: str) -> None:
    """Whether a class or a factory is registered; `pearl` builds an object of another method's
    class."""
    assert catalogue.build(key).card is catalogue.find(key).card


def test_requirements_of_methods() -> None:
    expected = {
        "autoregressive": Requirements(takes_embeddings=True),
        "beam": Requirements(can_sample=False, max_texts=4),
        "llada": Requirements(causal=False, attention_only=("target",)),
        "wedlm": Requirements(attention_only=("target",)),
        "apd": Requirements(runners=("draft",), causal=False),
        "elastic-cache": Requirements(causal=False, reads_weights=True, attention_only=("target",)),
        "omnidraft": Requirements(runners=("draft",), can_translate_vocab=True),
        "specdiff-2": Requirements(runners=("draft",), draft_causal=False),
    }
    assert {key: catalogue.build(key).requirements for key in expected} == expected
