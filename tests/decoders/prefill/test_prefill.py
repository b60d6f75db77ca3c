"""Compressed prompts: equal to the oracles, errors are detected, unsupported requests refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.certification.oracles import prefill as mechanisms
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill import fastkv, gear, mustdrop, prefilled, quickprefill
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.prompt_embeds import PromptEmbeds

KEYS = ("fastkv", "quickprefill", "mustdrop", "gear")


def failure(key: str) -> str | None:
    """The name of the first check that fails."""
    return next((check.name for check in getattr(mechanisms, key)() if not check.passed), None)


@pytest.mark.parametrize("key", KEYS)
def test_all_checks_against_the_oracle_pass(key: str) -> None:
    assert failure(key) is None


def test_wrong_rules_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
        norms = keys.float().flatten(1).norm(dim=1)
        return torch.sort(norms, descending=True).indices[:count].sort().values

    def either(attention: torch.Tensor, overall: float, single: float) -> torch.Tensor:
        return (attention.sum(0) < overall * attention.sum()) | (attention.amax(0) < single)

    def unpooled(attention: torch.Tensor, groups: int, kernel: int) -> torch.Tensor:
        return fastkv_scores(attention, groups, 1)

    fastkv_scores, compressed = fastkv.window_scores, gear.compress
    monkeypatch.setattr(quickprefill, "smallest", largest)
    monkeypatch.setattr(mustdrop, "dropped", either)
    monkeypatch.setattr(fastkv, "window_scores", unpooled)
    monkeypatch.setattr(gear, "compress", lambda x, **o: compressed(x, **{**o, "rank": 0}))
    assert failure("quickprefill") == "the kept keys have the smallest norms"
    assert failure("mustdrop") == "every layer ends with the surviving positions"
    assert failure("fastkv") == "keys and values per layer and head"
    assert failure("gear") == "the prompt's keys and values equal the oracle's"
    assert mechanisms.quickprefill_loss(3) > 0.5


def test_compression_frees_memory() -> None:
    """A compressed prompt of 600 tokens uses only a part of a cache of 700 positions."""
    model = tiny_model(layers=4, backend="torch")
    prompt = np.random.default_rng(1).integers(97, 123, 600).tolist()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=700) as llm:
        pool, used = llm.engine.runners["target"].pool, []
        request = llm.request(prompt, decoder="quickprefill:keep=0.25,query=20", max_tokens=8,
                              ignore_eos=True)  # fmt: skip
        request.notify(lambda: used.append(pool.num_used))
        llm._run([request])
        assert 0 < max(used) < 0.25 * 600 + 50
        assert pool.num_used == 0


def test_unsupported_requests_raise_an_error() -> None:
    with scripted_llm() as llm:
        for decoder, message in (
            ("fastkv:budget=0", "budget"), ("quickprefill:keep=2", "keep"),
            ("mustdrop:key=2", "key"), ("gear:bits=9", "bits"),
            ("fastkv:decoder=fastkv", "given context"), ("fastkv:decoder=sarathi", "given context"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match=message):
                llm.generate("abc", decoder=decoder)
        with pytest.raises(UnsupportedCombinationError, match="from no file"):
            llm.generate("abc" * 30, decoder="fastkv:budget=20", max_tokens=2)
        rows = PromptEmbeds(0, torch.zeros(2, 4))
        with pytest.raises(UnsupportedCombinationError, match="does not support prompt_embeds"):
            llm.generate("abcd", prompt_embeds=rows)
        for wrong in (PromptEmbeds(0, torch.zeros(2, 5)), PromptEmbeds(2, torch.zeros(2, 4)),
                      PromptEmbeds(0, torch.zeros(2, 4), torch.zeros(3))):  # fmt: skip
            with pytest.raises(InvalidRequestError):
                llm.generate("abcd", decoder="quickprefill", prompt_embeds=wrong)
    native: Any = tiny_model(layers=4)
    if not native.network.weights.layers[0].query.weight.data.numel():
        with LLM(native, tokenizer=ByteTokenizer(), cache_positions=200) as llm:
            with pytest.raises(UnsupportedCombinationError, match="backend='torch'"):
                llm.generate("abc" * 30, decoder="fastkv:budget=20", max_tokens=2)


def test_models_with_sliding_windows_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(layers=4, backend="torch")
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=200) as llm:
        context = prefilled.SequenceCache(llm.engine.runners["target"].pool)
        prefilled.check_compressible(context)
        shape = model.spec.layers[0].attention
        object.__setattr__(shape, "window", 8)
        with pytest.raises(UnsupportedCombinationError, match="sliding window"):
            prefilled.check_compressible(context)
