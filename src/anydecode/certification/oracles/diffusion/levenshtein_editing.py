"""Oracle test of levenshtein-editing (LLaDA2.2): which masks and tokens each step changes, what it
removes and inserts, when a block ends, the cache of finished blocks; and passes on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import PROMPT, Logits, bidirectional, dense, passes_ratio
from anydecode.certification.denoising import softmax as probabilities
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.decoders.diffusion.caches import NoCache
from anydecode.decoders.diffusion.levenshtein_editing import levenshtein_editing
from anydecode.models.scripted import MASK, normal_row
from anydecode.sampling.noise import Noise

#: The control tokens of the scripts.
DELETE, SPLIT = 40, 41
#: The canvas behind the prompt after each step, -1 for masks.
History = list[list[int]]


def controlled(script: Logits, share: float = 0.3) -> Logits:
    """These logits, but control tokens are likely at some positions of some canvases: in about
    `share` of them each."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = script(path).copy()
        coin = normal_row((7, path.count(MASK), sum(path[:-1]) % 7, path[-1]))[:2]
        for token, number in zip((DELETE, SPLIT), coin, strict=True):
            if number > 1.2 - share:
                row[token] = row.max() + 1 + number
        return row

    return logits


def edited(
    script: Logits,
    length: int,
    block: int,
    *,
    delete: int | None = DELETE,
    split: int | None = SPLIT,
    threshold: float = 0.5,
    edit: float = 0.0,
    steps: int = 32,
    max_post_steps: int = 16,
    max_steps: int = 1000,
    prompt: Seq[int] = PROMPT,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[History, dict[str, int]]:
    """A naive implementation over lists of cells: the canvas after each step, and how often a step
    removed, inserted, dropped, replaced, avoided a block and spent its budget."""
    first, total = len(prompt), -(-(len(prompt) + length) // block) * block
    text: list[int] = [*prompt, *[MASK] * (total - first)]
    history: History = []
    counts = dict.fromkeys(("deleted", "inserted", "dropped", "edited", "escapes", "spent"), 0)
    for start in range(first // block * block, total, block):
        low, high = max(start, first), start + block
        #: What a cell holds, and whether it is one of the first masks.
        cells: list[tuple[int, bool]] = [(token, True) for token in text[low:high]]
        num_first, post, past = len(cells), 0, []
        for step in range(max_steps):
            path = (*text[:high],)
            old = [token for token, _ in cells]
            masked = [k for k, token in enumerate(old) if token == MASK]
            newer = [k for k in masked if not cells[k][1]]
            post = 0 if len(newer) < len(masked) else post + 1
            rows, best, sure = [], [], []
            for k in range(len(cells)):
                row = script((*path, low + k)).astype(np.float64)
                row[MASK] = -np.inf
                row /= temperature or 1.0
                if temperature:
                    row += Noise(seed).gumbel(range(len(row)), low + k, len(history))
                rows.append(row)
                best.append(int(row.argmax()))
                p = probabilities(script((*path, low + k)) / np.float32(temperature or 1.0))
                sure.append(float(p[best[k]]))
            last = step == max_steps - 1 or (max_post_steps > 0 and post >= max_post_steps)
            if last or step >= steps:
                filled = masked
            else:
                need = num_first // steps + (step < num_first % steps) + len(newer)
                filled = [k for k in masked if sure[k] > threshold]
                if len(filled) < need:
                    filled = sorted(masked, key=lambda k: (-sure[k], k))[:need]  # noqa: B023
            if max_post_steps == 0 and all(k in filled or k in newer for k in masked):
                last, filled = True, masked
            replaced = [
                k for k in range(len(cells)) if old[k] not in (MASK, best[k]) and sure[k] > edit
            ]
            new = list(old)
            for k in (*filled, *replaced):
                new[k] = best[k]
                if last and new[k] in (delete, split):
                    row = rows[k].copy()
                    row[[token for token in (delete, split) if token is not None]] = -np.inf
                    new[k] = int(row.argmax())
            differing = [k for k in range(len(cells)) if new[k] != old[k]]
            if differing and not last:
                k = min(differing, key=lambda k: (sure[k], k))  # noqa: B023
                row = rows[k].copy()
                for _ in range(5):
                    if new not in past:
                        break
                    counts["escapes"] += 1
                    row[new[k]] = -np.inf
                    new[k] = int(row.argmax())
            past.append(list(new))
            result: list[tuple[int, bool]] = []
            for token, (before, is_first) in zip(new, cells, strict=True):
                if token == delete:
                    counts["deleted"] += 1
                elif token == split:
                    counts["inserted"] += 1
                    result += [(MASK, False), (before, is_first)]
                else:
                    result.append((token, is_first))
            counts["dropped"] += max(0, len(result) - len(cells))
            counts["edited"] += len(replaced)
            cells = (result + [(MASK, False)] * len(cells))[: len(cells)]
            text[low:high] = [token for token, _ in cells]
            history.append([-1 if token == MASK else token for token in text[first:]])
            if last or not (masked or differing):
                counts["spent"] += last
                break
        if high >= first + length:
            break
    return [canvas[:length] for canvas in history], counts


def canvases(decoder: str, script: Logits, length: int, block: int, **options: Any) -> History:
    """The same of the engine; `edit_tokens` are those of the model."""
    prompt, tokens = list(options.pop("prompt", PROMPT)), options.pop("edit_tokens", None)
    options = {"ignore_eos": True, "max_tokens": length, "trace": True, **options}
    with bidirectional(script, block_size=block, edit_tokens=tokens) as llm:
        answer = llm.generate(prompt, decoder=decoder, **options)
    history = [record["canvas"][:length] for record in answer.trace or ()]
    assert history[-1] == answer.tokens, "the last canvas is the answer"
    return history


@oracle_test("levenshtein-editing")
def levenshtein_editing_test() -> Iterator[Check]:
    """Every parameter, blocks that the prompt begins, sampling, and the defaults on long blocks."""
    controls = f"levenshtein-editing:delete={DELETE},split={SPLIT}"
    script = controlled(drifting(6.0))
    counts = dict.fromkeys(("deleted", "inserted", "dropped", "edited", "escapes", "spent"), 0)
    parameters: list[dict[str, Any]] = [
        {},
        {"threshold": 0.7, "edit": 0.5},
        {"threshold": 0.9, "steps": 3},
        {"threshold": 1.0, "steps": 9},
        {"max_post_steps": 3},
        {"max_post_steps": 0},
        {"max_steps": 5},
        {"max_steps": 3, "threshold": 1.0},
    ]
    for given in parameters:
        for prompt in (PROMPT, tuple(range(30, 36))):
            for temperature in (0.0, 0.8):
                options: dict[str, Any] = {"prompt": prompt, "temperature": temperature, "seed": 3}
                decoder = ",".join([controls, *(f"{key}={x}" for key, x in given.items())])
                expected, found = edited(script, 20, 6, **given, **options)
                actual = canvases(decoder, script, 20, 6, **options)
                name = f"{decoder}, {len(prompt)} tokens of prompt, T={temperature}"
                yield Check(f"{name}: equal to the oracle", actual == expected)
                counts = {key: counts[key] + found[key] for key in counts}
    for key, count in counts.items():
        yield Check(f"steps {key}: some", count > 5, f"{count}")
    for delete, split in ((DELETE, None), (None, SPLIT)):
        expected, _ = edited(script, 20, 6, delete=delete, split=split)
        decoder = f"delete={delete}" if split is None else f"split={split}"
        actual = canvases(f"levenshtein-editing:{decoder}", script, 20, 6)
        yield Check(f"{decoder} alone equals the oracle", actual == expected)
    sure = drifting(400.0)  # every probability is 1
    strict: list[dict[str, Any]] = [{"threshold": 1.0, "steps": 4}, {"edit": 1.0}]
    for given in strict:
        expected, _ = edited(sure, 20, 6, **given)
        decoder = ",".join([controls, *(f"{key}={x}" for key, x in given.items())])
        actual = canvases(decoder, sure, 20, 6)
        yield Check(f"{decoder}: not above a confidence of 1", actual == expected)
    flicker = controlled(dense(spread=9.0), 0.1)  # everything changes with every token
    expected, found = edited(flicker, 12, 6)
    actual = canvases(controls, flicker, 12, 6)
    yield Check("a block that never settles ends", actual == expected and found["spent"] > 0)
    expected, _ = edited(script, 20, 6)
    actual = canvases("levenshtein-editing", script, 20, 6, edit_tokens=(DELETE, SPLIT))
    yield Check("the control tokens of a model are the defaults", actual == expected)
    for spread in (9.0, 4.0):
        for default in (drifting(spread), flicker):
            expected, _ = edited(default, 70, 32, delete=None, split=None)
            actual = canvases("levenshtein-editing", default, 70, 32)
            yield Check("the default parameters are the published ones", actual == expected)


@measure(
    "levenshtein-editing",
    "tokens that differ from full passes over the same blocks",
    samples=24,
    margin=0,
)
def levenshtein_editing_cache_loss(samples: int) -> float:
    """The cache of finished blocks is exact: sampled, on a transformer with random weights."""
    uncached = levenshtein_editing()
    uncached.cache = NoCache()
    return cache_loss("levenshtein-editing", uncached, samples)


@measure("levenshtein-editing", "passes relative to one token per pass", samples=64, margin=0.9)
def levenshtein_editing_passes(samples: int) -> float:
    """With few edits, on the shipped block-diffusion model, which was not trained to edit."""
    decoder = "levenshtein-editing:edit=0.9"
    return passes_ratio(decoder, samples, stepwise="sdar:remasking=static", model="tiny-blocks")
