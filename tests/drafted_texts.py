"""Texts that are generated with a drafter that reads its target's states, and conditions under
which they must be those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from anydecode import Generation, JsonSchema
from anydecode.api.llm import LLM
from anydecode.certification.tiny import with_drafter
from anydecode.constraints.constraint import Constraint
from anydecode.memory.sequence_cache import SequenceCache

LONG = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat. " * 3
PROMPTS = [LONG + "one", LONG + "two", "zq", LONG + "one more", LONG[:50]]
#: Three or four integers.
NUMBERS = JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4})
#: Options of the engine, with a temperature.
CONDITIONS = pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"cache_positions": 420}, 0.8),
        ({"row_budget": 16}, 0.0),
        pytest.param({"row_budget": 16, "backend": "torch"}, 0.8, marks=pytest.mark.slow),
        pytest.param({"prefix_cache": False}, 0.8, marks=pytest.mark.slow),
    ],
    ids=["preempted", "chunked", "torch", "uncached"],
)
#: Options of requests: guidance, penalties and layers that are contrasted.
SAMPLERS = pytest.mark.parametrize(
    "options",
    [
        {"negative_prompt": "zz", "guidance_scale": 1.5},
        {"logprobs": 2, "presence_penalty": 0.7, "repetition_penalty": 1.2},
        {"sampler": "dola"},
    ],
    ids=["guidance", "penalties", "dola"],
)


def only_drafter(monkeypatch: pytest.MonkeyPatch, oracle: ModuleType, name: str) -> None:
    """Restricts an oracle test to one of its `DRAFTERS`."""
    drafters = vars(oracle)["DRAFTERS"]
    monkeypatch.setattr(oracle, "DRAFTERS", {name: drafters[name]})


def generate(llm: LLM, prompts: Any, decoder: str, **options: Any) -> Any:
    """Texts with their traces."""
    shared = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "trace": True}
    return llm.generate(prompts, decoder=decoder, **{**shared, **options})


def assert_turns_leave_no_position_out(
    monkeypatch: pytest.MonkeyPatch, drafter: Any, decoder: str, lags: Sequence[int] = (1,)
) -> None:
    """Asserts that drafters that read the states of `lags` positions before have read all positions
    but the first ones in every turn of a chat, whose earlier turns are in the prefix caches."""
    skip, holes = SequenceCache.skip, list[tuple[int, int]]()

    def recorded(self: SequenceCache, tokens: Sequence[int], *given: Any) -> None:
        if len(tokens):
            holes.append((self.length, len(tokens)))
        skip(self, tokens, *given)

    monkeypatch.setattr(SequenceCache, "skip", recorded)
    with with_drafter(drafter, cache_positions=2048) as llm:
        text = llm.encode(LONG + "one")
        for turn in range(3):
            (answer,) = generate(llm, [text], decoder)
            assert (answer.stats.num_cached_tokens > len(LONG)) == (turn > 0)
            text += answer.tokens + llm.encode(" and then we went on to see the rest of it.")
    assert holes == [(0, lag) for lag in lags]


def num_accepted(generations: Sequence[Generation]) -> int:
    """The number of accepted drafts."""
    return sum(len(event["accepted"]) for one in generations for event in one.trace or ())


def assert_names_of_plain_decoding(llm: LLM, decoder: str, max_tokens: int = 8) -> None:
    """Asserts that a sampled text of a model of this package's tasks is that of plain decoding."""
    plain, drafted = (
        llm.generate(
            "copy Ada Ben Carl:", decoder=key, max_tokens=max_tokens, temperature=0.8, seed=1
        )
        for key in ("autoregressive", decoder)
    )
    assert drafted.tokens == plain.tokens


def assert_text_of_plain_decoding(
    drafter: Callable[..., Any],
    decoders: tuple[str, str],
    options: dict[str, Any],
    prompts: Sequence[str] = PROMPTS,
    **request: Any,
) -> tuple[int, int]:
    """Asserts that texts drafted alone, with the first of `decoders`, and together, with the
    second, are those of plain decoding. Returns the numbers of accepted drafts of both."""
    if "backend" in options:
        pytest.importorskip("torch")
    request = {"max_tokens": 28, **request}
    with with_drafter(drafter, **{"cache_positions": 2048, **options}) as llm:
        return assert_texts_of_plain_decoding(llm, decoders, prompts, **request)


def assert_texts_of_plain_decoding(
    llm: LLM, decoders: tuple[str, str], prompts: Sequence[str] = PROMPTS, **request: Any
) -> tuple[int, int]:
    """`assert_text_of_plain_decoding` with an open model."""
    plain = generate(llm, list(prompts), "autoregressive", **request)
    alone = [generate(llm, one, decoders[0], **request) for one in prompts]
    together = generate(llm, list(prompts), decoders[1], **request)
    llm.engine.check_integrity()
    expected = [one.tokens for one in plain]
    assert [one.tokens for one in alone] == expected
    assert [one.tokens for one in together] == expected
    return num_accepted(alone), num_accepted(together)


def assert_constrained_text_of_plain_decoding(
    drafter: Callable[..., Any],
    decoder: str,
    constraints: Sequence[Constraint] = (NUMBERS,),
    **request: Any,
) -> None:
    """Asserts that constrained texts are those of plain decoding."""
    with with_drafter(drafter, cache_positions=1024) as llm:
        assert_constrained_texts_of_plain_decoding(llm, decoder, constraints, **request)


def assert_constrained_texts_of_plain_decoding(
    llm: LLM, decoder: str, constraints: Sequence[Constraint], **request: Any
) -> None:
    """`assert_constrained_text_of_plain_decoding` with an open model."""
    options = {"max_tokens": 60, "ignore_eos": False, **request}
    for constraint in constraints:
        plain, drafted = (
            generate(llm, "x", key, constraint=constraint, **options)
            for key in ("autoregressive", decoder)
        )
        assert drafted.text == plain.text
    llm.engine.check_integrity()


def assert_texts_and_logprobs_of_plain_decoding(
    llm: LLM, decoder: str, prompts: Sequence[str], **request: Any
) -> int:
    """Asserts that texts drafted together are those of plain decoding, with the same
    log-probabilities. Returns the number of accepted drafts."""
    plain, drafted = (
        generate(llm, list(prompts), key, **request) for key in ("autoregressive", decoder)
    )
    llm.engine.check_integrity()
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert [one.logprobs for one in drafted] == [one.logprobs for one in plain]
    return num_accepted(drafted)


def assert_rule_accepts(
    drafter: Callable[..., Any], decoder: str, rule: str, more_than: int = 20
) -> Sequence[Generation]:
    """Asserts that texts with another acceptance rule are complete, and drafts are accepted.
    Returns the texts."""
    with with_drafter(drafter, cache_positions=1024) as llm:
        drafted: Sequence[Generation] = generate(
            llm, PROMPTS, f"{decoder}:acceptance={rule}", temperature=0.8
        )
    assert all(len(one.tokens) == 40 for one in drafted)
    assert num_accepted(drafted) > more_than
    return drafted
