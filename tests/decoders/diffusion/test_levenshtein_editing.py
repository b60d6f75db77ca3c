"""Levenshtein editing: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import bidirectional, dense
from anydecode.certification.oracles.diffusion.levenshtein_editing import (
    DELETE,
    SPLIT,
    controlled,
    edited,
)
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.decoders.diffusion import levenshtein_editing as module
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.levenshtein_editing import LevenshteinEditing
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import IS_SETTLED
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults

DECODER = f"levenshtein-editing:delete={DELETE},split={SPLIT}"
SCRIPT = controlled(drifting(6.0))


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("levenshtein-editing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameter",
    ["delete", "split", "threshold", "edit", "steps", "max_post_steps", "max_steps"],
)
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "levenshtein-editing", parameter)
    assert_rejected("levenshtein-editing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults", [{"threshold": 0.6}, {"edit": 0.1}, {"steps": 16}, {"max_post_steps": 15}]
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "levenshtein-editing", **defaults)
    assert_rejected("levenshtein-editing")


def _originals_stay(canvas: Canvas, first: int, sources: Any) -> None:
    """Masks that a step inserts count as those that the block was opened with."""
    REARRANGE(canvas, first, sources)
    state = canvas.policy_state[module._STATE]
    sources[:] = [state.originals[0] if source is None else source for source in sources]


REARRANGE = Canvas.rearrange


def _next_takes_the_place(canvas: Canvas, first: int, sources: Any) -> None:
    """An inserted mask takes the place of the token that it should precede."""
    wrong = [
        None if before is None else source
        for before, source in zip([0, *sources], sources, strict=False)
    ]
    REARRANGE(canvas, first, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [_originals_stay, _next_takes_the_place])
def test_certificate_rejects_wrong_edits_of_the_block(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Canvas, "rearrange", wrong)
    assert_rejected("levenshtein-editing")


@pytest.mark.slow
def test_certificate_rejects_blocks_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ESCAPES", 0)
    assert_rejected("levenshtein-editing")


def _at_least(
    self: LevenshteinEditing, filled: Any, canvas: Canvas, *given: Any
) -> np.ndarray[Any, Any]:
    *masks, confidence, is_last = given
    confidence = np.where(confidence >= self.threshold, np.nextafter(confidence, 2), confidence)
    result: np.ndarray[Any, Any] = filled(self, canvas, *masks, confidence, is_last)
    return result


def _masks_left(
    self: LevenshteinEditing, filled: Any, canvas: Canvas, *given: Any
) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = filled(self, canvas, *given[:-1], False)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [_at_least, _masks_left])
def test_certificate_rejects_other_masks(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confidences of the threshold are enough; the last step of a block leaves masks."""
    monkeypatch.setattr(
        LevenshteinEditing, "_filled", partialmethod(wrong, LevenshteinEditing._filled)
    )
    assert_rejected("levenshtein-editing")


@pytest.mark.slow
def test_certificate_rejects_likeliest_tokens_in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def likeliest(predictions: Predictions, position: int, excluded: list[int]) -> int:
        logits = predictions.logits(position).copy()
        logits[excluded] = -np.inf
        return int(logits.argmax())

    monkeypatch.setattr(LevenshteinEditing, "_other", staticmethod(likeliest))
    assert_rejected("levenshtein-editing")


@pytest.mark.slow
def test_certificate_rejects_models_whose_control_tokens_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        LevenshteinEditing, "controls", lambda self, sequence: (self.delete, self.split)
    )
    assert_rejected("levenshtein-editing")


def test_certificate_rejects_blocks_that_close_when_they_hold_no_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply = LevenshteinEditing._apply

    def settled(self: LevenshteinEditing, sequence: Any, canvas: Canvas, *rest: Any) -> None:
        canvas.policy_state[IS_SETTLED] = True
        apply(self, sequence, canvas, *rest)

    monkeypatch.setattr(LevenshteinEditing, "_apply", settled)
    assert_rejected("levenshtein-editing")


def test_only_what_cannot_change_is_streamed() -> None:
    history, counts = edited(SCRIPT, 24, 6)
    assert counts["deleted"] and counts["inserted"]
    with bidirectional(SCRIPT, block_size=6) as llm:
        chunks = list(llm.stream([5, 6, 7], decoder=DECODER, max_tokens=24, ignore_eos=True))
    final = chunks[-1].generation
    assert final is not None and final.tokens == history[-1]
    assert not {DELETE, SPLIT} & set(final.tokens)
    assert "".join(chunk.text for chunk in chunks) == final.text
    assert len([chunk for chunk in chunks if chunk.text]) <= 6 < len(history)


def test_batches_and_restarts_do_not_change_the_text() -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True}
    options |= {"decoder": DECODER, "seed": 2, "logprobs": 1}
    prompts = [[5, 6, 7], [9], [4, 5, 6, 7, 8]]
    with bidirectional(SCRIPT, block_size=6) as llm:
        alone = [llm.generate(prompt, **options) for prompt in prompts]
    with bidirectional(SCRIPT, block_size=6) as llm, Restarts(llm.engine, seed=1):
        together = llm.generate(prompts, **options)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert [entry.token for entry in one.logprobs or ()] == one.tokens


def test_nothing_is_removed_from_a_template_or_with_a_constraint() -> None:
    mask = 258
    template = [5, 6, mask, mask, 7, mask, 8, mask]
    options: dict[str, Any] = {"decoder": DECODER, "trace": True}
    with bidirectional(controlled(dense(spread=9.0)), block_size=4) as llm:
        answer = llm.generate(template, max_tokens=6, ignore_eos=True, **options)
    assert (answer.tokens[2], answer.tokens[4]) == (7, 8)
    assert not any(entry["deleted"] or entry["inserted"] for entry in answer.trace or ())
    with bidirectional(SCRIPT, block_size=6) as llm:
        answer = llm.generate([5, 6, 7], constraint=Regex("[a-f]{12}"), max_tokens=16, **options)
    assert len(answer.text) == 12 and set(answer.text) <= set("abcdef")


@pytest.mark.parametrize("decoder", ["sdar", "token-editing", "s2d2", "fast-dllm"])
def test_other_methods_never_generate_the_control_tokens_of_a_model(decoder: str) -> None:
    tokens = []
    for edit_tokens in (None, (DELETE, SPLIT)):
        with bidirectional(SCRIPT, block_size=6, edit_tokens=edit_tokens) as llm:
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "decoder": decoder}
            tokens.append({DELETE, SPLIT} & set(llm.generate([5, 6, 7], **options).tokens))
    assert tokens[0] and not tokens[1]


def test_what_is_no_source_is_dropped_from_a_canvas() -> None:
    canvas = Canvas(np.array([3, 9, 9, 9, 4]), mask=9)
    canvas.commit([1, 2], [5, 6], [0.5, 0.6])
    canvas.logprobs = {1: "five", 2: "six"}
    canvas.rearrange(1, [None, 2, 3])
    assert canvas.tokens.tolist() == [3, 9, 6, 9, 4] and canvas.masks.tolist() == [1, 3]
    assert canvas.logprobs == {2: "six"} and canvas.confidence.tolist() == [1, 0, 0.6, 0, 1]
    assert canvas.meter.committed == 1
    canvas.rearrange(1, [3, 2, None])
    assert canvas.tokens.tolist() == [3, 9, 6, 9, 4] and canvas.meter.committed == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("threshold=2", "threshold must be between 0 and 1"),
        ("edit=-1", "edit must be between 0 and 1"),
        ("max_steps=1", "max_steps is 1; allowed are 2 to"),
        ("steps=0", "steps is 0; allowed are 1 to"),
        ("delete=4,split=4", "must be different tokens, not 4, 4 and"),
        ("delete=4000000", "delete is 4000000; allowed are 0 to 1048576"),
        ("delete=900000", "must be below the vocabulary size"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with LLM("tiny-blocks") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", decoder=f"levenshtein-editing:{parameters}")
