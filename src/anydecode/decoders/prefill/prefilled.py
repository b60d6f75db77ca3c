"""What methods share that compute a prompt's context their own way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from anydecode import catalogue
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.prompt_embeds import PromptEmbeds
from anydecode.scoring.score import Decoding, ScoreRequest
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span

WORKS = ("samplers", "constraints", "batches")


class Prefilled(Decoder):
    """Computes the context of all of a prompt but its last token, then lets `decoder` (a key of the
    catalogue) decode behind it. Nothing of such a context is shared with other requests."""

    takes_embeddings = True

    def __init__(self, decoder: str = "autoregressive") -> None:
        built = catalogue.build(decoder)
        if not isinstance(built, Decoder) or isinstance(built, Prefilled):
            raise InvalidRequestError(f"{decoder!r} does not decode behind a given context")
        self.inner = built
        self.runners, self.can_translate_vocab = built.runners, built.can_translate_vocab
        self.can_sample = built.can_sample

    def prepare(self, sequence: Sequence) -> None:
        if sequence.companion_prompts or sequence.sampler.capture_layers or sequence.adapter >= 0:
            raise UnsupportedCombinationError(
                "a thinned prompt does not go with guidance, DoLa or adapters"
            )
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        if len(sequence.prompt) > 1:
            context = sequence.context()
            context.truncate(0)
            context.reusable = False
            yield from self.prefill(sequence, context)
        yield from self.inner.decode(sequence)

    @abstractmethod
    def prefill(self, sequence: Sequence, context: SequenceCache) -> Decoding:
        """Fill `context` with all but the last token of the prompt."""


def given(sequence: Sequence) -> PromptEmbeds | None:
    """The embeddings in the prompt, if it has some."""
    found: PromptEmbeds | None = sequence.state.get("embedded")
    return found


def inputs(
    sequence: Sequence, context: SequenceCache, start: int, stop: int
) -> torch.Tensor | None:
    """What the prompt's positions `start..stop` start from, float32 `[rows, hidden_size]`; None if
    they are all tokens."""
    prompt_embeds = given(sequence)
    if prompt_embeds is None or prompt_embeds.stop <= start or stop <= prompt_embeds.first:
        return None
    embed = getattr(context.pool.model, "embed", None)
    if embed is None:
        raise UnsupportedCombinationError("this model's embeddings cannot be read")
    rows: torch.Tensor = embed(np.array(sequence.prompt[start:stop])).clone()
    first, last = max(start, prompt_embeds.first), min(stop, prompt_embeds.stop)
    rows[first - start : last - start] = prompt_embeds.rows[
        first - prompt_embeds.first : last - prompt_embeds.first
    ]
    return rows


def plain(sequence: Sequence, context: SequenceCache, start: int, stop: int) -> ScoreRequest:
    """Positions `start..stop` of the prompt, through all layers."""
    tokens = sequence.prompt[start:stop]
    return sequence.score(tokens, embeddings=inputs(sequence, context, start, stop))


@dataclass(eq=False)
class SparseSpan(Span):
    """Rows at `positions` of the prompt's `length` positions, from layer `start` to `stop`; they
    see
    only one another. The positions between are holes to them. `ended` is their state after `stop`,
    if that is not the last layer."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # ascending
    length: int = 0

    divisible = True

    def __post_init__(self) -> None:
        self._ended: list[torch.Tensor] = []
        self._visible = np.empty(0, np.int32)

    @property
    def ended(self) -> torch.Tensor:
        return torch.cat(self._ended)

    def reserve(self, count: int) -> None:
        if self.context.length < self.length:
            self.context.append(self.length - self.context.length)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        stop, positions = at + count, self.positions[self.done : self.done + count]
        self._inputs(rows, at, count)
        self._visible = np.full(self.length, -1, np.int32)
        self._visible[self.positions] = self.context.table[self.positions]
        rows.table[at:stop] = len(rows.tables)
        rows.tables.append(self._visible)
        rows.slots[at:stop] = self.context.table[positions]
        rows.positions[at:stop] = positions
        rows.prefix[at:stop] = positions + 1
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        if hidden is not None:
            self._ended.append(hidden.clone())
        self.done += count


def walk(
    sequence: Sequence,
    context: SequenceCache,
    positions: np.ndarray,
    state: torch.Tensor,
    layers: tuple[int, int],
    watched: Seq[int],
    taps: Seq[int],
) -> tuple[SparseSpan, ScoreRequest]:
    """Rows at `positions`, from their `state` before layer `layers[0]` to after `layers[1] - 1`,
    and
    the score to yield for them. Of the rows `watched` (indices into `positions`) the states
    before the layers `taps` come back."""
    span = SparseSpan(
        context, [-1] * len(positions), *layers, list(watched), tuple(taps), False, state,
        positions=positions, length=len(sequence.prompt) - 1,
    )  # fmt: skip
    watched_positions = (
        positions[np.asarray(watched, np.int64)] if len(watched) else np.empty(0, np.int32)
    )
    parents = [row - 1 for row in range(len(watched_positions))]
    return span, ScoreRequest(
        sequence, TARGET, [[span]], watched_positions, parents, [-1] * len(watched_positions)
    )


def finish(sequence: Sequence, context: SequenceCache) -> None:
    """All rows have run as far as they will."""
    context.tokens = [-1] * context.length
    context.partials = []
    context.reusable = False


def compact(context: SequenceCache, start: int, kept: list[torch.Tensor]) -> None:
    """Keep of the positions from `start` to the end only `kept[layer]`, int64 `[kv_heads, n]`
    (counted from `start`, ascending): they move into the first n slots; the rest is given back.
    Keys carry their positions within them, so it does not matter where they lie."""
    cache, count = context.pool.cache, kept[0].shape[1]
    slots = torch.from_numpy(context.table[start:].astype(np.int64))
    for layer, positions in enumerate(kept):
        for store in (cache.keys[layer], cache.values[layer]):
            heads = torch.arange(positions.shape[0])[:, None].expand_as(positions)
            rows = store[slots[positions].to(store.device), heads.to(store.device)]
            store[slots[:count].to(store.device)] = rows.transpose(0, 1).contiguous()
    context.evict(range(start + count, context.length))


def check_float(context: SequenceCache) -> None:
    """Raise `UnsupportedCombinationError` where keys and values cannot be taken as numbers."""
    if any(not one.is_floating_point() or one.ndim != 3 for one in context.pool.cache.keys):
        raise UnsupportedCombinationError("this works on a cache of float numbers only")


def check_thinnable(context: SequenceCache) -> None:
    """Raise `UnsupportedCombinationError` where positions cannot be thinned head by head."""
    check_float(context)
    if any(layer.attention.window for layer in context.pool.model.spec.layers):
        raise UnsupportedCombinationError("layers with a sliding window cannot be thinned")
