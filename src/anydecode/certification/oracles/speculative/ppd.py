"""Oracle test of ppd (arXiv:2405.18628): the trees of all states by an enumeration of their nodes,
and every tree of a generation from the prompt tokens behind the last accepted node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.mask_groups import BLURRED, PROMPTS, TARGET
from anydecode.certification.oracles.speculative.rejection_rules import (
    rejection_checks,
    small_masked_llm,
)
from anydecode.certification.oracles.speculative.state_drafters import shares
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted
from anydecode.models.scripted import MASK

#: Accuracies by distance and rank where none were measured.
ASSUMED = np.array([[base * 0.4**rank for rank in range(4)] for base in (0.45, 0.25, 0.15)])
MEASURED = np.array([[0.5, 0.2, 0.1], [0.35, 0.3, 0.0], [0.3, 0.05, 0.02]])
#: The tokens whose embeddings are the prompt tokens of the test; a target that sees them in another
#: order predicts nothing.
PROMPT_TOKENS = (200, 201, 202)
Ranks = tuple[int, ...]


def prompted(seen: tuple[int, ...]) -> np.ndarray:
    """Logits of a target that knows the prompt tokens, and the mask in place of each."""
    text = [token for token in seen if token < 200]
    rest = seen[len(text) :]
    if not rest:
        return TARGET(seen)
    if rest != PROMPT_TOKENS[: len(rest)] and set(rest) != {MASK}:
        return np.zeros(len(TARGET(seen)), np.float32)
    for _ in rest:
        text.append(int(TARGET(tuple(text)).argmax()))
    row: np.ndarray = BLURRED(tuple(text))
    row[MASK] = 30.0
    return row


def write_prompts(file: Path) -> None:
    """Write the prompt tokens of the test: the scripted model's embeddings of `PROMPT_TOKENS`."""
    embeddings = np.zeros((3, 4), np.float32)
    embeddings[:, 0] = PROMPT_TOKENS
    save_file({"embeddings": embeddings, "accuracies": MEASURED.astype(np.float32)}, file)


@oracle_test("ppd")
def ppd() -> Iterator[Check]:
    """Trees equal the oracle's, with prompt tokens and with masks; the rejection rule is exact."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.safetensors"
        write_prompts(file)
        measured = MEASURED.astype(np.float32).astype(np.float64)
        for key, accuracies, size in (
            ("ppd", ASSUMED, 8),
            ("ppd:size=5", ASSUMED, 5),
            (f"ppd:prompts={file}", measured, 8),
            (f"ppd:size=14,prompts={file}", measured, 14),
        ):
            yield from _trees(key.replace(str(file), "FILE"), key, accuracies, size)
    yield from rejection_checks("ppd", small_masked_llm, kind="point")


def _trees(about: str, key: str, accuracies: np.ndarray, size: int) -> Iterator[Check]:
    has_file = "prompts" in key
    planned = plan(accuracies, size)
    for temperature in (0.0, 0.8):
        with scripted(prompted) as llm:
            found = [rounds(llm, key, prompt, temperature=temperature) for prompt in PROMPTS]
        equal = all(_follows(trace, planned, temperature, has_file) for trace in found)
        yield Check(f"{about}, T={temperature}: trees equal the oracle's", equal)
        count = sum(map(accepted, found))
        yield Check(f"{about}, T={temperature}: drafts are accepted", count > 10, str(count))
        paths, prompts = planned[0]
    paths, prompts = planned[0]
    with scripted(prompted) as llm:
        stats = llm.generate(PROMPTS[0], decoder=key, max_tokens=1, ignore_eos=True).stats
    expected = len(llm.encode(PROMPTS[0])) + sum(prompts)
    yield Check(f"{about}: the first pass has prompt tokens", stats.rows == expected and not paths)


def plan(accuracies: np.ndarray, size: int) -> list[tuple[list[Ranks], list[int]]]:
    """Candidates and numbers of prompt tokens of each state, by trying all numbers of candidates:
    from the most prompt tokens everywhere, the one whose loss is the least is taken away."""
    distances, ranks = accuracies.shape
    values = {
        path: float(np.prod([accuracies[i, rank] for i, rank in enumerate(path)]))
        for length in range(1, distances + 1)
        for path in product(range(ranks), repeat=length)
    }
    best: list[tuple[list[Ranks], list[int]]] = []
    most = -1.0
    for count in range(size + 1):
        trees, gains = [], []
        for state in range(distances + 1):
            usable = [path for path, value in values.items() if len(path) <= state and value > 0]
            usable.sort(key=lambda path: (-values[path], len(path), path))
            trees.append(usable[:count])
            gains.append(sum(values[path] for path in trees[-1]))
        placed, moves = [], np.zeros((distances + 1, distances + 1))
        for state, tree in enumerate(trees):
            stops = []
            for path in [(), *tree]:
                below = sum(values[one] for one in tree if one[:-1] == path)
                stops.append((values[path] if path else 1.0) - below)
            prompts = [distances] * len(stops)
            while sum(prompts) > size - len(tree):
                losses = [
                    stop * (gains[number] - gains[number - 1]) if number else np.inf
                    for stop, number in zip(stops, prompts, strict=True)
                ]
                prompts[len(losses) - 1 - int(np.argmin(losses[::-1]))] -= 1
            placed.append((tree, prompts))
            for number, stop in zip(prompts, stops, strict=True):
                moves[state, number] += stop
        average = np.linalg.matrix_power((moves + np.eye(distances + 1)) / 2, 4096)[-1]
        tokens = float(average @ (1 + np.array(gains)) / average.sum())
        if tokens > most + 1e-8:
            best, most = placed, tokens
    return best


def _follows(
    trace: list[TracedRound],
    planned: list[tuple[list[Ranks], list[int]]],
    temperature: float,
    has_file: bool,
) -> bool:
    """Whether every tree has the candidates of its state and, if they are tokens, its masks."""
    prompts, prefix = 0, list[int]()
    for one in trace:
        marks = PROMPT_TOKENS if has_file else (MASK,) * 3
        slots = []
        for number in range(prompts):
            row = prompted((*prefix, *marks[: number + 1])).copy()
            row[MASK] = -np.inf
            slots.append([t for t, _ in shares(row, temperature, len(one.text) + number)])
        tree, numbers = planned[prompts]
        paths = [tuple(slots[i][rank] for i, rank in enumerate(path)) for path in tree]
        behind = dict(zip([(), *paths], numbers, strict=True))
        masks = [
            (*path, *[MASK] * (number + 1))
            for path, count in behind.items()
            for number in range(0 if has_file else count)
        ]
        if sorted(one.paths) != sorted([*paths, *masks]):
            return False
        last = tuple(one.generated[:-1])
        prompts, prefix = behind[last], [*one.text, *last]
    return len(trace) > 5
