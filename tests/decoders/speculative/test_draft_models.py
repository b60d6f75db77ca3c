"""Methods with a draft model: oracle tests, equality with plain decoding, and rejected requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.rounds import VirtualClock, blurred, rounds, scripted, wordy
from anydecode.decoders.speculative.draft_model import fit_vocab
from anydecode.decoders.speculative.omnidraft import Translation
from anydecode.decoders.speculative.saguaro import fan_out
from anydecode.decoders.speculative.stand import NgramProbabilities
from anydecode.decoders.speculative.windows import retrieve_chunks, truncate_to_prefix
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.models.self_drafts import open_draft, select_layers
from anydecode.models.transformer import Transformer
from anydecode.sampling.sampler import Sampler
from tiny_models import hf_model, own_model

KEYS = (
    "speculative-sampling",
    "parallel-draft",
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
    "eqspec",
    "exspec",
)
SIMPLER_METHODS = {
    "parallel-draft": "speculative-sampling",
    "omnidraft": "speculative-sampling",
    "specdec++": "speculative-sampling",
    "pearl": "parallel-draft",
    "saguaro": "parallel-draft",
    "rapid": "speculative-sampling",
    "longspec": "speculative-sampling",
    "s2d": "speculative-sampling",
    "bandit": "copyspec",
}
TARGET, DRAFT = wordy(), blurred(wordy())


@pytest.mark.parametrize("key", KEYS)
def test_oracle_test_passes(key: str) -> None:
    checks = list(load_oracle_tests()[key]())
    assert checks and [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("key", SIMPLER_METHODS)
def test_simpler_method_fails_the_oracle_test(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalogue.entries()[key]
    replacement = replace(entry, build=lambda **_: catalogue.build(SIMPLER_METHODS[key]))
    monkeypatch.setitem(catalogue.entries(), key, replacement)
    try:
        passed = all(check.passed for check in load_oracle_tests()[key]())
    except (KeyError, TypeError, ValueError):
        passed = False
    assert not passed


def _failed(key: str) -> str:
    """The names of the checks that `key` fails."""
    return "; ".join(check.name for check in load_oracle_tests()[key]() if not check.passed)


@pytest.mark.parametrize(
    ("key", "attribute", "wrong", "expected"),
    [
        ("s2d", "s2d.NestedDrafter.layers", lambda self, depth: [3, 6], "first confident exit"),
        ("rapid", "windows.retrieve_chunks", lambda p, chunk, n, query: p[-query:], "the oracle"),
        ("omnidraft", "omnidraft.Translation.learn", lambda *_: None, "drafts equal the oracle"),
        ("online-sd", "online.OnlineDrafter.train", lambda self: None, "after training"),
        ("specdiff-2", "specdiff.Sampler", lambda temperature: Sampler(1.0), "equal the oracle"),
        ("stand", "stand.NgramProbabilities", lambda _: NgramProbabilities(3), "the oracle"),
        ("saguaro", "saguaro._outcome", lambda result: (0, 0), "equals the oracle"),
    ],
)
def test_broken_method_fails_a_named_check(
    key: str, attribute: str, wrong: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_oracle_tests()  # what they have imported is not replaced
    monkeypatch.setattr(f"anydecode.decoders.speculative.{attribute}", wrong)
    assert expected in _failed(key)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "key", [*KEYS, "longspec:window=5,sinks=1", "rapid:chunk=3,count=1,query=2"]
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


def test_sequential_drafting_has_no_overlap() -> None:
    """The clock that measures overlap measures none for sequential drafting."""
    with scripted(TARGET, DRAFT) as llm:
        clock = VirtualClock(llm, target=4.0, draft=1.0)
        rounds(llm, "speculative-sampling", "abc")
    assert len(clock.passes) > 10 and clock.overlap == 0


def test_fan_out_follows_the_acceptance_rate() -> None:
    low, high = fan_out(4, 20, 0.3, 0.5), fan_out(4, 20, 0.95, 0.5)
    assert low[0] > low[3] and high[-1] > high[0] and min(low + high) >= 1


def test_rows_are_fitted_to_the_target_vocabulary() -> None:
    with scripted(TARGET, DRAFT) as llm:
        sequence = llm.request("ab").jobs[0].sequence
        wide, narrow = np.arange(300, dtype=np.float32), np.arange(200, dtype=np.float32)
        assert fit_vocab(sequence, wide).tolist() == list(range(259))
        assert fit_vocab(sequence, narrow)[:200].tolist() == list(range(200))
        assert np.isneginf(fit_vocab(sequence, narrow)[200:]).all()


def test_translation_prefers_the_longest_run() -> None:
    translation = Translation()
    translation.direct = {b"a": 1, b"b": 2, b"c": 3}
    letters = [b"a", b"b", b"c"]
    assert translation.translate([10, 11, 12], letters) == [1, 2, 3]
    translation.learn([10, 11], 4)
    translation.learn([10, 11, 12], 5)
    assert translation.translate([10, 11, 12], letters) == [5]
    assert translation.translate([10, 11], letters[:2]) == [4]
    assert translation.translate([10, 13], [b"a", b"?"]) == [1]


def test_retrieved_prompt_ends_with_the_query() -> None:
    assert retrieve_chunks([1, 2, 3], 4, 2, 8) == [1, 2, 3]
    assert retrieve_chunks(list(range(20)), 5, 1, 3)[-3:] == [17, 18, 19]


def test_truncate_to_prefix_leaves_one_token_to_score() -> None:
    context = SequenceCache(KVPool(ScriptedModel(TARGET, vocab_size=259), 16))
    context.append(4)
    context.tokens += [1, 2, 3, 4]
    truncate_to_prefix(context, [1, 2, 9, 9, 9])
    assert context.length == 2
    truncate_to_prefix(context, [1, 2])
    assert context.length == 1


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
    thin = select_layers(model, 2)
    assert thin.spec.num_layers == 2 and thin.spec.vocab_size == model.spec.vocab_size
    weights = model.network.weights.layers
    assert thin.network.weights.layers == [weights[0], weights[3]]
    assert isinstance(thin, Transformer) and torch.is_tensor(weights[0].query.weight.data)
    for draft, error in (
        ("self:layers=2", "checkpoint"),
        ("self:int3", "layers=n and one of"),
        ("self:int4", "checkpoint"),
    ):
        with pytest.raises(InvalidRequestError, match=error):
            open_draft(draft, model)
    with pytest.raises(InvalidRequestError, match="2 to 4"):
        select_layers(model, 9)
