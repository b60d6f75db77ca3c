"""Token editing: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import bidirectional, dense, random_model
from anydecode.certification.oracles.diffusion.token_editing import drifting, edited
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.revising import RevisedBlocks
from anydecode.decoders.diffusion.token_editing import TokenEditing
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("token-editing")


@pytest.mark.parametrize("parameter", ["threshold", "edit", "max_post_steps", "revisit"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "token-editing", parameter)
    assert_rejected("token-editing")


@pytest.mark.parametrize("defaults", [{"threshold": 0.9}, {"edit": 0.8}])
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "token-editing", **defaults)
    assert_rejected("token-editing")


def test_certificate_rejects_blocks_that_close_when_they_hold_no_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        RevisedBlocks, "should_close", lambda self, canvas: not len(canvas.masked(*canvas.block))
    )
    assert_rejected("token-editing")


def test_certificate_rejects_blocks_that_close_when_a_step_edits_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a step that fills the last masks, whose tokens no later step could then edit."""
    revise = TokenEditing.revise

    def early(self: TokenEditing, sequence: Any, canvas: Canvas, predictions: Any) -> None:
        assert canvas.block is not None
        first, stop = canvas.block
        if not len(self._edited(canvas, predictions, self._first(canvas, first), stop)):
            canvas.policy_state["token-editing post steps"] = self.max_post_steps
        revise(self, sequence, canvas, predictions)

    monkeypatch.setattr(TokenEditing, "revise", early)
    assert_rejected("token-editing")


def test_tokens_of_the_last_filling_step_are_still_edited() -> None:
    """As in the released code, a step that began with masks never ends a block."""
    script = drifting(6.0)
    _, changes = edited(script, 24, 6, 0.3, 0.2)
    with bidirectional(script, block_size=6) as llm:
        answer = llm.generate(
            [5, 6, 7],
            decoder="token-editing:threshold=0.3,edit=0.2",
            max_tokens=24,
            ignore_eos=True,
            trace=True,
        )
    steps = [(sorted(one["filled"]), sorted(one["edited"])) for one in answer.trace or ()]
    assert steps == [(sorted(filled), sorted(replaced)) for filled, replaced in changes]
    ends = [index for index, step in enumerate(steps) if step == ([], [])]
    assert len(ends) == 5, "one step without a change per block"
    last_filled = [max(i for i in range(end) if steps[i][0]) for end in ends]
    assert any(set(steps[i][0]) & set(steps[i + 1][1]) for i in last_filled)


def test_only_what_cannot_change_is_streamed() -> None:
    """Tokens are emitted by whole blocks, though blocks are filled over many steps."""
    script = drifting(6.0)
    expected, changes = edited(script, 24, 6, 0.7, 0.5)
    with bidirectional(script, block_size=6) as llm:
        decoder = "token-editing:threshold=0.7,edit=0.5"
        chunks = list(llm.stream([5, 6, 7], decoder=decoder, max_tokens=24, ignore_eos=True))
    assert chunks[-1].generation is not None and chunks[-1].generation.tokens == expected
    assert len([chunk for chunk in chunks if chunk.text]) <= 5 < len(changes)


def test_certificate_rejects_edits_of_the_open_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished blocks are predicted again, but their tokens stay."""
    find = TokenEditing._edited

    def inside(self: TokenEditing, canvas: Canvas, predictions: Any, first: int, stop: int) -> Any:
        assert canvas.block is not None
        return find(self, canvas, predictions, canvas.block[0], stop)

    monkeypatch.setattr(TokenEditing, "_edited", inside)
    assert_rejected("token-editing")


def test_revisited_blocks_are_streamed_when_they_are_final() -> None:
    script = drifting(6.0)
    expected, _ = edited(script, 27, 6, 0.7, 0.5, revisit=1)
    with bidirectional(script, block_size=6) as llm:
        decoder = "token-editing:threshold=0.7,edit=0.5,revisit=1"
        chunks = list(llm.stream([5, 6, 7], decoder=decoder, max_tokens=27, ignore_eos=True))
    final = chunks[-1].generation
    assert final is not None and final.tokens == expected
    assert "".join(chunk.text for chunk in chunks) == final.text
    assert 2 <= len([chunk for chunk in chunks if chunk.text])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_revisited_blocks_survive_restarts(temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 21, "temperature": temperature, "ignore_eos": True}
    decoder = "token-editing:threshold=0.3,edit=0.2,revisit=1"
    prompts = [[5, 6, 7], [9], [4, 5, 6, 7, 8]]
    with random_model(block_size=4) as llm:
        alone = [llm.generate(p, decoder=decoder, seed=2, **options).tokens for p in prompts]
    with random_model(block_size=4) as llm, Restarts(llm.engine, seed=1):
        together = llm.generate(prompts, decoder=decoder, seed=2, **options)
    assert [answer.tokens for answer in together] == alone


def test_blocks_of_a_causal_context_are_not_revisited() -> None:
    """Their rows see earlier positions only, so that they say nothing of their own tokens."""
    with random_model(block_size=4) as llm:
        llm.model.spec = replace(llm.model.spec, has_causal_context=True)
        assert llm.generate([5], decoder="token-editing", max_tokens=6, ignore_eos=True).tokens
        with pytest.raises(UnsupportedCombinationError, match="revisit needs a model whose"):
            llm.generate([5], decoder="token-editing:revisit=1", max_tokens=6)


def test_prompts_and_fixed_tokens_are_not_edited() -> None:
    mask = 258
    template = [5, 6, mask, mask, 7, mask, 8, mask]
    with bidirectional(dense(spread=9.0), block_size=4) as llm:
        answer = llm.generate(
            template, decoder="token-editing:threshold=0.5,edit=0", max_tokens=6, ignore_eos=True
        )
    assert len(answer.tokens) == 6 and mask not in answer.tokens
    assert (answer.tokens[2], answer.tokens[4]) == (7, 8)


def test_a_constraint_holds() -> None:
    with bidirectional(drifting(6.0), block_size=6) as llm:
        answer = llm.generate(
            [5, 6, 7],
            decoder="token-editing:threshold=0.5,edit=0",
            constraint=Regex("[a-f]{12}"),
            max_tokens=16,
        )
    assert len(answer.text) == 12 and set(answer.text) <= set("abcdef")


@pytest.mark.parametrize("kind", ["mask", "fixed", "to a mask"])
def test_what_is_no_token_cannot_be_edited(kind: str) -> None:
    canvas = Canvas(np.array([3, 9, 9]), mask=9)
    canvas.commit([1], [4], [0.5])
    position, token = {"mask": (2, 5), "fixed": (0, 5), "to a mask": (1, 9)}[kind]
    with pytest.raises(ValueError, match="cannot be edited"):
        canvas.edit([position], [token], [0.5])
    canvas.edit([1], [5], [0.7])
    assert canvas.tokens.tolist() == [3, 5, 9] and canvas.confidence[1] == 0.7


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("threshold=2", "threshold must be between 0 and 1"),
        ("edit=-1", "edit must be between 0 and 1"),
        ("max_post_steps=-1", "max_post_steps is -1; allowed are 0 to 1024"),
        ("revisit=-1", "revisit is -1; allowed are 0 to 1024"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with LLM("tiny-blocks") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", decoder=f"token-editing:{parameters}")


def test_the_released_modes_end(tmp_path: Any) -> None:
    decoder = catalogue.build("token-editing", threshold=0.5, edit=0.0)
    assert isinstance(decoder, TokenEditing)
    with LLM("tiny-blocks") as llm:
        answer = llm.generate("sort Leo Ada Ben:", decoder=decoder, max_tokens=24)
    assert answer.stats.passes <= 24 + 4 * 16
