"""A canvas after positions were replaced or dropped."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.canvas import FIXED, MASKED, Canvas

MASK = 9


def open_canvas() -> Canvas:
    """Two tokens of a prompt and six masks, in a block of the first four masks."""
    canvas = Canvas(np.array([5, 6, *[MASK] * 6]), MASK)
    canvas.open(2, 6)
    canvas.commit([3, 6], [1, 2], [0.5, 0.25])
    canvas.logprobs = {3: "three", 6: "six"}
    return canvas


def test_later_positions_and_the_end_of_the_block_move_when_a_token_becomes_two_masks() -> None:
    canvas = open_canvas()
    canvas.splice(3, 4, 2)
    assert canvas.tokens.tolist() == [5, 6, MASK, MASK, MASK, MASK, MASK, 2, MASK]
    assert canvas.committed.tolist() == [FIXED] * 2 + [MASKED] * 5 + [0, MASKED]
    assert canvas.confidence.tolist() == [1, 1, 0, 0, 0, 0, 0, 0.25, 0]
    assert canvas.logprobs == {7: "six"}
    assert canvas.block == (2, 7)


def test_later_positions_and_the_end_of_the_block_move_when_positions_are_removed() -> None:
    canvas = open_canvas()
    canvas.splice(4, 6, 0)
    assert canvas.tokens.tolist() == [5, 6, MASK, 1, 2, MASK]
    assert canvas.logprobs == {3: "three", 4: "six"}
    assert canvas.block == (2, 4)


def test_a_shorter_canvas_takes_no_more_masks() -> None:
    canvas = open_canvas()
    canvas.truncate(5)
    assert canvas.tokens.tolist() == [5, 6, MASK, 1, MASK]
    assert canvas.logprobs == {3: "three"}
    assert canvas.block == (2, 5) and canvas.is_fixed_length
