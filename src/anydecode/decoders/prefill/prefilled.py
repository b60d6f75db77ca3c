"""The base class of methods that compute the prompt's key-value cache their own way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from anydecode import catalogue
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.attention_probe import check_float
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.host import select, store
from anydecode.kernels.interface import Rows
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.prompt_embeds import PROMPT_EMBEDS, PromptEmbeds
from anydecode.scoring.score import Decoding, ScoreRequest
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span

WORKS_WITH = ("samplers", "constraints", "batches")


class Prefilled(Decoder):
    """Fills the cache with all of the prompt but its last token, then generates with `decoder`.

    Such a cache is never shared with other requests.

    Args:
        decoder: The catalogue key of the decoder that generates.
    """

    def __init__(self, decoder: str = "autoregressive") -> None:
        built = catalogue.build_as(decoder, "a decoder", Decoder)
        if isinstance(built, Prefilled) or not built.requirements.causal:
            raise InvalidRequestError(
                f"{decoder!r} is not a decoder that can continue from a given context"
            )
        self.inner = built
        self.requirements = replace(
            built.requirements, takes_embeddings=True, attention_only=(TARGET,)
        )

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.capture_layers or sequence.adapter >= 0:
            raise UnsupportedCombinationError(
                "compressed prompts do not work with guidance, DoLa or adapters"
            )
        given = sequence.state.get(PROMPT_EMBEDS)
        if given is not None and len(given) > 1:
            raise UnsupportedCombinationError(
                "methods that compress prompts take one block of embeddings; the prompt has several"
            )
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        if len(sequence.prompt) > 1:
            kv_cache = sequence.kv_cache()
            kv_cache.truncate(0)
            kv_cache.reusable = False
            yield from self.prefill(sequence, kv_cache)
        yield from self.inner.decode(sequence)

    @abstractmethod
    def prefill(self, sequence: Sequence, kv_cache: SequenceCache) -> Decoding:
        """Fill `kv_cache` with all but the last token of the prompt; yields score requests."""


def prompt_embeds_of(sequence: Sequence) -> PromptEmbeds | None:
    """The embeddings given with the prompt, or None."""
    given = sequence.state.get(PROMPT_EMBEDS)
    return given[0] if given else None


def input_embeddings(
    sequence: Sequence, kv_cache: SequenceCache, start: int, stop: int
) -> np.ndarray | None:
    """The input embeddings of the prompt's positions `start..stop`, float32 `[rows, hidden_size]`.

    None if all of them are tokens.
    """
    prompt_embeds = prompt_embeds_of(sequence)
    if prompt_embeds is None or prompt_embeds.stop <= start or stop <= prompt_embeds.first:
        return None
    embed = getattr(kv_cache.pool.model, "embed", None)
    if embed is None:
        raise UnsupportedCombinationError("this model's embeddings cannot be read")
    rows: np.ndarray = embed(np.array(sequence.prompt[start:stop]))
    first, last = max(start, prompt_embeds.first), min(stop, prompt_embeds.stop)
    rows[first - start : last - start] = prompt_embeds.rows[
        first - prompt_embeds.first : last - prompt_embeds.first
    ]
    return rows


def score_prompt(
    sequence: Sequence, kv_cache: SequenceCache, start: int, stop: int
) -> ScoreRequest:
    """A score request for positions `start..stop` of the prompt, through all layers."""
    tokens = sequence.prompt[start:stop]
    return sequence.score(tokens, embeddings=input_embeddings(sequence, kv_cache, start, stop))


@dataclass(eq=False)
class SparseSpan(Span):
    """Rows at some positions of the prompt, through layers `start..stop`.

    The rows see only one another; the other positions are masked out.

    Attributes:
        positions: The positions of the rows, int32, ascending.
        length: The number of positions that the prompt takes in the cache.
    """

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    length: int = 0

    divisible = True

    def __post_init__(self) -> None:
        self._output_states: list[np.ndarray] = []
        self._visible = np.empty(0, np.int32)

    @property
    def output_states(self) -> np.ndarray:
        """The hidden states after the layers, `[rows, hidden_size]`, if `stop` is not the last."""
        return np.concatenate(self._output_states)

    def reserve(self, count: int) -> None:
        if self.kv_cache.length < self.length:
            self.kv_cache.append(self.length - self.kv_cache.length)

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        stop, positions = at + count, self.positions[self.done : self.done + count]
        self._fill_inputs(rows, at, count)
        self._visible = np.full(self.length, -1, np.int32)
        self._visible[self.positions] = self.kv_cache.table[self.positions]
        rows.table[at:stop] = len(rows.tables)
        rows.tables.append(self._visible)
        rows.slots[at:stop] = self.kv_cache.table[positions]
        rows.positions[at:stop] = positions
        rows.prefix[at:stop] = positions + 1
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        if hidden is not None:
            self._output_states.append(hidden.copy())
        self.done += count


def score_layer_range(
    sequence: Sequence,
    kv_cache: SequenceCache,
    positions: np.ndarray,
    state: np.ndarray,
    layers: tuple[int, int],
    captured_rows: Seq[int],
    capture_layers: Seq[int],
) -> tuple[SparseSpan, ScoreRequest]:
    """A span that runs rows at `positions` through some layers, and the score request for it.

    Args:
        sequence: The sequence of the prompt.
        kv_cache: The cache to fill.
        positions: The positions of the rows, int32, ascending.
        state: The hidden states of the rows before the first of the layers.
        layers: The first layer, and the one after the last.
        captured_rows: Indices into `positions` of the rows whose hidden states are returned.
        capture_layers: The layers before which those hidden states are taken.
    """
    span = SparseSpan(
        kv_cache, [-1] * len(positions), *layers, list(captured_rows), tuple(capture_layers), False,
        state, positions=positions, length=len(sequence.prompt) - 1,
    )  # fmt: skip
    captured_positions = (
        positions[np.asarray(captured_rows, np.int64)]
        if len(captured_rows)
        else np.empty(0, np.int32)
    )
    parents = [row - 1 for row in range(len(captured_positions))]
    return span, ScoreRequest(
        sequence, TARGET, [[span]], captured_positions, parents, [-1] * len(captured_positions)
    )


def mark_computed(sequence: Sequence, kv_cache: SequenceCache) -> None:
    """Mark the cache as filled by rows that other requests cannot reuse."""
    kv_cache.tokens = [-1] * kv_cache.length
    kv_cache.partials = []
    kv_cache.reusable = False


def compact(kv_cache: SequenceCache, start: int, kept_positions: list[np.ndarray]) -> None:
    """Keep only some of the positions from `start` to the end, per layer and key head.

    Their keys and values move into the first n slots, and the other slots are freed. Rotary
    embeddings are already applied to the keys, so their slots do not matter.

    Args:
        kv_cache: The cache to compact.
        start: The first position of the part.
        kept_positions: For each layer int64 `[kv_heads, n]`, counted from `start`, ascending.
    """
    cache, count = kv_cache.pool.cache, kept_positions[0].shape[1]
    slots = kv_cache.table[start:]
    for layer, positions in enumerate(kept_positions):
        for array in (cache.keys[layer], cache.values[layer]):
            rows = select(array, slots)
            store(array, slots[:count], np.take_along_axis(rows, positions.T[..., None], 0))
    kv_cache.evict(range(start + count, kv_cache.length))


def check_compressible(pool: KVPool) -> None:
    """Raise `UnsupportedCombinationError` if single positions cannot be removed from a cache."""
    check_float(pool)
    layers = pool.model.spec.layers
    shapes = [layer.attention for layer in layers if layer.attention is not None]
    # Keys move to the slots of other positions.
    for is_met, kind in (
        (any(shape.window is not None for shape in shapes), "sliding window attention"),
        (any(shape.chunk is not None for shape in shapes), "chunked attention"),
        (any(shape.slopes is not None for shape in shapes), "linear biases of attention (ALiBi)"),
    ):
        if is_met:
            raise UnsupportedCombinationError(f"prompts cannot be compressed in models with {kind}")
