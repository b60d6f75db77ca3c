"""PPD: its certificate, mistakes that the certificate rejects, its files, and exactness in company,
with a small cache, in chunks, in number formats, under guidance and constraints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import ppd as oracle
from anydecode.certification.oracles.speculative.auto import FixedCosts
from anydecode.certification.rounds import rounds, scripted
from anydecode.decoders.speculative import ppd
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import CONDITIONS, NUMBERS, PROMPTS, generate, num_accepted
from masked_models import tiny_masked_llm

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("ppd")


def test_certificate_rejects_another_default(monkeypatch: Patch) -> None:
    replace_defaults(monkeypatch, "ppd", size=9)
    assert_rejected("ppd")


@pytest.mark.parametrize("other", ["space", "token-recycling"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    replace_method(monkeypatch, "ppd", other)
    assert_rejected("ppd")


def test_certificate_rejects_prompt_tokens_in_reversed_order(monkeypatch: Patch) -> None:
    own = ppd.PromptDrafter.add_mask

    def add_mask(self: Any, sequence: Any, tree: Any, parent: int, number: int) -> int:
        return own(self, sequence, tree, parent, 2 - number)

    monkeypatch.setattr(ppd.PromptDrafter, "add_mask", add_mask)
    assert_rejected("ppd")


def test_certificate_rejects_prompt_tokens_behind_accepted_nodes_only(monkeypatch: Patch) -> None:
    """Where each of them is worth the most, without regard to how likely the node is."""

    def place(ends: Sequence[float], gains: Sequence[float], size: int) -> list[int]:
        full = len(gains) - 1
        return [min(full, max(0, size - full * node)) for node in range(len(ends))]

    monkeypatch.setattr(ppd, "_place", place)
    ppd.plan.cache_clear()
    try:
        assert_rejected("ppd")
    finally:
        ppd.plan.cache_clear()


def test_certificate_rejects_nodes_by_the_value_of_their_own_rank(monkeypatch: Patch) -> None:
    """Instead of the product along the path."""
    own = ppd.best_paths

    def paths(accuracies: Any, depth: int, count: int) -> dict[Any, float]:
        found = own(accuracies, depth, 200)
        values = {path: accuracies[len(path) - 1][path[-1]] for path in found}
        best = sorted(found, key=lambda path: (len(path), -values[path]))[:count]
        return {path: found[path] for path in best}

    monkeypatch.setattr(ppd, "best_paths", paths)
    ppd.plan.cache_clear()
    try:
        assert_rejected("ppd")
    finally:
        ppd.plan.cache_clear()


def test_certificate_rejects_one_tree_for_all_states(monkeypatch: Patch) -> None:
    own = ppd.PromptDrafter.draft

    def draft(self: Any, sequence: Any, masks: Any, size: int) -> Any:
        return own(self, sequence, masks if len(masks) == 3 else [], size)

    monkeypatch.setattr(ppd.PromptDrafter, "draft", draft)
    assert_rejected("ppd")


def test_samples_compared_as_drawn_are_noticed(monkeypatch: Patch) -> None:
    """Candidates are chosen: a rule that takes them for samples of the masks is biased."""
    own = ppd.PromptDrafter.draft

    def draft(self: Any, sequence: Any, masks: Any, size: int) -> Any:
        tree, counts = own(self, sequence, masks, size)
        if len(tree):
            even = np.exp(masks[0].logits - masks[0].logits.max())
            tree.kind, tree.probabilities = "wor", {-1: even / even.sum()}
        return tree, counts

    monkeypatch.setattr(ppd.PromptDrafter, "draft", draft)
    failed = [one.name for one in oracle.ppd() if not one.passed]
    assert "ppd: with the rejection rule samples follow the target" in failed


def test_nodes_without_a_token_are_no_children_and_not_traced() -> None:
    tree = TokenTree.chain([5])
    tree.embeddings[tree.add(-1, 0)] = np.ones(4, np.float32)
    assert not tree.children(0) and tree.child(0, -1) is None and tree.path(1) == [0, 1]
    assert tree.first(1).tokens == [5] and not tree.first(1).embeddings


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompt tokens for `tiny_masked_llm`."""
    file = tmp_path / "prompts.safetensors"
    embeddings = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    embeddings[:, 0] = 2.0
    save_file({"embeddings": embeddings, "accuracies": np.full((3, 4), 0.2, np.float32)}, file)
    return file


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(
    options: dict[str, Any], temperature: float, prompts: Path
) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    with tiny_masked_llm(**options) as llm:
        plain = generate(llm, PROMPTS, "autoregressive", temperature=temperature)
        key = f"ppd:size=12,prompts={prompts}"
        alone = [generate(llm, one, key, temperature=temperature) for one in PROMPTS]
        together = generate(llm, PROMPTS, key, temperature=temperature)
        masks = generate(llm, PROMPTS, "ppd", temperature=temperature)
        llm.engine.check_integrity()
    expected = [one.tokens for one in plain]
    for texts in (alone, together, masks):
        assert [one.tokens for one in texts] == expected
        assert num_accepted(texts) > 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2, "repetition_penalty": 1.2},
        {"constraint": NUMBERS, "ignore_eos": False},
        {"constraint": Regex("[ae]{20}"), "ignore_eos": False},
        {"negative_prompt": "zz", "guidance_scale": 1.5},
    ],
    ids=["plain", "penalties", "schema", "regex", "guidance"],
)
def test_the_text_is_exact_with_options(
    options: dict[str, Any], temperature: float, prompts: Path
) -> None:
    with tiny_masked_llm(cache="int8") as llm:
        plain, drafted = (
            generate(llm, PROMPTS[2:], key, temperature=temperature, **options)
            for key in ("autoregressive", f"ppd:prompts={prompts}")
        )
        llm.engine.check_integrity()
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert [one.logprobs for one in drafted] == [one.logprobs for one in plain]


def test_the_size_follows_from_the_costs_of_passes() -> None:
    """Free rows: the largest tree; expensive ones: the smallest."""
    for row_cost, expected in ((0.0, ppd.MAX_SIZE), (5.0, 1)):
        with scripted(oracle.prompted) as llm:
            llm.cost_model = FixedCosts(lambda rows, _, c=row_cost: 1 + c * (rows - 1))
            trace = rounds(llm, "ppd:size=0", oracle.PROMPTS[0], 12)
        assert {len(one.tokens) for one in trace[2:]} == {expected}


@pytest.mark.parametrize(("num_others", "expected"), [(0, 7), (5, 3), (20, 1)])
def test_rows_of_a_tree_delay_the_other_sequences_too(num_others: int, expected: int) -> None:
    """The size with the most expected tokens of all sequences per time, each row of which costs a
    fiftieth of the first."""
    with scripted(oracle.prompted) as llm:
        llm.cost_model = FixedCosts(lambda rows, _: 1 + 0.02 * (rows - 1), num_others)
        trace = rounds(llm, "ppd:size=0", oracle.PROMPTS[0], 12)
    assert {len(one.tokens) for one in trace[2:]} == {expected}


def _tensors(width: int = 4, **changed: Any) -> dict[str, np.ndarray]:
    tensors = {
        "embeddings": np.zeros((3, width), np.float32),
        "accuracies": np.full((3, 2), 0.2, np.float32),
    }
    return {**tensors, **changed}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "there is no such file"),
        ({"embeddings": np.zeros((3, 4), np.float32)}, "has no tensor accuracies"),
        (_tensors(accuracies=np.zeros((2, 2), np.float32)), "allowed are"),
        (_tensors(accuracies=np.full((3, 2), 0.6, np.float32)), "not shares"),
        (_tensors(embeddings=np.full((3, 4), np.nan, np.float32)), "not finite"),
        (_tensors(width=5), "a hidden size of 4"),
    ],
    ids=["missing", "incomplete", "shapes", "shares", "infinite", "width"],
)
def test_malformed_files_are_refused_in_one_line(
    tensors: dict[str, np.ndarray] | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.safetensors"
    if tensors is not None:
        save_file(tensors, file)
    with (
        LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm,
        pytest.raises(AnydecodeError, match=message) as refusal,
    ):
        llm.generate("abc", decoder=f"ppd:prompts={file}")
    assert "\n" not in str(refusal.value)


def test_models_without_a_mask_token_need_a_file(tmp_path: Path) -> None:
    tokenizer, file = ByteTokenizer(), tmp_path / "prompts.safetensors"
    tokenizer.mask_id = None
    save_file(_tensors(), file)
    with LLM(ScriptedModel(), tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="no mask token"):
            llm.generate("abc", decoder="ppd")
        plain, drafted = (
            llm.generate("abc", decoder=key, max_tokens=9).tokens
            for key in ("autoregressive", f"ppd:prompts={file}")
        )
    assert drafted == plain
