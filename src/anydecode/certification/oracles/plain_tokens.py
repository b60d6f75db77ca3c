"""The tokens of plain decoding, recomputed from the whole text."""

from __future__ import annotations

from anydecode.certification.rounds import plain_token, wordy

PROMPT = list(b"the cab had")


def plain_tokens(temperature: float, count: int) -> list[int]:
    """Argmax of logits / T plus noise, recomputed from the whole text for every token."""
    logits, text = wordy(), list(PROMPT)
    for _ in range(count):
        text.append(plain_token(logits(tuple(text)), len(text), temperature))
    return text[len(PROMPT) :]
