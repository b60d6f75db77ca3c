"""Oracle tests of the region that a pass may fill (blocks, windows, regions that grow), against the
published rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    StepState,
    bidirectional,
    dense,
    ending,
    entropy_nats,
    naive,
    softmax,
    steps,
)
from anydecode.models.scripted import EOS, MASK


@oracle_test("adablock")
def adablock() -> Iterator[Check]:
    """A block ends at the most confident delimiter if it is confident enough, else after a fixed
    number."""
    inner = dense(seed=9, spread=9.0)

    def script(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = inner(path).copy()
        if path[-1] % 5 == 3:
            row[ord("\n")] = 27.0
        return row

    def oracle(threshold: float) -> tuple[list[int], list[list[int]], list[int]]:
        canvas, filled, ends = [*PROMPT, *[MASK] * 24], [], []
        start = len(PROMPT)
        while start < len(canvas):
            stop = 0
            while not stop or any(canvas[i] == MASK for i in range(start, stop)):
                probabilities = {
                    i: softmax(script((*canvas, i)))
                    for i in range(start, len(canvas))
                    if canvas[i] == MASK
                }
                if not stop:
                    window = range(start, min(start + 6, len(canvas)))
                    delimiters = [i for i in window if probabilities[i].argmax() == ord("\n")]
                    best = max(delimiters, key=lambda i: probabilities[i].max(), default=-1)
                    is_confident = best >= 0 and probabilities[best].max() >= threshold
                    stop = best + 1 if is_confident else min(start + 4, len(canvas))
                    ends.append(stop)
                block = {i: p for i, p in probabilities.items() if i < stop}
                chosen = [i for i, p in block.items() if p.max() >= 0.8]
                chosen = chosen or [max(block, key=lambda i: block[i].max())]
                for i in chosen:
                    canvas[i] = int(probabilities[i].argmax())
                filled.append(chosen)
            start = next((i for i, t in enumerate(canvas) if t == MASK), len(canvas))
        return canvas[len(PROMPT) :], filled, ends

    with bidirectional(script) as llm:
        for threshold in (0.2, 0.6, 1.1):
            decoder = catalogue.build(
                "adablock", block=4, threshold=0.8, delimiter_threshold=threshold
            )
            text, filled, ends = oracle(threshold)
            yield Check(f"blocks end at {ends}", steps(llm, decoder, 24) == (text, filled))
    fixed = oracle(1.1)[2]
    yield Check("delimiters move the block ends", oracle(0.2)[2] != fixed)


@oracle_test("eoser-ass")
def eoser_ass() -> Iterator[Check]:
    """Doubling step sizes, peeled blocks, and factors on end-of-text tokens."""
    with bidirectional(dense()) as llm:
        for length, blocks, expected in (
            (16, 1, [1, 2, 4, 9]),
            (24, 1, [1, 2, 4, 17]),
            (32, 3, [1, 2, 4, 8, 17]),
            (1, 1, [1]),
        ):
            decoder = f"eoser-ass:blocks={blocks}"
            filled = steps(llm, decoder, length)[1]
            yield Check(f"{length} masks in {expected}", [len(one) for one in filled] == expected)
        filled = steps(llm, "eoser-ass:blocks=3", 32)[1]
        starts = [min(one) - len(PROMPT) for one in filled[-2:]]
        yield Check("the peeled blocks are at the end", starts == [7, 15])
    script = ending()

    def rule(state: StepState) -> list[int]:
        step = state.block_step
        factor = 0.1 + 0.9 * min(1.0, (2 ** (step + 1) - 1) / 2**4)
        order = state.order(lambda p: float(p.max()) * (factor if p.argmax() == EOS else 1.0))
        return order[: 2**step] if step < 3 else order

    with bidirectional(script) as llm:
        actual = steps(llm, "eoser-ass:min_factor=0.1", 16, ignore_eos=False)
    order = naive(script, 16, 16, rule)[1]
    yield Check("end-of-text tokens are delayed", actual[1] == order[: len(actual[1])])


@oracle_test("wedlm")
def wedlm() -> Iterator[Check]:
    """Committed text, then the window's filled tokens, then its masks; distance-adjusted
    entropy."""
    from anydecode.api.llm import LLM
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    inner = dense(spread=6.0)

    def oracle(entropy: float) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * 20], []
        while MASK in canvas:
            first = canvas.index(MASK)
            positions = range(first, min(first + 6, len(canvas)))
            filled_before = [i for i in positions if canvas[i] != MASK]
            masks = [i for i in positions if canvas[i] == MASK]
            probabilities = {}
            for number, i in enumerate(masks, 1):
                seen = [*canvas[:first], *[canvas[w] for w in filled_before], *[MASK] * number]
                probabilities[i] = softmax(np.roll(inner(tuple(seen)), i - len(seen) + 1))
            cost = {i: entropy_nats(p) + 0.02 * (i - first) for i, p in probabilities.items()}
            chosen = [i for i in masks if cost[i] < entropy] or [min(masks, key=lambda i: cost[i])]
            for i in chosen:
                canvas[i] = int(probabilities[i].argmax())
            filled.append(chosen)
        return canvas[len(PROMPT) :], filled

    model = ScriptedModel(inner, vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        for entropy in (0.1, 0.8, 2.0):
            expected = oracle(entropy)
            actual = steps(llm, f"wedlm:window=6,entropy={entropy}", 20)
            yield Check(
                f"entropy below {entropy} nats, {len(expected[1])} passes", actual == expected
            )


@oracle_test("window-diffusion")
def window_diffusion() -> Iterator[Check]:
    """Rows attend to the window and nothing after it; refreshes come in cycles; rows are
    counted."""

    def oracle(window: int, active: int, cycle: int) -> tuple[list[int], list[list[int]], int]:
        canvas, filled, rows = [*PROMPT, *[MASK] * 24], [], 0
        filled_at: dict[int, int] = {}
        since = end = -1
        step = 0
        while MASK in canvas:
            masks = [i for i, token in enumerate(canvas) if token == MASK]
            stop = masks[:active][-1] + 1
            if since < 0 or step >= since + cycle or stop > end:
                since, end = step, masks[:window][-1] + 1
                rows += end
            else:
                fresh = {i for i, at in filled_at.items() if at >= since}
                rows += len(fresh | set(range(masks[0], stop)))
            probabilities = {i: softmax(CONFIDENT((*canvas[:end], i))) for i in masks[:active]}
            chosen = [i for i, p in probabilities.items() if p.max() >= 0.8]
            chosen = chosen or [max(probabilities, key=lambda i: probabilities[i].max())]
            for i in chosen:
                canvas[i], filled_at[i] = int(probabilities[i].argmax()), step
            filled.append(chosen)
            step += 1
        return canvas[len(PROMPT) :], filled, rows

    with bidirectional(CONFIDENT) as llm:
        for window, active, cycle in ((12, 4, 3), (8, 8, 100), (24, 2, 5)):
            text, filled, rows = oracle(window, active, cycle)
            decoder = catalogue.build(
                "window-diffusion", window=window, active=active, cycle=cycle, threshold=0.8
            )
            answer = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True, trace=True
            )
            positions = [sorted(record["filled"]) for record in answer.trace or ()]
            name = f"window {window}, active {active}, cycle {cycle}"
            yield Check(f"{name}: text and positions", (answer.tokens, positions) == (text, filled))
            computed = (answer.trace or [])[-1]["meter"]["rows"]
            yield Check(f"{name}: {rows} rows", computed == rows, f"{computed}")


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

    for name, script, masks, expected, steps_in_all in (
        ("shrinks", ending, 6, b"<ab>x", ""),
        ("shrinks to the needed length", ending, 2, b"<ab>x", ""),
        ("grows", growing, 1, b"<cde>x", ""),
        ("grows, two masks per pass", growing, 1, b"<cdef>x", ",steps=1"),
    ):
        prompt = [ord("p"), ord("<"), *[MASK] * masks, ord(">"), ord("x")]
        with bidirectional(script) as llm:
            decoder = f"dream-coder:expand=1{steps_in_all}"
            tokens = llm.generate(prompt, decoder=decoder, max_tokens=12).tokens
        yield Check(f"a region {name}", bytes([ord("<"), *tokens]) == expected, f"{tokens}")


@measure("wedlm", "tokens that change when the cache is recomputed", samples=64, margin=0.0)
def wedlm_loss(samples: int) -> float:
    """With a restart before one pass in four: the cache is exact."""
    cached, recomputed = (
        _causal_steps("wedlm:entropy=2", samples, restarts=r)[0] for r in (False, True)
    )
    return sum(a != b for a, b in zip(cached, recomputed, strict=True)) / samples


@measure("wedlm", "passes per token of a confident model", samples=64, margin=0.2)
def wedlm_passes(samples: int) -> float:
    """With a window of 16 positions per pass."""
    return len(_causal_steps("wedlm", samples, spread=60.0)[1]) / samples


def _causal_steps(
    decoder: str, count: int, *, spread: float = 6.0, restarts: bool = False
) -> tuple[list[int], list[list[int]]]:
    from anydecode.api.llm import LLM
    from anydecode.certification.checks import _Restarts
    from anydecode.models.scripted import ByteTokenizer, ScriptedModel

    model = ScriptedModel(dense(spread=spread), vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        if not restarts:
            return steps(llm, decoder, count)
        with _Restarts(llm.engine, seed=4):
            return steps(llm, decoder, count)
