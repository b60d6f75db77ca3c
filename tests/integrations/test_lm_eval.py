"""The lm-eval adapter, on a scripted model and with stubs for lm-eval's classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import BOS, EOS, ByteTokenizer, ScriptedModel


def rolling_windows(
    tokens: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and the tokens after the last of them, as lm-eval's function of this name."""
    assert context_len == 1
    inputs = [prefix_token, *tokens]
    for start in range(0, len(tokens), max_seq_len):
        part = tokens[start : start + max_seq_len]
        end = start + len(part)
        yield inputs[max(0, end - max_seq_len) : end], part


def disjoint(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """The inputs of a window without the tokens that it predicts."""
    inputs, part = window
    return inputs[: len(inputs) - len(part) + 1], part


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `AnydecodeLM` on a model with a context of 64 tokens."""
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    model.LM = object  # type: ignore[attr-defined]
    registry.register_model = lambda name: lambda cls: cls  # type: ignore[attr-defined]
    utils = ModuleType("lm_eval.utils")
    utils.get_rolling_token_windows = rolling_windows  # type: ignore[attr-defined]
    utils.make_disjoint_window = disjoint  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, model.__name__, model)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
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
    """And the last window begins earlier, so that it is as long as the others."""
    text = "abcdefgh" * 20
    room = adapter.llm.max_length - 2
    ids = adapter.llm.encode(text, special=False)
    assert len(ids) > 2 * room and len(ids) % room
    total, at = 0.0, 0
    before = [EOS]  # where a tokenizer has no beginning-of-sequence token
    while at < len(ids):
        part = ids[at : at + room]
        total += adapter.llm.score(before, part).total
        at += room
        before = ids[at - 1 : at] if at + room <= len(ids) else ids[len(ids) - room - 1 : at]
    assert adapter.loglikelihood_rolling(requests((text,)))[0] == pytest.approx(total)
    assert adapter.loglikelihood_rolling(requests(("",), ("ab",)))[0] == 0.0


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


def test_answers_run_together_and_keep_their_order(adapter: Any) -> None:
    """With settings of their own."""
    settings = [{"max_gen_toks": 3}, {"max_new_tokens": 5, "until": "zz"}, {"max_gen_toks": 3}]
    asked = requests(*zip(("abc", "abd", "xyz"), settings, strict=True))
    alone = [
        adapter.llm.generate(prompt, max_tokens=count).text
        for prompt, count in (("abc", 3), ("abd", 5), ("xyz", 3))
    ]
    assert adapter.generate_until(asked) == alone and len(set(alone)) == 3


def test_a_continuation_without_tokens_is_certain(adapter: Any) -> None:
    """As in lm-eval's own models of servers."""
    (empty, other) = adapter.loglikelihood(requests(("abc", ""), ("abc", "d")))
    assert empty == (0.0, True) and other[0] == adapter.llm.score("abc", "d").total


def test_max_length_shortens_the_context(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short = type(adapter)(adapter.llm, max_length=16, batch_size="auto", device="cuda:0")
    long = "z" * 30 + "abcdefgh"
    scored: list[Any] = []
    compute = adapter.llm.scores
    monkeypatch.setattr(adapter.llm, "scores", lambda pairs: scored.extend(pairs) or compute(pairs))
    for one in (short, adapter):
        one.loglikelihood(requests((long, "ij")))
    assert scored == [([*long[-13:].encode()], [*b"ij"]), ([*long.encode()], [*b"ij"])]
    assert type(adapter)(adapter.llm, max_length=1000).max_length == adapter.llm.max_length


def test_conversations_are_rendered_with_the_chat_template(adapter: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]
    tokenizer = adapter.llm.tokenizer
    assert adapter.apply_chat_template(messages[:1]) == tokenizer.render_chat(messages[:1])
    continued = adapter.apply_chat_template(messages, add_generation_prompt=False)
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert continued.endswith("so ") and whole.startswith(continued)
    assert adapter.chat_template(True) == tokenizer.chat_template
    assert adapter.chat_template() is None


def test_a_template_that_changes_the_last_message_is_refused(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.llm.tokenizer, "render_chat", lambda *given, **options: "user: hi")
    with pytest.raises(InvalidRequestError, match="changes the last message"):
        adapter.apply_chat_template([{"role": "assistant", "content": "so"}], False)


class WithStart(ByteTokenizer):
    """Puts the token <bos> before a prompt, and reads its text as that token."""

    bos_id: int | None = BOS

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        start, text = text.startswith("<bos>"), text.removeprefix("<bos>")
        return [BOS] * (start + special) + super().encode(text, special=False)


def test_a_template_with_the_start_token_gets_no_second_one(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.llm, "tokenizer", WithStart())
    scored: list[Any] = []
    compute = adapter.llm.scores
    monkeypatch.setattr(adapter.llm, "scores", lambda pairs: scored.extend(pairs) or compute(pairs))
    adapter.loglikelihood(requests(("abc", "de"), ("<bos>abc", "de")))
    assert scored == [([BOS, *b"abc"], [*b"de"])] * 2
