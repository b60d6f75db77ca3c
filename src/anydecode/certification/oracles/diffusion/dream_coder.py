"""Oracle test of dream-coder (Dream-Coder 7B, arXiv:2509.01142; DreamOn, arXiv:2602.01326): Dream's
order; regions that end early shrink by their masks, and an expansion token grows them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, bidirectional, steps
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.models.scripted import EOS, MASK


@oracle_test("dream-coder")
def dream_coder() -> Iterator[Check]:
    """Dream's order; regions that end early shrink, an expansion token grows them."""
    with bidirectional(CONFIDENT) as llm:
        plain = steps(llm, "dream", 12)
        yield Check("without infilling it equals dream", steps(llm, "dream-coder", 12) == plain)

    def ending(path: tuple[int, ...]) -> np.ndarray:
        *seen, position = path
        row = np.zeros(259, np.float32)
        first = seen.index(ord("<")) + 1
        row[(*b"ab", EOS)[min(position - first, 2)]] = 9.0 - 0.1 * position
        return row

    def growing(path: tuple[int, ...]) -> np.ndarray:
        *seen, position = path
        row = np.zeros(259, np.float32)
        region = seen.index(ord(">")) - seen.index(ord("<")) - 1
        row[1 if region < 3 else ord("a") + position] = 9.0 - 0.1 * position
        return row

    def ending_before_a_token(path: tuple[int, ...]) -> np.ndarray:
        """Unmasks z, the last token of the region, then a, then an end of text behind it."""
        *seen, position = path
        row = np.zeros(259, np.float32)
        first, stop = seen.index(ord("<")) + 1, seen.index(ord(">"))
        is_last = position == stop - 1
        row[ord("z") if is_last else (ord("a"), EOS)[min(position - first, 1)]] = (
            9.0 if is_last else 8.0 - 0.1 * position
        )
        return row

    for name, script, masks, expected, steps_in_all in (
        ("keeps tokens behind its end", ending_before_a_token, 5, b"<az>x", ""),
        ("shrinks", ending, 6, b"<ab>x", ""),
        ("shrinks to the needed length", ending, 2, b"<ab>x", ""),
        ("grows", growing, 1, b"<cde>x", ""),
        ("grows, two masks per pass", growing, 1, b"<cdef>x", ",steps=1"),
    ):
        prompt = [ord("p"), ord("<"), *[MASK] * masks, ord(">"), ord("x")]
        with bidirectional(script) as llm:
            decoder = f"dream-coder:expand=1{steps_in_all}"
            tokens = llm.generate(prompt, decoder=decoder, max_tokens=12).tokens
        yield Check(f"a region {name}", [ord("<"), *tokens] == list(expected), f"{tokens}")
    prompt = [ord("p"), ord("<"), MASK, ord(">"), ord("x")]
    with bidirectional(growing, expand_token=1) as llm:
        tokens = llm.generate(prompt, decoder="dream-coder", max_tokens=12).tokens
        yield Check("the model's token expands", tokens == list(b"cde>x"), f"{tokens}")
        texts = [
            llm.generate(prompt, decoder=key, max_tokens=8, ignore_eos=True).tokens
            for key in ("dream", "llada")
        ]
        yield Check("and is no text of others", not any(1 in text for text in texts), f"{texts}")


register_losses("dream-coder", "dream-coder:steps=16", accuracy=0.08, passes=0.7, tasks=DETERMINED)
