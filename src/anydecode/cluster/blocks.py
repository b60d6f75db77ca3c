"""The blocks of prompts that workers give each other: from a prefix cache, and into the spill of
another one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from anydecode.api.prefix_spill import stable_name
from anydecode.engine.model_runner import ModelRunner
from anydecode.memory.prefix import BLOCK, block_digests, read_blocks
from anydecode.memory.spill import MemorySpill


class PromptBlocks:
    """The blocks of prompts in the prefix cache of a worker's engine. Used between passes.

    Args:
        runner: The engine's model runner. Without a spill it gets one in main memory.
        max_bytes: The size of that spill.
    """

    def __init__(self, runner: ModelRunner, max_bytes: int) -> None:
        self._runner = runner
        if runner.prefixes.spill is None:
            runner.prefixes.namespace_id = stable_name
            runner.prefixes.spill = MemorySpill(max_bytes)

    def cached(self, tokens: list[int], namespace: Hashable) -> list[bytes]:
        """The bytes of the cached blocks at the start of a prompt."""
        slots = self._runner.prefixes.match(tokens, (-1, namespace))
        return read_blocks(self._runner.pool.cache, slots)

    def num_cached(self, tokens: list[int], namespace: Hashable) -> int:
        """The number of these blocks."""
        return len(self._runner.prefixes.match(tokens, (-1, namespace))) // BLOCK

    def store(self, blocks: Mapping[bytes, bytes]) -> None:
        """Keep blocks of another worker, by digest."""
        spill = self._runner.prefixes.spill
        assert spill is not None
        for digest, block in blocks.items():
            spill.put(digest, block)


def digests_of(tokens: list[int], namespace: Hashable) -> list[bytes]:
    """The digests of the complete blocks of a prompt without an adapter."""
    name = stable_name((-1, namespace))
    assert name is not None
    return block_digests(name, tokens)
