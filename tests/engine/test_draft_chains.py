"""Chains of a draft model in one multi-step pass: the tokens and probabilities of single steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    eagle_checkpoint,
    tiny_model,
    with_drafter,
)
from anydecode.certification.tiny_heads import hydra_checkpoint
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.engine.model_runner import ModelRunner
from anydecode.kernels.formats import dequantize_rows, plain_weight, quantize
from anydecode.kernels.native import NativeExecutor
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import DRAFT, Sequence

DRAFTERS: dict[str, Callable[[], LLM]] = {
    "EAGLE": partial(with_drafter, eagle_checkpoint),
    "EAGLE-3, fewer tokens": partial(with_drafter, eagle3_checkpoint),
    "EAGLE-3, normed states": partial(
        with_drafter, lambda target: eagle3_checkpoint(target, norm_output=True)
    ),
    "a model": lambda: LLM(
        tiny_model(), tokenizer=ByteTokenizer(), draft=tiny_model(seed=1, layers=1)
    ),
}


class ChainReader(Decoder):
    """Decodes plainly and drafts a chain after each token."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True)

    def __init__(self, size: int, min_probability: float) -> None:
        self.size, self.min_probability = size, min_probability
        self.chains: list[list[int]] = []
        self.probabilities: list[float] = []
        self.num_draft_passes = 0

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])
            if sequence.finished or not sequence.can_draft():
                continue
            sequence.align(DRAFT)
            self.chains.append(
                (
                    yield from draft_chain(
                        sequence,
                        [],
                        self.size,
                        probabilities=self.probabilities,
                        min_probability=self.min_probability,
                    )
                )
            )


def read_chains(
    name: str, temperature: float, min_probability: float
) -> tuple[list[list[int]], list[float]]:
    with DRAFTERS[name]() as llm:
        reader = ChainReader(5, min_probability)
        llm.generate(
            "the quick brown", decoder=reader, max_tokens=24, temperature=temperature, seed=7
        )
    assert len(reader.chains) >= 20
    assert sum(map(len, reader.chains)) == len(reader.probabilities)
    return reader.chains, reader.probabilities


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every call of the kernels."""
    steps: list[int] = []
    call = NativeExecutor._call

    def counted(self: NativeExecutor, *given: Any) -> None:
        steps.append(given[5] if len(given) > 5 else 1)
        call(self, *given)

    monkeypatch.setattr(NativeExecutor, "_call", counted)
    return steps


@pytest.mark.parametrize("min_probability", [0.0, 0.02])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_in_one_pass_equal_single_steps(
    name: str, temperature: float, min_probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_calls(monkeypatch)
    chains, probabilities = read_chains(name, temperature, min_probability)
    is_multi_step = name != "EAGLE-3, normed states"  # whose states the kernels do not norm
    assert (max(steps) > 1) == is_multi_step
    steps.clear()
    monkeypatch.setattr(ModelRunner, "_allow_multi_step", lambda self, plan: None)
    expected = read_chains(name, temperature, min_probability)
    assert max(steps) == 1
    assert chains == expected[0]
    assert np.allclose(probabilities, expected[1], rtol=1e-4)
    lengths = {len(chain) for chain in chains}
    assert lengths == {5} if min_probability == 0 else len(lengths) > 1


@pytest.mark.parametrize(
    "decoder", ["lenient-sampling", "speculative-sampling:acceptance=rejection"]
)
def test_drafts_for_a_rejection_rule_are_one_pass_at_temperature_0(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above it, the rule needs the distribution of each draft."""
    steps = count_calls(monkeypatch)

    def read(temperature: float) -> tuple[list[int], list[int]]:
        steps.clear()
        with DRAFTERS["a model"]() as llm:
            answer = llm.generate(
                "the quick brown",
                decoder=decoder,
                max_tokens=24,
                temperature=temperature,
                ignore_eos=True,
                trace=True,
            )
        sizes = [len(event["drafted"]) for event in answer.trace or ()]
        return answer.tokens, [size for size in sizes if size > 1]

    tokens, sizes = read(0.0)
    assert [one for one in steps if one > 1] == sizes and len(sizes) > 5
    read(0.8)
    assert max(steps) == 1
    monkeypatch.setattr(ModelRunner, "_allow_multi_step", lambda self, plan: None)
    assert read(0.0) == (tokens, sizes)


class ChainsByPlace(ChainReader):
    """The same for several texts: their chains by text and position."""

    def __init__(self, size: int, min_probability: float) -> None:
        super().__init__(size, min_probability)
        self.by_place: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])
            if sequence.finished or not sequence.can_draft():
                continue
            sequence.align(DRAFT)
            chances: list[float] = []
            size = self.size - len(sequence.tokens) % 3  # drafts of a pass have other limits
            chain = yield from draft_chain(
                sequence,
                [],
                size,
                probabilities=chances,
                min_probability=self.min_probability,
            )
            self.by_place[tuple(sequence.all_tokens)] = chain, chances


TEXTS = ["the quick brown", "zq", "a b c", "hello there, how", "x"]


def chains_by_place(
    name: str, temperature: float, min_probability: float
) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    with DRAFTERS[name]() as llm:
        reader = ChainsByPlace(6, min_probability)
        options: dict[str, Any] = {"temperature": temperature, "seed": 7, "ignore_eos": True}
        drafted = llm.generate(TEXTS, decoder=reader, max_tokens=20, **options)
        plain = llm.generate(TEXTS, decoder="autoregressive", max_tokens=20, **options)
        llm.engine.check_integrity()
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert len(reader.by_place) > 80
    return reader.by_place


@pytest.mark.one_in(3)  # each temperature and probability
@pytest.mark.parametrize("min_probability", [0.0, 0.02])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_of_several_texts_in_one_pass_equal_single_steps(
    name: str, temperature: float, min_probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_calls(monkeypatch)
    found = chains_by_place(name, temperature, min_probability)
    is_multi_step = name != "EAGLE-3, normed states"  # whose states the kernels do not norm
    assert (sum(one > 1 for one in steps) > 10) == is_multi_step
    steps.clear()
    monkeypatch.setattr(ModelRunner, "_allow_multi_step", lambda self, plan: None)
    expected = chains_by_place(name, temperature, min_probability)
    assert max(steps) == 1
    assert found.keys() == expected.keys()
    for place, (chain, chances) in expected.items():
        assert found[place][0] == chain
        assert np.allclose(found[place][1], chances, rtol=1e-4)
    lengths = {len(chain) for chain, _ in found.values()}
    assert lengths == {4, 5, 6} if min_probability == 0 else min(lengths) < 4


def test_steps_of_the_wrong_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that have ended must not leave their rows to others."""
    call = NativeExecutor._call

    def shuffled(self: NativeExecutor, *given: Any) -> None:
        call(self, *given)
        count, num_steps = (given[4], given[5]) if len(given) > 5 else (1, 1)
        if count > 1 and num_steps > 1:
            tokens = self._multi_step_tokens[: count * num_steps].reshape(count, num_steps)
            tokens[:] = np.roll(tokens, 1, axis=0)

    single = pytest.MonkeyPatch()
    single.setattr(ModelRunner, "_allow_multi_step", lambda self, plan: None)
    expected = chains_by_place("EAGLE", 0.0, 0.0)
    single.undo()
    monkeypatch.setattr(NativeExecutor, "_call", shuffled)
    found = chains_by_place("EAGLE", 0.0, 0.0)
    assert any(found[place][0] != expected[place][0] for place in expected)


def test_steps_without_the_states_of_the_step_before_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The input of a further step is the state of the step before, not that of the first row."""
    single = pytest.MonkeyPatch()
    single.setattr(ModelRunner, "_allow_multi_step", lambda self, plan: None)
    expected = read_chains("EAGLE", 0.0, 0.0)[0]
    single.undo()
    call = NativeExecutor._call

    def stateless(self: NativeExecutor, *given: Any) -> None:
        if self._reads_states:
            self._pass.carries_states = 0
        call(self, *given)

    monkeypatch.setattr(NativeExecutor, "_call", stateless)
    assert read_chains("EAGLE", 0.0, 0.0)[0] != expected


def test_products_and_rows_outside_a_pass_are_those_of_the_weight() -> None:
    random = np.random.default_rng(3)
    values, bias = random.standard_normal((24, 64)).astype(np.float32), np.arange(24, dtype="f")
    x = random.standard_normal((3, 64)).astype(np.float32)
    executor: Any = tiny_model().executor
    weight = plain_weight(values)
    assert np.allclose(executor.linear(x, weight, bias), x @ values.T + bias, atol=1e-4)
    assert np.allclose(executor.linear(x, weight), x @ values.T, atol=1e-4)
    rows = np.array([23, 0, 7])
    assert (executor.read_rows(weight, rows) == values[rows]).all()
    quantized = quantize(values, "Q8_0", "w")
    expected = dequantize_rows(quantized, rows)
    assert (executor.read_rows(quantized, rows) == expected).all()
    for wrong in (-1, len(values)):
        with pytest.raises(IndexError):
            executor.read_rows(quantized, np.array([0, wrong]))


@pytest.mark.parametrize("options", [{}, {"top_k": 40, "top_p": 0.9}, {"typical_p": 0.9}])
@pytest.mark.parametrize("decoder", ["eagle", "dyspec"])
def test_a_head_without_any_allowed_token_drafts_nothing(
    decoder: str, options: dict[str, Any]
) -> None:
    """The head of this drafter has no token whose id is a multiple of 5."""
    only_missing, mixed = Regex("[dinsx]{6}"), Regex("[a-z]{12}")
    with DRAFTERS["EAGLE-3, fewer tokens"]() as llm:
        for constraint in (only_missing, mixed):
            drafted, plain = (
                llm.generate(
                    "the quick brown",
                    decoder=key,
                    constraint=constraint,
                    max_tokens=12,
                    temperature=0.8,
                    seed=3,
                    **options,
                )
                for key in (decoder, "autoregressive")
            )
            assert drafted.text == plain.text


@pytest.mark.parametrize("acceptance", ["token-exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_have_at_most_as_many_tokens_as_there_are_heads(
    acceptance: str, temperature: float
) -> None:
    with with_drafter(partial(hydra_checkpoint, heads=3)) as llm:
        answer = llm.generate(
            "a quick zebra",
            decoder=f"speculative-sampling:size=8,acceptance={acceptance}",
            temperature=temperature,
            seed=3,
            max_tokens=12,
            ignore_eos=True,
            trace=True,
        )
    assert max(len(one["drafted"]) for one in answer.trace or ()) == 3
