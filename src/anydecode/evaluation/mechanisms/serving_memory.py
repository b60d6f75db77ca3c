"""Prefixes that leave the cache and come back: the same bytes, for the same tenant alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.tiny import tiny_model
from anydecode.memory.prefix import BLOCK, read_slots
from anydecode.memory.spill import DiskSpill
from anydecode.models.scripted import ByteTokenizer

_FIRST = "the first conversation, which is long enough to be worth keeping somewhere. " * 2
_OTHERS = tuple(letter * 180 for letter in "pqr")


def _open(model: Any, spill: Any, limit: str | int = "64MiB") -> LLM:
    """Room for one prompt and a half."""
    options: dict[str, Any] = {"cache_positions": 240, "prefix_spill": spill, "spill_limit": limit}
    return LLM(model, tokenizer=ByteTokenizer(), **options)


def _ask(llm: LLM, prompt: str, namespace: str = "") -> list[int]:
    tokens: list[int] = llm.generate(
        prompt, decoder="autoregressive", max_tokens=12, temperature=0.8, seed=3, ignore_eos=True,
        namespace=namespace,
    ).tokens  # fmt: skip
    return tokens


def _held(llm: LLM, prompt: str) -> bytes:
    """What the cache holds of a prompt's whole blocks."""
    runner = llm.engine.runners["target"]
    slots = runner.prefixes.match(llm.encode(prompt), (-1, ""))
    return (
        read_slots(runner.pool.cache, slots) if len(slots) == len(prompt) // BLOCK * BLOCK else b""
    )


def _tried(model: Any, spill: Any) -> Iterator[Check]:
    """Ask, push out, ask again."""
    where = "memory" if spill == "memory" else "disk"
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as alone:
        expected = [_ask(alone, prompt) for prompt in (_FIRST, *_OTHERS)]
    with _open(model, spill) as llm:
        prefixes = llm.engine.runners["target"].prefixes
        told = [_ask(llm, _FIRST)]
        before = _held(llm, _FIRST)
        told += [_ask(llm, prompt) for prompt in _OTHERS]
        yield Check(f"nothing is brought back unasked, {where}", prefixes.num_restored == 0)
        _ask(llm, _FIRST, "another tenant")
        yield Check(f"no tenant gets another's, {where}", prefixes.num_restored == 0)
        rows = llm.engine.runners["target"].num_rows
        again = _ask(llm, _FIRST)
        spared = len(_FIRST) // BLOCK * BLOCK
        yield Check(
            f"the whole prefix is brought back, {where}",
            prefixes.num_restored == spared,
            f"{prefixes.num_restored} of {spared} tokens",
        )
        computed = llm.engine.runners["target"].num_rows - rows
        yield Check(f"and not computed, {where}", computed == len(_FIRST) - spared + 11)
        after = _held(llm, _FIRST)
        yield Check(f"bit by bit, {where}", len(before) > 0 and before == after)
        yield Check(f"the text is the same, {where}", told == expected and again == told[0])
        llm.engine.check_integrity()


@mechanism("prefix-spill")
def prefix_spill() -> Iterator[Check]:
    """A cache for one prompt and a half, asked for four and then for the first again."""
    model = tiny_model(positions=512)
    yield from _tried(model, "memory")
    with tempfile.TemporaryDirectory() as folder:
        yield from _tried(model, folder)
        files = sorted(Path(folder).rglob("*.block"))
        private = all(file.stat().st_mode & 0o077 == 0 for file in files)
        yield Check("files are whole and private", bool(files) and private)
        left = [file for file in Path(folder).rglob("*") if file.is_file() and file not in files]
        yield Check("nothing half-written is left", not left)
        with _open(model, folder) as llm:
            told = _ask(llm, _FIRST)
            found = llm.engine.runners["target"].prefixes.num_restored
            yield Check("the next process finds them", found == len(_FIRST) // BLOCK * BLOCK)
        for number, file in enumerate(sorted(Path(folder).rglob("*.block"))):
            data = bytearray(file.read_bytes())
            if number % 2:
                data[len(data) // 2] ^= 1
            else:
                del data[-7:]
            file.write_bytes(data)
        with _open(model, folder) as llm:
            again = _ask(llm, _FIRST)
            restored = llm.engine.runners["target"].prefixes.num_restored
            yield Check("damaged blocks are not there", restored == 0 and again == told)
        with _open(tiny_model(positions=512, seed=1), folder) as llm:
            _ask(llm, _FIRST)
            strange = llm.engine.runners["target"].prefixes.num_restored
            yield Check("another model's blocks are not there", strange == 0)
    yield from _bounded()


def _bounded() -> Iterator[Check]:
    """Ten blocks of 100 bytes where three fit: the last used stay."""
    with tempfile.TemporaryDirectory() as folder:
        spill = DiskSpill(Path(folder), 3 * 150 + 20)
        keys = [bytes([number]) * 32 for number in range(10)]
        block = np.arange(100, dtype=np.uint8).tobytes()
        for key in keys[:3]:
            spill.put(key, block)
        spill.close()
        spill = DiskSpill(Path(folder), 3 * 150 + 20)
        kept = [spill.get(key) == block for key in keys[:3]]
        spill.get(keys[0])
        for key in keys[3:5]:
            spill.put(key, block)
        spill.close()
        here = [key in spill for key in keys[:5]]
        files = len(list(Path(folder).rglob("*.block")))
        yield Check("blocks outlive their process", kept == [True] * 3)
        yield Check("who was used last stays", here == [True, False, False, True, True], str(here))
        yield Check("no more than fits", files == 3 and spill.num_bytes <= spill.limit)
