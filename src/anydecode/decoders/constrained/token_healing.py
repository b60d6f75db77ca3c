"""Token healing (Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing", 2023,
as in guidance): the prompt's last tokens are generated again, so that longer tokens can replace
them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.constraints.vocabulary import Vocabulary
from anydecode.decoders.constrained.unbiased_tokenization import PromptBoundaryDecoder
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
        summary="Removes the prompt's last tokens and generates their text again, in longer tokens"
        " if the model prefers them.",
        works_with=("samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "listed as lossy because it differs from plain decoding after the prompt's own tokens;"
            " unbiased-tokenization is the exact method",
            "the first tokens of the answer are those of the text beyond the prompt",
        ),
        remote={"count": Range(1, 16)},
    )
)
class TokenHealing(PromptBoundaryDecoder):
    """Generates the last tokens of the prompt again, constrained to their text.

    Args:
        count: Number of tokens of the prompt that are generated again.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise InvalidRequestError(f"token-healing needs count >= 1, not {count}")
        self.count = count

    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        num_kept = len(prompt)
        while num_kept > max(1, len(prompt) - self.count) and tokenizer.token_bytes(
            prompt[num_kept - 1]
        ):
            num_kept -= 1
        return num_kept

    def cover(
        self, branch: Sequence, tail: bytes, vocab: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        while tail:
            scores = yield branch.score()
            allowed = np.array(sorted(healing_tokens(vocab, tail)), np.int64)
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            masked_row = np.full(len(row), -np.inf, np.float32)
            masked_row[allowed] = row[allowed]
            token = branch.sample(branch.sampler, masked_row, position)
            branch.tokens.append(token)
            tail = tail[len(vocab.token_bytes[token]) :]
        return list(branch.tokens)


def healing_tokens(vocab: Vocabulary, tail: bytes) -> set[int]:
    """Tokens whose bytes are a prefix of `tail` or start with it."""
    tokens = set(vocab.tokens_with_prefix(tail))
    for length in range(1, len(tail)):
        tokens.update(vocab.tokens_equal_to(tail[:length]))
    return tokens
