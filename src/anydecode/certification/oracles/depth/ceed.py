"""Oracle test of CEED: every block's passes recomputed from whole texts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.rounds import TracedRound, plain_token, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "habc")
LENGTH, BLOCK, PASSES = 70, 16, 8


@oracle_test("ceed")
def ceed() -> Iterator[Check]:
    """Blocks of 16 start as random tokens of the prompt, and are taken after eight passes or at a
    fixed point."""
    for temperature in (0.0, 0.8):
        where, starts, numbers, wrong = f"T={temperature}", [], set[int](), 0
        for prompt in PROMPTS:
            with scripted(wordy()) as llm:
                trace = rounds(llm, "ceed", prompt, LENGTH, temperature=temperature)
            blocks = _blocks(trace)
            wrong += sum(not _iterates(one, len(prompt), temperature) for one in blocks)
            starts += [(prompt, one[0].tokens) for one in blocks]
            numbers |= {len(one) - 1 for one in blocks}
        yield Check(f"{where}: each pass is that of the iteration", wrong == 0, f"{wrong} differ")
        yield Check(
            f"{where}: blocks start as tokens of the prompt",
            all(set(tokens) <= set(prompt.encode()) for prompt, tokens in starts),
        )
        full = [(prompt, tuple(tokens)) for prompt, tokens in starts if len(tokens) > 8]
        yield Check(
            f"{where}: they start as different tokens",
            all(len(set(tokens)) > 1 for _, tokens in full) and len(set(full)) == len(full),
        )
        yield Check(
            f"{where}: they do not start as a piece of the prompt, repeated",
            not any(bytes(tokens) in prompt.encode() * BLOCK for prompt, tokens in full),
        )
        yield Check(f"{where}: some blocks settle, some do not", len(numbers) > 1, f"{numbers}")
        with scripted(wordy()) as llm:
            plain, found = (
                llm.generate(
                    PROMPTS[0], decoder=one, max_tokens=LENGTH, temperature=temperature, seed=5
                )
                for one in ("autoregressive", f"ceed:passes={BLOCK}")
            )
        yield Check(f"{where}: 16 passes give plain decoding's text", plain.tokens == found.tokens)


def _blocks(trace: list[TracedRound]) -> list[list[TracedRound]]:
    """The rounds of each block: its passes, then what was taken."""
    blocks: list[list[TracedRound]] = [[]]
    for one in trace:
        blocks[-1].append(one)
        if one.generated:
            blocks.append([])
    return blocks[:-1]


def _iterates(block: list[TracedRound], num_prompt: int, temperature: float) -> bool:
    """Whether the passes of a block, and what was taken, are those of the iteration."""
    *passes, taken = block
    text, logits = taken.text, wordy()
    size = min(BLOCK, num_prompt + LENGTH - len(text))
    tokens = passes[0].tokens
    for number, one in enumerate(passes, 1):
        if one.tokens != tokens[: size - 1]:
            return False
        fed = one.tokens
        tokens = [
            plain_token(np.asarray(logits((*text, *fed[:i]))), len(text) + i, temperature)
            for i in range(size)
        ]
        is_last = number == PASSES or tokens[:-1] == fed
        if is_last != (number == len(passes)):
            return False
    return taken.generated == tokens


@measure("ceed", "share of tokens that are not the most probable", samples=12, margin=0.5)
def ceed_loss(samples: int) -> float:
    """Behind the text before them, on pseudo-random logits."""
    num_tokens = num_wrong = 0
    logits = wordy()
    with scripted(wordy()) as llm:
        for number in range(samples):
            text = [97 + (7 * number + 5 * i) % 12 for i in range(6)]
            tokens = llm.generate(text, decoder="ceed", max_tokens=64, ignore_eos=True).tokens
            for token in tokens:
                num_wrong += token != int(logits(tuple(text)).argmax())
                text.append(token)
            num_tokens += len(tokens)
    return num_wrong / num_tokens
