"""Layer-parallel drafting: follows the paper, equals single requests in batches, and rejects
unsupported requests."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative import easyspec as module
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.library import load_library
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults

PROMPTS = ["the cat sat on the cat", "a", "zq zq zq zq"]
BACKENDS = ["torch", "native"] if load_library() is not None else ["torch"]


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("easyspec")


@pytest.mark.parametrize("defaults", [{"size": 4}, {"group": 2}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "easyspec", **defaults)
    assert_rejected("easyspec")


def test_certificate_rejects_drafts_without_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutCalibration(module._Session):
        exact = property(lambda self: 1 << 30, lambda self, length: None)

    monkeypatch.setattr(module, "_Session", WithoutCalibration)
    assert_rejected("easyspec")


def test_certificate_rejects_attention_on_sequential_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Network, "parallel_layers", lambda self, size: self.layer)
    assert_rejected("easyspec")


def test_certificate_rejects_trees_of_which_approximate_keys_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retain = GrowingTree.retain

    def retaining(self: GrowingTree, tokens: Any) -> None:
        self.variant = None
        retain(self, tokens)

    monkeypatch.setattr(GrowingTree, "retain", retaining)
    assert_rejected("easyspec")


def test_certificate_rejects_trees_of_exact_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module.LayerParallelTreeDrafter,
        "new_tree",
        lambda self, sequence: GrowingTree(sequence, self.runner, self.noise),
    )
    assert_rejected("easyspec")


@pytest.mark.one_in(3)  # an odd number: both backends
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decoder", ["easyspec", "easyspec:width=3,size=3"])
def test_batch_equals_single_requests(backend: str, decoder: str) -> None:
    """One sequence drafts while another is prefilled: rows of both kinds share passes."""
    if backend == "torch":
        pytest.importorskip("torch")
    models = [tiny_model(layers=5, seed=seed, backend=backend) for seed in (3, 3)]
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    with LLM(models[0], tokenizer=ByteTokenizer(), draft=models[1], cache_positions=512) as llm:
        alone = [llm.generate(p, decoder=decoder, **options).tokens for p in PROMPTS]
        plain = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        batch = llm.generate(PROMPTS, decoder=decoder, **options)
        llm.engine.check_integrity()
    assert [answer.tokens for answer in batch] == alone == plain


def test_unsupported_requests_are_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="group is 1; allowed are 2 to 1024"):
        LLM(ScriptedModel(), tokenizer=ByteTokenizer()).decoder("easyspec:group=1")
    with (
        LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm,
        pytest.raises(UnsupportedCombinationError, match="needs a draft model"),
    ):
        llm.generate("a", decoder="easyspec")
