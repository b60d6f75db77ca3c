"""Methods with a draft model: oracle tests, equality with plain decoding, and rejected requests."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.rounds import blurred, scripted, wordy
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative.draft_model import truncate_to_prefix
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.self_drafts import open_draft, select_layers
from anydecode.scoring.tree import ROOT
from certificates import assert_rejected, leave_samplers_unmoved
from tiny_models import hf_model, own_model

KEYS = (
    "speculative-sampling",
    "specdec++",
    "smartspec",
    "bandit",
    "pearl",
    "saguaro",
    "omnidraft",
    "rapid",
    "longspec",
    "s2d",
    "online-sd",
    "eqspec-exspec",
)
TARGET, DRAFT = wordy(), blurred(wordy())


BUILDS = (
    *KEYS, "longspec:window=5,sinks=1", "pearl:pre_verify=false", "rapid:chunk=3,count=1,query=2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "temperature"),
    [
        pytest.param(key, temperature, marks=[pytest.mark.slow] * ((first + second) % 2))
        for first, key in enumerate(BUILDS)
        for second, temperature in enumerate((0.0, 0.8))
    ],
)
def test_tokens_equal_plain_decoding_in_a_batch(key: str, temperature: float) -> None:
    prompts = ["abcabcabd", "the cab had a bad cab", "h"]
    options = {"temperature": temperature, "seed": 4, "max_tokens": 30, "ignore_eos": True}
    options["repetition_penalty"] = 1.2
    with scripted(TARGET, DRAFT) as llm:
        plain = [answer.tokens for answer in llm.generate(prompts, **options)]
        drafted = llm.generate(prompts, decoder=key, **options)
        assert [answer.tokens for answer in drafted] == plain
        llm.engine.check_integrity()


#: The files of loops that draft chains.
DRAFTING_FILES = ("draft_model", "s2d", "rapid", "online_sd", "easyspec")


@pytest.mark.parametrize(
    "key", ["speculative-sampling", "s2d", "rapid", "online-sd", "easyspec", "pearl"]
)
def test_certificates_reject_chains_without_the_penalties_of_earlier_drafts(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The drafter's copy of the sampler is not advanced by its drafts."""
    leave_samplers_unmoved(monkeypatch, DRAFTING_FILES)
    assert_rejected(key)


@pytest.mark.parametrize("key", ["opt-tree", "fixed-tree", "rsd", "saguaro"])
def test_certificates_reject_trees_without_the_penalties_of_earlier_drafts(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def of_the_text(self: GrowingTree, node: int) -> None:
        self._samplers[node] = self._samplers[ROOT]

    monkeypatch.setattr(GrowingTree, "_advance_sampler", of_the_text)
    assert_rejected(key)


def test_rows_are_fitted_to_the_target_vocabulary() -> None:
    with scripted(TARGET, DRAFT) as llm:
        sequence = llm.request("ab").jobs[0].sequence
        wide, narrow = np.arange(300, dtype=np.float32), np.arange(200, dtype=np.float32)
        assert fit_vocab(sequence, wide).tolist() == list(range(259))
        assert fit_vocab(sequence, narrow)[:200].tolist() == list(range(200))
        assert np.isneginf(fit_vocab(sequence, narrow)[200:]).all()


def test_truncate_to_prefix_leaves_one_token_to_score() -> None:
    kv_cache = SequenceCache(KVPool(ScriptedModel(TARGET, vocab_size=259), 16))
    kv_cache.append(4)
    kv_cache.tokens += [1, 2, 3, 4]
    truncate_to_prefix(kv_cache, [1, 2, 9, 9, 9])
    assert kv_cache.length == 2
    truncate_to_prefix(kv_cache, [1, 2])
    assert kv_cache.length == 1


@pytest.mark.parametrize(
    "decoder",
    [
        "pearl:size=0",
        "saguaro:fan=0",
        "saguaro:acceptance=1.5",
        "specdec++:bound=2",
        "specdec++:bound=nan",
        "saguaro:exponent=x",
        "taps:drafters=deer+copyspec",
        "smartspec:drafter=beam",
        "longspec:window=0",
        "rapid:chunk=0",
        "s2d:exits=0.9-0.1",
        "s2d:exits=x",
        "online-sd:rate=0",
    ],
)
def test_invalid_parameters_have_one_line_errors(decoder: str) -> None:
    with scripted(TARGET, DRAFT) as llm, pytest.raises(InvalidRequestError) as refusal:
        llm.generate("abc", decoder=decoder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["pearl", "s2d", "longspec", "omnidraft", "online-sd"])
def test_missing_draft_model_is_rejected(key: str) -> None:
    with scripted(TARGET) as llm, pytest.raises(UnsupportedCombinationError, match="draft model"):
        llm.generate("abc", decoder=key)


class _Reversed(ByteTokenizer):
    def token_bytes(self, token: int) -> bytes:
        return bytes([255 - token]) if token < 256 else b""


def test_different_vocabulary_requires_translation() -> None:
    draft = ScriptedModel(DRAFT, vocab_size=259)
    draft.tokenizer = _Reversed()  # type: ignore[attr-defined]
    target = ScriptedModel(TARGET, vocab_size=259)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=512) as llm:
        with pytest.raises(UnsupportedCombinationError, match="omnidraft"):
            llm.generate("abc", decoder="speculative-sampling")
        plain = llm.generate("abc", max_tokens=12).tokens
        assert llm.generate("abc", max_tokens=12, decoder="omnidraft").tokens == plain


def test_self_drafts() -> None:
    model = own_model(hf_model("Llama", num_hidden_layers=4))
    assert open_draft("self", model) == (model, None)
    thin = select_layers(model.network, 2)
    assert thin.spec.num_layers == 2 and thin.spec.vocab_size == model.spec.vocab_size
    weights = model.network.weights.layers
    assert thin.weights.layers == [weights[0], weights[3]]
    assert weights[0].query.weight.data.size
    for draft, error in (
        ("self:layers=2", "checkpoint"),
        ("self:int3", "layers=n and one of"),
        ("self:int4", "checkpoint"),
    ):
        with pytest.raises(InvalidRequestError, match=error):
            open_draft(draft, model)
    with pytest.raises(InvalidRequestError, match="2 to 4"):
        select_layers(model.network, 9)
