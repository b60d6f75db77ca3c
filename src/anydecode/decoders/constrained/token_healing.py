"""Token healing (Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing", 2023,
as in guidance): the prompt's last tokens are said anew, so that a longer one may take their place.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.constraints.vocabulary import Vocabulary
from anydecode.decoders.constrained.unbiased_tokenization import PromptEnd
from anydecode.errors import InvalidRequestError
from anydecode.models.tokenizer import Tokenizer
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "token-healing",
        "constraint",
        paper="The Art of Prompt Design: Prompt Boundaries and Token Healing (Lundberg, 2023)",
        bibtex="@misc{lundberg2023healing, title = {The Art of Prompt Design: Prompt Boundaries and"
        " Token Healing}, author = {Scott Lundberg}, year = {2023}}",
        exactness="lossy",
        summary="Takes back the prompt's last tokens and says their text anew, in longer tokens if"
        " need be.",
        works_with=("samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "called lossy because plain decoding behind the prompt's own tokens is what it departs"
            " from; unbiased-tokenization is the exact method",
            "the answer's first tokens are those of the text beyond the prompt",
        ),
    )
)
class TokenHealing(PromptEnd):
    """The last `count` tokens of the prompt are healed."""

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise InvalidRequestError("token-healing needs count >= 1")
        self.count = count

    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        kept = len(prompt)
        while kept > max(1, len(prompt) - self.count) and tokenizer.token_bytes(prompt[kept - 1]):
            kept -= 1
        return kept

    def cover(
        self, branch: Sequence, tail: bytes, words: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        while tail:
            scores = yield branch.score()
            allowed = np.array(sorted(fitting(words, tail)), np.int64)
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            healed = np.full(len(row), -np.inf, np.float32)
            healed[allowed] = row[allowed]
            token = branch.sample(branch.sampler, healed, position)
            branch.tokens.append(token)
            tail = tail[len(words.pieces[token]) :]
        return list(branch.tokens)


def fitting(words: Vocabulary, tail: bytes) -> set[int]:
    """Tokens that say a beginning of `tail`, or all of it and more."""
    found = set(words.beginning(tail))
    for length in range(1, len(tail)):
        found.update(words.spelling(tail[:length]))
    return found
