"""Spilled prefixes: their certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from anydecode import LLM
from anydecode.api.prefix_spill import parse_bytes, stable_name
from anydecode.certification.checks import scripted_llm
from anydecode.engine import model_runner
from anydecode.engine.engine import Engine
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import load_library
from anydecode.memory.layer_load import LayerLoad
from anydecode.memory.prefix import BLOCK, read_slots
from anydecode.memory.spill import DiskSpill, MemorySpill, Spill
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("prefix-spill")


def test_certificate_rejects_blocks_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    get = MemorySpill.get

    def flipped(self: MemorySpill, key: bytes) -> bytes | None:
        block = get(self, key)
        return block and bytes([block[0] ^ 1]) + block[1:]

    monkeypatch.setattr(MemorySpill, "get", flipped)
    assert_rejected("prefix-spill")


def test_certificate_rejects_a_spill_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskSpill, "get", lambda self, key: None)
    assert_rejected("prefix-spill")


def test_certificate_rejects_drops_that_ignore_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spill, "_victim", lambda self: next(iter(self._sizes)))
    assert_rejected("prefix-spill")


def test_certificate_rejects_drops_of_what_is_needed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_needed(self: Spill) -> bytes:
        return min(self._sizes, key=lambda key: self._needed.get(key, -1))

    monkeypatch.setattr(Spill, "_victim", next_needed)
    assert_rejected("prefix-spill")


def test_certificate_rejects_reads_when_a_request_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskSpill, "expect", Spill.expect)
    assert_rejected("prefix-spill")


def test_certificate_rejects_an_engine_that_announces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "_announce", lambda self: None)
    assert_rejected("prefix-spill")


@pytest.mark.slow
def test_certificate_rejects_blocks_that_are_loaded_before_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "has_layer_ranges", lambda plan, model: False)
    assert_rejected("prefix-spill")


def test_certificate_rejects_passes_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = LayerLoad.wait
    monkeypatch.setattr(
        LayerLoad, "wait", lambda self, layers: wait(self, layers) if layers > 3 else None
    )
    assert_rejected("prefix-spill")


def test_certificate_rejects_layers_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LayerLoad.load_layer
    monkeypatch.setattr(
        LayerLoad, "load_layer", lambda self, layer: load(self, self.num_layers - 1 - layer)
    )
    assert_rejected("prefix-spill")


def test_blocks_of_another_build_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library()
    if library is None:
        pytest.skip("needs the native kernels")
    options = {"threads": 1, "cache_positions": 1024, "prefix_spill": tmp_path}
    num_restored = []
    for build in (library.build, "that of another compiler", library.build):
        monkeypatch.setattr(library, "build", build)
        with LLM("tiny-autoregressive", **options) as llm:
            llm.generate([65] * (2 * BLOCK + 1), max_tokens=1)
            num_restored.append(llm.engine.runners["target"].prefixes.num_restored)
    assert num_restored == [0, 0, 2 * BLOCK]


def test_blocks_that_are_evicted_before_they_are_loaded_are_stored() -> None:
    with scripted_llm(prefix_spill="memory") as llm:
        prompt = "a prompt of several blocks, each of sixteen tokens"
        llm.generate(prompt, max_tokens=1, decoder="autoregressive")
        runner = llm.engine.runners["target"]
        prefixes, tokens = runner.prefixes, llm.encode(prompt)
        before = read_slots(runner.pool.cache, prefixes.match(tokens, (-1, None)))
        for _ in range(2):
            prefixes.flush()
            for array in runner.pool.cache.arrays:
                array[:] = -1
            slots = prefixes.match(tokens, (-1, None), loads_later=True)
            assert prefixes.load is not None
            assert read_slots(runner.pool.cache, slots) != before
        prefixes.finish_load()
        assert read_slots(runner.pool.cache, slots) == before != b""


@pytest.mark.parametrize("is_divided", [True, False])
def test_two_passes_need_the_same_blocks(is_divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass comes while the first layer is written: each layer is written once."""
    with scripted_llm() as llm:
        cache = llm.engine.runners["target"].pool.cache
        slots = np.arange(BLOCK, dtype=np.int32)
        load, layers, again = LayerLoad(cache), list[int](), threading.Event()
        load.add(slots, read_slots(cache, slots))
        write, others = LayerLoad.load_layer, list[threading.Thread]()

        def second_pass() -> None:
            if is_divided:
                load.start()
            load.wait(load.num_layers)

        def gated(self: LayerLoad, layer: int) -> None:
            layers.append(layer)
            if len(layers) == 1:
                others.append(threading.Thread(target=second_pass))
                others[0].start()
                again.wait(0.2)
            else:
                again.set()
            write(self, layer)

        monkeypatch.setattr(LayerLoad, "load_layer", gated)
        if is_divided:
            load.start()
        load.wait(load.num_layers)
        others[0].join()
    assert layers == list(range(load.num_layers))


def test_a_pass_that_starts_to_load_while_another_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one cannot be divided, and writes on its own thread."""
    with scripted_llm() as llm:
        cache = llm.engine.runners["target"].pool.cache
        slots = np.arange(BLOCK, dtype=np.int32)
        load, layers, again = LayerLoad(cache), list[int](), threading.Event()
        load.add(slots, read_slots(cache, slots))
        write = LayerLoad.load_layer

        def gated(self: LayerLoad, layer: int) -> None:
            layers.append(layer)
            if len(layers) == 1:
                load.start()
                again.wait(0.2)
            else:
                again.set()
            write(self, layer)

        monkeypatch.setattr(LayerLoad, "load_layer", gated)
        load.wait(load.num_layers)
    assert layers == list(range(load.num_layers))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1000, 1000), ("1000", 1000), ("3B", 3), ("2k", 2048), ("1.5 KiB", 1536), ("1mb", 1 << 20),
        (" 512MiB ", 512 << 20), ("4g", 4 << 30), ("4GiB", 4 << 30), ("2TB", 2 << 40),
        ("0.5t", 1 << 39), (0, 0), (2**63 - 1, 2**63 - 1), (str(2**63 - 1), 2**63 - 1),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 gigabytes", "1.", "4p"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a number of bytes such as 4GiB"):
        parse_bytes(text)


def test_a_spill_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prefix_cache is False"):
        scripted_llm(prefix_spill="memory", prefix_cache=False)


def test_namespaces_of_adapters_are_not_shared_between_processes() -> None:
    assert stable_name((-1, "a")) == stable_name("a") == "tenant 'a'"
    assert stable_name((0, "a")) is None
    assert stable_name(None) not in (None, stable_name("None"))
