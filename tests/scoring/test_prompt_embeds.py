"""Where embeddings may lie in a prompt, and of what shape they are."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.errors import InvalidRequestError
from anydecode.scoring.prompt_embeds import PromptEmbeds

PROMPT, WIDTH = [0] * 6, 4


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 5), (4, 1), (2, 3)])
def test_embeddings_within_the_prompt(first: int, count: int) -> None:
    embeds = PromptEmbeds(first, np.zeros((count, WIDTH), np.float32), np.zeros(count))
    embeds.check(PROMPT, WIDTH)
    assert embeds.stop == first + count


@pytest.mark.parametrize(("first", "count"), [(-1, 3), (0, 6), (5, 1), (4, 2), (2, 0)])
def test_embeddings_elsewhere_are_refused(first: int, count: int) -> None:
    with pytest.raises(InvalidRequestError, match="within the prompt, before its last token"):
        PromptEmbeds(first, np.zeros((count, WIDTH), np.float32)).check(PROMPT, WIDTH)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"\[count, 4\], not \[2, 5\]"):
        PromptEmbeds(0, np.zeros((2, 5), np.float32)).check(PROMPT, WIDTH)
    with pytest.raises(InvalidRequestError, match="one importance per embedding"):
        PromptEmbeds(0, np.zeros((2, 4), np.float32), np.zeros(3)).check(PROMPT, WIDTH)
