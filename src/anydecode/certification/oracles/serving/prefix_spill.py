"""Oracle test of prefix-spill (CachedAttention, arXiv:2403.19708): evicted prefixes are restored
byte by byte, for the same tenant only."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_model
from anydecode.memory.layer_load import LayerLoad
from anydecode.memory.prefix import BLOCK, read_slots
from anydecode.memory.spill import DiskSpill, MemorySpill
from anydecode.models.scripted import ByteTokenizer

_FIRST = "the first conversation, which is long enough to be worth keeping somewhere. " * 2


_OTHERS = tuple(letter * 180 for letter in "pqr")


_OPTIONS: dict[str, Any] = {
    "decoder": "autoregressive", "max_tokens": 12, "temperature": 0.8, "seed": 3,
    "ignore_eos": True, "namespace": "",
}  # fmt: skip


def _open(model: Any, spill: Any, limit: str | int = "64MiB", max_running: int = 256) -> LLM:
    """An engine with cache space for one and a half prompts."""
    options: dict[str, Any] = {"cache_positions": 240, "prefix_spill": spill, "spill_limit": limit}
    return LLM(model, tokenizer=ByteTokenizer(), max_running=max_running, **options)


def _generate(llm: LLM, prompt: str, namespace: str = "") -> list[int]:
    tokens: list[int] = llm.generate(prompt, **{**_OPTIONS, "namespace": namespace}).tokens
    return tokens


def _cached_bytes(llm: LLM, prompt: str) -> bytes:
    """The cached keys and values of a prompt's whole blocks."""
    runner = llm.engine.runners["target"]
    slots = runner.prefixes.match(llm.encode(prompt), (-1, ""))
    return (
        read_slots(runner.pool.cache, slots) if len(slots) == len(prompt) // BLOCK * BLOCK else b""
    )


def _checks(model: Any, spill: Any) -> Iterator[Check]:
    """Generates, evicts the prefix with other prompts, and generates again."""
    where = "memory" if spill == "memory" else "disk"
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as alone:
        expected = [_generate(alone, prompt) for prompt in (_FIRST, *_OTHERS)]
    with _open(model, spill) as llm:
        prefixes = llm.engine.runners["target"].prefixes
        texts = [_generate(llm, _FIRST)]
        before = _cached_bytes(llm, _FIRST)
        texts += [_generate(llm, prompt) for prompt in _OTHERS]
        yield Check(f"nothing is restored unless requested, {where}", prefixes.num_restored == 0)
        _generate(llm, _FIRST, "another tenant")
        yield Check(f"no prefix is shared between tenants, {where}", prefixes.num_restored == 0)
        rows = llm.engine.runners["target"].num_rows
        again = _generate(llm, _FIRST)
        spared = len(_FIRST) // BLOCK * BLOCK
        yield Check(
            f"the whole prefix is restored, {where}",
            prefixes.num_restored == spared,
            f"{prefixes.num_restored} of {spared} tokens",
        )
        computed = llm.engine.runners["target"].num_rows - rows
        yield Check(
            f"a restored prefix is not recomputed, {where}", computed == len(_FIRST) - spared + 11
        )
        after = _cached_bytes(llm, _FIRST)
        yield Check(f"restored bit by bit, {where}", len(before) > 0 and before == after)
        yield Check(f"the text is the same, {where}", texts == expected and again == texts[0])
        llm.engine.check_integrity()


@oracle_test("prefix-spill")
def prefix_spill() -> Iterator[Check]:
    """A cache with space for one and a half prompts, used for four prompts and then for the first
    again."""
    model = tiny_model(positions=512)
    yield from _checks(model, "memory")
    with tempfile.TemporaryDirectory() as folder:
        yield from _checks(model, folder)
        files = sorted(Path(folder).rglob("*.block"))
        private = all(file.stat().st_mode & 0o077 == 0 for file in files)
        yield Check("files are complete and private", bool(files) and private)
        left = [file for file in Path(folder).rglob("*") if file.is_file() and file not in files]
        yield Check("no partly written files are left", not left)
        with _open(model, folder) as llm:
            text = _generate(llm, _FIRST)
            num_restored = llm.engine.runners["target"].prefixes.num_restored
            yield Check(
                "the next process restores the files", num_restored == len(_FIRST) // BLOCK * BLOCK
            )
        for number, file in enumerate(sorted(Path(folder).rglob("*.block"))):
            data = bytearray(file.read_bytes())
            if number % 2:
                data[len(data) // 2] ^= 1
            else:
                del data[-7:]
            file.write_bytes(data)
        with _open(model, folder) as llm:
            again = _generate(llm, _FIRST)
            restored = llm.engine.runners["target"].prefixes.num_restored
            yield Check("damaged blocks are ignored", restored == 0 and again == text)
        with _open(tiny_model(positions=512, seed=1), folder) as llm:
            _generate(llm, _FIRST)
            strange = llm.engine.runners["target"].prefixes.num_restored
            yield Check("another model's blocks are ignored", strange == 0)
    yield from _bounded()
    yield from _kept_for_the_queue(model)
    yield from _read_ahead(model)
    yield from _layer_by_layer()
    yield _evictions()


def _kept_for_the_queue(model: Any) -> Iterator[Check]:
    """One request runs at a time, and the last of four that wait needs the blocks that were used
    least recently. They are kept, and the text is the same."""
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as alone:
        expected = [_generate(alone, prompt) for prompt in (*_OTHERS, _FIRST)]
    with _open(model, "memory", 25 * _block_bytes(model), max_running=1) as llm:
        _generate(llm, _FIRST)
        answers = llm.generate([*_OTHERS, _FIRST], **_OPTIONS)
        num_restored = llm.engine.runners["target"].prefixes.num_restored
        llm.engine.check_integrity()
    yield Check("the text is the same from a queue", [one.tokens for one in answers] == expected)
    whole = len(_FIRST) // BLOCK * BLOCK
    name = "what a waiting request needs is kept"
    yield Check(name, num_restored == whole, f"{num_restored} of {whole} tokens")


def _read_ahead(model: Any) -> Iterator[Check]:
    """Files are read by another thread while the request waits, each once. What reads them gets up
    to a minute, since the passes of the request before are short."""
    with tempfile.TemporaryDirectory() as folder:
        with _open(model, folder) as llm:
            _generate(llm, _FIRST)
        with _open(model, folder, max_running=1) as llm:
            prefixes = llm.engine.runners["target"].prefixes
            spill: Any = prefixes.spill
            readers: list[str] = []
            read, expect = spill._read, spill.expect

            def recorded(key: bytes) -> bytes | None:
                readers.append(threading.current_thread().name)
                return read(key)

            def patient(*given: Any) -> None:
                expect(*given)
                end = time.monotonic() + 60
                while spill._wanted and time.monotonic() < end:
                    time.sleep(0.001)

            spill._read, spill.expect = recorded, patient
            llm.generate([_OTHERS[0], _FIRST], **_OPTIONS)
            num_blocks = prefixes.num_restored // BLOCK
        ahead = readers.count("anydecode-spill-reader")
        detail = f"{ahead} of {len(readers)} reads, {num_blocks} blocks"
        is_ahead = ahead == len(readers) == num_blocks == len(_FIRST) // BLOCK
        yield Check("blocks are read while their request waits", is_ahead, detail)


def _layer_by_layer() -> Iterator[Check]:
    """A pass over four layers. The loading of a layer waits until the pass has reached the layer
    before; if it never does, loading continues after 20 seconds."""
    model: Any = tiny_model(layers=4, positions=512)
    with _open(model, "memory") as llm:
        # By these costs, passes are long enough to be divided.
        llm.cost_model = FixedCosts(lambda rows, context: 1.0)
        pool, prefixes = llm.engine.runners["target"].pool, llm.engine.runners["target"].prefixes
        text = _generate(llm, _FIRST)
        before = prefixes.match(llm.encode(_FIRST), (-1, ""))
        expected = [read_layer(pool.cache, before, layer) for layer in range(4)]
        for prompt in _OTHERS:
            _generate(llm, prompt)
        come = [threading.Event() for _ in range(4)]
        in_time, threads, loaded = list[bool](), set[str](), list[bool]()
        run, load_layer = model.run, LayerLoad.load_layer

        def gated(self: LayerLoad, layer: int) -> None:
            threads.add(threading.current_thread().name)
            if layer and all(in_time):
                in_time.append(come[layer - 1].wait(20))
            load_layer(self, layer)

        def recorded(rows: Any, cache: Any, output_spec: Any) -> Any:
            layer = int(rows.start[0])
            if not come[layer].is_set():
                slots = rows.tables[0][: len(before)]
                loaded.append(read_layer(cache, slots, layer) == expected[layer])
                come[layer].set()
            return run(rows, cache, output_spec)

        model.run, LayerLoad.load_layer = recorded, gated  # type: ignore[method-assign]
        try:
            again = _generate(llm, _FIRST)
        finally:
            LayerLoad.load_layer = load_layer  # type: ignore[method-assign]
        num_restored = prefixes.num_restored
    name = "a layer is loaded while the layer before is computed"
    yield Check(name, in_time == [True] * 3 and len(threads) == 1, f"{in_time}, {threads}")
    yield Check("a layer is computed after it is loaded", loaded == [True] * 4, str(loaded))
    is_equal = again == text and num_restored == len(before) > 0
    yield Check("the text is the same, layer by layer", is_equal)


def read_layer(cache: Any, slots: Any, layer: int) -> bytes:
    """The keys and values of some slots in one layer."""
    return bytes(cache.keys[layer][slots].tobytes() + cache.values[layer][slots].tobytes())


def _evictions() -> Check:
    """Random blocks and queues against the definition: first the least recently used block that no
    request needs, then one that the last request needs."""
    random, wrong = np.random.default_rng(3), 0
    spill = MemorySpill(50)
    used: list[int] = []  # the least recently used first
    queue: list[list[int]] = []
    for _ in range(400):
        number, action = int(random.integers(12)), random.random()
        if action < 0.1:
            queue = [random.integers(12, size=4).tolist() for _ in range(random.integers(5))]
            spill.expect([[bytes([one]) for one in keys] for keys in queue])
        elif action < 0.4:
            spill.get(bytes([number]))
            used = [*(one for one in used if one != number), *[number] * (number in used)]
        else:
            spill.put(bytes([number]), b"0123456789")
            used = [*(one for one in used if one != number), number]
            while len(used) > 5:
                first = {one: min(i for i, keys in enumerate(queue) if one in keys)
                         for one in used if any(one in keys for keys in queue)}  # fmt: skip
                free = [one for one in used if one not in first]
                used.remove(free[0] if free else max(used, key=lambda one: first[one]))  # noqa: B023
        wrong += [one in used for one in range(12)] != [bytes([one]) in spill for one in range(12)]
    return Check("blocks are dropped by the queue, as published", wrong == 0, f"{wrong} of 400")


def _block_bytes(model: Any) -> int:
    """The size of a block of the prefix cache."""
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=240) as llm:
        cache = llm.engine.runners["target"].pool.cache
        return len(read_slots(cache, np.arange(BLOCK, dtype=np.int32)))


def _bounded() -> Iterator[Check]:
    """Ten blocks of 100 bytes where three fit: the most recently used stay."""
    with tempfile.TemporaryDirectory() as folder:
        spill = DiskSpill(Path(folder), 3 * 150 + 20)
        keys = [bytes([number]) * 32 for number in range(10)]
        block = np.arange(100, dtype=np.uint8).tobytes()
        for key in keys[:3]:
            spill.put(key, block)
        spill.close()
        spill = DiskSpill(Path(folder), 3 * 150 + 20)
        are_equal = [spill.get(key) == block for key in keys[:3]]
        spill.get(keys[0])
        for key in keys[3:5]:
            spill.put(key, block)
        spill.close()
        here = [key in spill for key in keys[:5]]
        files = len(list(Path(folder).rglob("*.block")))
        yield Check("blocks outlive the process", are_equal == [True] * 3)
        yield Check(
            "the most recently used blocks stay",
            here == [True, False, False, True, True],
            str(here),
        )
        yield Check("the size limit is kept", files == 3 and spill.num_bytes <= spill.limit)
