"""The lm-eval adapter, on a scripted model and with stubs for lm-eval's classes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anydecode import LLM
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `AnydecodeLM` on a model with a context of 64 tokens."""
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    model.LM = object  # type: ignore[attr-defined]
    registry.register_model = lambda name: lambda cls: cls  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, model.__name__, model)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.delitem(sys.modules, "anydecode.integrations.lm_eval", raising=False)
    module = importlib.import_module("anydecode.integrations.lm_eval")
    llm = LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), cache_positions=64)
    yield module.AnydecodeLM(llm)
    sys.modules.pop("anydecode.integrations.lm_eval", None)


def requests(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=arg) for arg in args]


def test_loglikelihood_matches_llm_scores(adapter: Any) -> None:
    found = adapter.loglikelihood(requests(("abc", "de"), ("ab ", "c"), ("", "xyz")))
    direct = adapter.llm.scores([("abc", "de"), ("ab", " c")])
    assert [pair[0] for pair in found[:2]] == [likelihood.total for likelihood in direct]
    assert found[2][0] < 0
    assert found[0][0] != adapter.loglikelihood(requests(("abd", "de")))[0][0]


def test_greedy_flag_matches_greedy_decoding(adapter: Any) -> None:
    tokens = adapter.llm.generate([97, 98], max_tokens=3, ignore_eos=True).tokens
    greedy = adapter.llm.score([97, 98], tokens)
    other = adapter.llm.score([97, 98], [*tokens[:-1], (tokens[-1] + 1) % 250])
    assert greedy.greedy and not other.greedy


def test_rolling_covers_every_token_once(adapter: Any) -> None:
    text = "abcdefgh" * 20
    room = adapter.llm.max_length - 2
    ids = adapter.llm.encode(text, special=False)
    assert len(ids) > 2 * room
    total, at = 0.0, 0
    before = EOS  # where a tokenizer has no beginning-of-sequence token
    while at < len(ids):
        total += adapter.llm.score([before], ids[at : at + room]).total
        at += room
        before = ids[min(at, len(ids)) - 1]
    assert adapter.loglikelihood_rolling(requests((text,)))[0] == pytest.approx(total)


def test_a_long_context_is_truncated_on_the_left(adapter: Any) -> None:
    long = "z" * 100 + "abcdefgh"
    room = adapter.llm.max_length - 1 - 2
    ((found, _),) = adapter.loglikelihood(requests((long, "ij")))
    assert found == adapter.llm.score(long[-room:], "ij").total
    assert adapter.generate_until(requests((long, {"max_gen_toks": 4})))[0]


def test_generate_until_stops_and_samples(adapter: Any) -> None:
    whole = adapter.generate_until(requests(("abc", {"max_gen_toks": 12})))[0]
    assert len(whole) > 2
    cut = adapter.generate_until(requests(("abc", {"max_gen_toks": 12, "until": [whole[2]]})))[0]
    assert cut == whole[: whole.index(whole[2])]
    settings = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    one, same, other = (
        adapter.generate_until(requests(("abc", {**settings, "seed": seed})))[0]
        for seed in (1, 1, 2)
    )
    assert one == same != other
