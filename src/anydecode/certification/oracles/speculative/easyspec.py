"""Oracle test of easyspec (EasySpec, arXiv:2502.02493): the drafts of a forward pass in which
groups of layers read the same input."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.rounds import TracedRound, rounds
from anydecode.certification.tiny import tiny_model, tiny_network
from anydecode.kernels.library import load_library
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer

#: The tokens of a node and those before it.
Path = tuple[int, ...]

LAYERS = 7
PROMPT = "the cat sat on the cat"


def drafted(network: Network, text: list[int], size: int, group: int) -> list[int]:
    """The expected draft after `text`: exact up to its first token, then with grouped layers."""
    forward = Forward(network)
    for token in text:
        logits = forward.step(token)
    draft = [int(logits.argmax())]
    while len(draft) < size:
        draft.append(int(forward.step(draft[-1], group).argmax()))
    return draft


def drafted_tree(
    network: Network, text: list[int], depth: int, width: int, group: int
) -> set[Path]:
    """The expected paths after `text` at temperature 0: level by level, each of the best `width`
    paths gets its `width` most probable tokens; `depth * width` paths of the largest products of
    probabilities are kept. Each path is computed from the start."""

    def probabilities(path: Path) -> np.ndarray:
        forward = Forward(network)
        for token in text:
            logits = forward.step(token)
        for token in path:
            logits = forward.step(token, group)
        weights: np.ndarray = np.exp(logits - logits.max())
        return weights / weights.sum()

    products: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for _ in range(depth):
        children: list[Path] = []
        for path in level:
            row = probabilities(path)
            for token in np.argsort(-row, kind="stable")[:width].tolist():
                child = (*path, token)
                children.append(child)
                products[child] = products[path] * float(row[token])
        level = sorted(children, key=lambda path: -products[path])[:width]
    del products[()]
    return set(sorted(products, key=lambda path: -products[path])[: depth * width])


def _trees() -> Iterator[Check]:
    """Trees equal the oracle's in every round, and differ from those of an exact draft model and
    from those of larger groups. Passes: one exact one, then one for each further level."""
    oracle, depth, width, group = tiny_network(layers=LAYERS, seed=3), 3, 3, 3
    key = f"easyspec:size={depth},group={group},width={width}"
    for backend in _backends():
        draft = tiny_model(layers=LAYERS, seed=3, backend=backend)
        target = tiny_model(layers=LAYERS, seed=3, backend=backend)
        with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=1024) as llm:
            trace = rounds(llm, key, PROMPT, 16)
            num_passes = llm.engine.runners["draft"].num_passes
            llm.engine.check_integrity()
        wrong, exact, larger = (
            sum(
                {_path(one, node) for node in range(len(one.tokens))}
                != drafted_tree(oracle, one.text, depth, width, groups)
                for one in trace
            )
            for groups in (group, 1, 5)
        )
        detail = f"{wrong} of {len(trace)} differ"
        yield Check(f"{key}: trees equal the oracle's, {backend}", not wrong, detail)
        yield Check(
            f"{key}: an exact draft model and larger groups draft others, {backend}",
            min(exact, larger) > 0,
            f"{exact} and {larger} of {len(trace)}",
        )
        yield Check(
            f"{key}: one pass per level, {backend}",
            num_passes == depth * len(trace),
            f"{num_passes} in {len(trace)} rounds",
        )


def _path(one: TracedRound, node: int) -> Path:
    parent = one.parents[node]
    return (*(() if parent < 0 else _path(one, parent)), one.tokens[node])


def _backends() -> list[str]:
    """The CPU backends that are installed; torch, which can be installed, if there is none."""
    is_available = {"torch": find_spec("torch") is not None, "native": load_library() is not None}
    return [name for name, found in is_available.items() if found] or ["torch"]


def _drafting_for_itself() -> LLM:
    """A target of two layers, which run alone, and itself as the draft model."""
    return LLM(tiny_model(), tokenizer=ByteTokenizer(), draft=tiny_model(), cache_positions=1024)


@oracle_test("easyspec")
def easyspec() -> Iterator[Check]:
    """Drafts, chains and trees, equal the oracle's in every round, which requires that the cache is
    corrected in each; they differ from the drafts of an exact draft model."""
    yield from penalty_checks("easyspec", _drafting_for_itself)
    oracle = tiny_network(layers=LAYERS, seed=3)
    for backend, (key, size, group) in product(
        _backends(), (("easyspec", 5, 4), ("easyspec:size=4,group=2", 4, 2))
    ):
        draft = tiny_model(layers=LAYERS, seed=3, backend=backend)
        target = tiny_model(layers=LAYERS, seed=3, backend=backend)
        with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=1024) as llm:
            trace = rounds(llm, key, PROMPT, 24)
            rows, passes = (
                llm.engine.runners["draft"].num_rows,
                llm.engine.runners["draft"].num_passes,
            )
        wrong = [one.text for one in trace if one.tokens != drafted(oracle, one.text, size, group)]
        detail = f"{len(wrong)} of {len(trace)} differ"
        yield Check(
            f"{key}: drafts equal the oracle's, {backend}", not wrong and len(trace) > 5, detail
        )
        exact = [drafted(oracle, one.text, size, 1) for one in trace]
        yield Check(
            f"{key}: only the first draft is always exact, {backend}",
            all(one.tokens[0] == chain[0] for one, chain in zip(trace, exact, strict=True))
            and any(one.tokens != chain for one, chain in zip(trace, exact, strict=True)),
        )
        num_generated = sum(len(one.generated) for one in trace[:-1])
        expected_rows = len(PROMPT) + num_generated + len(trace) * (size - 1)
        yield Check(
            f"{key}: one exact pass per round over the new tokens, {backend}",
            (rows, passes) == (expected_rows, len(trace) * size),
            f"{rows} rows in {passes} passes; expected {expected_rows} in {len(trace) * size}",
        )
    yield from _trees()
