"""GEAR passes its certificate; wrong compressions of a full buffer do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill import gear_cache
from anydecode.decoders.prefill.gear import Gear
from anydecode.decoders.prefill.gear_cache import CompressedPositions
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import KeyValues
from anydecode.memory.codecs.gear import GearBlock
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_class_default

add, restore, repurpose = (
    CompressedPositions.add,
    CompressedPositions.restore,
    SequenceCache.repurpose,
)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("gear")


def same_rank(self: CompressedPositions, start: int, stop: int, rank: int) -> None:
    add(self, start, stop, 4)


def prompt_only(self: CompressedPositions, start: int, stop: int, rank: int) -> None:
    if not start:
        add(self, start, stop, rank)


def without_low_rank(self: CompressedPositions, start: int, stop: int, rank: int) -> None:
    add(self, start, stop, 0)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [same_rank, prompt_only, without_low_rank])
def test_wrong_compressions_are_rejected(
    wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompressedPositions, "add", wrong)
    assert_rejected("gear")


@pytest.mark.slow
def test_keys_compressed_per_token_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_token(rows: int, heads: int, size: int, keys: bool, *options: Any) -> GearBlock:
        return GearBlock(rows, heads, size, False, *options)

    monkeypatch.setattr(gear_cache, "GearBlock", per_token)
    assert_rejected("gear")


def test_a_cache_that_keeps_all_its_slots_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the right one, but no memory is saved."""

    def all_kept(self: SequenceCache, start: int, stop: int, count: int) -> np.ndarray:
        return repurpose(self, start, stop, stop - start)[:count]

    monkeypatch.setattr(SequenceCache, "repurpose", all_kept)
    assert_rejected("gear")


def test_a_pass_that_restores_all_layers_at_once_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text is the right one, but a pass takes the memory that the cache saves."""

    def copies(keys: list[np.ndarray], values: list[np.ndarray], format: str) -> KeyValues:
        both = [[x.swapaxes(0, 1).copy().swapaxes(0, 1) for x in one] for one in (keys, values)]
        return KeyValues(*both, format)

    monkeypatch.setattr(gear_cache, "KeyValues", copies)
    assert_rejected("gear")


@pytest.mark.slow
def test_a_layer_that_reads_those_of_the_first_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_layer(
        self: CompressedPositions, layer: int, keys: np.ndarray, values: np.ndarray
    ) -> None:
        restore(self, 0, keys, values)

    monkeypatch.setattr(CompressedPositions, "restore", first_layer)
    assert_rejected("gear")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "value"),
    [("bits", 5), ("rank", 3), ("tail", 1), ("sparse", 0.01), ("sparse", 0.03), ("buffer", 63)],
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, Gear, parameter, value)
    assert_rejected("gear")


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_error_of_a_block_is_at_most_half_a_step(bits: int, keys: bool, format: str) -> None:
    """Of codes without a low-rank part, beside the rounding of the scales."""
    x = np.random.default_rng(bits).standard_normal((70, 2, 24)).astype(DTYPES[format])
    block = GearBlock(70, 2, 24, keys, bits, 0, 0.05, x.dtype)
    data = block.encode(x)
    assert data.shape == (block.num_bytes,)
    restored = block.decode(data)
    assert restored.dtype == x.dtype
    error = np.abs(restored.astype(np.float32) - x.astype(np.float32))
    assert error.max() < 0.5 * 6 / (2**bits - 1) + (0.05 if format == "BF16" else 0.01)
    assert (error == 0).mean() > 0.02  # the outliers


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8), (65, 1, 7)])
def test_small_blocks(shape: tuple[int, int, int]) -> None:
    """A rank above the block's, and outliers that are all numbers."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for rank, sparse in ((16, 0.0), (0, 0.99), (4, 0.5)):
        block = GearBlock(*shape, keys=True, bits=8, rank=rank, sparse=sparse, dtype=x.dtype)
        assert np.abs(block.decode(block.encode(x)) - x).max() < 0.02


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_more_positions_than_slots(backend: str) -> None:
    """Several texts at once that would not fit a cache of their positions without preemption."""
    pytest.importorskip("torch")
    options = {"decoder": "gear:buffer=32", "max_tokens": 40, "ignore_eos": True}
    prompts, model = (
        ["the first text " * 8, "and another one " * 8],
        tiny_model(layers=2, backend=backend),
    )
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        expected = [llm.generate(prompt, **options).tokens for prompt in prompts]
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=280) as llm:
        found = [one.tokens for one in llm.generate(prompts, **options)]
        assert llm.engine.num_preemptions == 0
        llm.engine.check_integrity()
    assert found == expected
