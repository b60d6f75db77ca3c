"""Oracle test of easyspec (EasySpec, arXiv:2502.02493): the drafts of a forward pass in which
groups of layers read the same input."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.rounds import rounds
from anydecode.certification.tiny import tiny_model, tiny_network
from anydecode.kernels.library import load_library
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer

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


def _backends() -> list[str]:
    """The CPU backends that are installed; torch, which can be installed, if there is none."""
    is_available = {"torch": find_spec("torch") is not None, "native": load_library() is not None}
    return [name for name, found in is_available.items() if found] or ["torch"]


@oracle_test("easyspec")
def easyspec() -> Iterator[Check]:
    """Drafts equal the oracle's in every round, which requires that the cache is corrected in each;
    they differ from the drafts of an exact draft model."""
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
