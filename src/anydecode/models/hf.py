"""Runs any `transformers` causal language model through the `Model` protocol."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import numpy as np
import torch

from anydecode.errors import UnsupportedCombinationError, one_line
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.spec import LayerSpec, ModelSpec

#: Maximum number of sequences whose keys and values are cached between passes.
MAX_CACHED = 32
# A cached sequence is cropped in place by at most this many tokens. Beyond that it is copied first,
# because another running request probably shares its prefix.
_MAX_REWIND = 64
#: Layers of caches to which any number of tokens can be added.
_KEY_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class HuggingFaceModel:
    """Runs an `AutoModelForCausalLM`.

    The engine's cache stores token ids. For each row, the tokens it attends to are read from the
    cache, and the model runs on those that are not in its own key-value cache. Chains, forks,
    rewinds and token trees are supported. Each branch of a tree is a separate forward pass, so a
    tree costs as much as its branches.

    Compared with the engine's own models, results are not batch-invariant: the last bits of a row
    may depend on how the tokens before it were split into passes. Rows that run part of the layers,
    take embeddings or hidden states as input, attend to later positions, have evicted positions,
    use adapters or return hidden states raise `UnsupportedCombinationError`.
    """

    #: Whether passes return hidden states.
    has_hidden = False

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.name: str = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.spec = _spec(model)
        settings = getattr(model, "generation_config", None)
        self.generation_config = {} if settings is None else settings.to_diff_dict()
        # Hybrids that count positions by the cache of their first layer count wrongly if it is
        # recurrent.
        self._takes_positions = "position_ids" in signature(model.forward).parameters
        self._cached: list[tuple[np.ndarray, Any]] = []

    def new_cache(self, num_slots: int) -> KeyValues:
        """A cache of one token id for each of `num_slots` positions."""
        return KeyValues([np.zeros((num_slots, 1, 1), np.int64)], [np.empty(0)])

    def clear_cache(self) -> None:
        """Drop the keys and values of earlier passes; needed after the weights have changed."""
        self._cached.clear()

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Logits of the requested rows.

        Raises:
            UnsupportedCombinationError: The rows need what the class does not support.
        """
        self._check(rows, output_spec)
        tokens = cache.keys[0][:, 0, 0]
        tokens[rows.slots] = rows.tokens
        paths = [tokens[_visible_slots(rows, row)] for row in output_spec.logits.tolist()]
        logits = np.empty((len(paths), self.spec.vocab_size), np.float32)
        remaining = sorted(range(len(paths)), key=lambda index: -len(paths[index]))
        while remaining:
            path = paths[remaining[0]]
            covered = [i for i in remaining if np.array_equal(paths[i], path[: len(paths[i])])]
            start = min(len(paths[i]) for i in covered) - 1
            path_logits = self._path_logits(path, start)
            for index in covered:
                logits[index] = path_logits[len(paths[index]) - 1 - start]
            remaining = [index for index in remaining if index not in covered]
        return Output(logits, {})

    def head(self, hidden: np.ndarray) -> np.ndarray:
        raise UnsupportedCombinationError(
            f"{self.name} runs through transformers and cannot compute logits of hidden states"
        )

    @torch.inference_mode()
    def _path_logits(self, path: np.ndarray, start: int) -> np.ndarray:
        """Logits float32 `[len(path) - start, vocab_size]` of the tokens `path[start:]`."""
        num_cached, past = self._take_cached(path, start)
        ids = torch.from_numpy(path[num_cached:].astype(np.int64)).to(self.model.device)
        options = {}
        if self._takes_positions:
            positions = torch.arange(num_cached, len(path), device=ids.device)
            options["position_ids"] = positions[None]
        try:
            output = self.model(
                input_ids=ids[None], past_key_values=past, use_cache=True, **options
            )
        except Exception as error:  # each architecture has errors of its own
            raise UnsupportedCombinationError(
                f"{self.name} runs through transformers, which fails on these tokens:"
                f" {one_line(error)}"
            ) from error
        num_rows = output.logits.shape[1]
        if num_rows != ids.numel():
            raise UnsupportedCombinationError(
                f"{self.name} runs through transformers and cannot be used: it gives logits of"
                f" {num_rows} positions for {ids.numel()} tokens"
            )
        past = getattr(output, "past_key_values", None)
        if past is not None:
            self._cached.insert(0, (path.copy(), past))
            del self._cached[MAX_CACHED:]
        logits: np.ndarray = output.logits[0, start - num_cached :].float().cpu().numpy()
        return logits

    def _take_cached(self, path: np.ndarray, limit: int) -> tuple[int, Any]:
        """The number of leading tokens of `path` that are cached, at most `limit`, and their keys
        and values."""
        best, shared = None, 0
        for index, (tokens, _) in enumerate(self._cached):
            length = _common_prefix(tokens, path)
            if length > shared:
                best, shared = index, length
        num_cached = min(shared, limit)
        if best is None or num_cached == 0:
            return 0, None
        tokens, past = self._cached[best]
        if len(path) - num_cached > 1 and not _stores_keys(past, *_KEY_LAYERS):
            return 0, None
        if num_cached == len(tokens):
            del self._cached[best]
            return num_cached, past
        if not _stores_keys(past, "DynamicLayer"):
            return 0, None
        if len(tokens) - num_cached > _MAX_REWIND:
            past = copy.deepcopy(past)
        else:
            del self._cached[best]
        past.crop(num_cached - len(tokens))
        return num_cached, past

    def _check(self, rows: Rows, output_spec: OutputSpec) -> None:
        is_partial = bool((rows.start != 0).any() or (rows.stop != self.spec.num_layers).any())
        unsupported = {
            "run part of its layers": is_partial,
            "take embeddings or hidden states as input": bool((rows.tokens < 0).any()),
            "score rows that are not stored": bool((rows.slots < 0).any()),
            "return hidden states": bool(output_spec.hidden),
            "use adapters": rows.adapters is not None and bool((rows.adapters >= 0).any()),
            "run variants of its layers": rows.variant is not None,
            "keep different positions in each layer": any(t.ndim != 1 for t in rows.tables),
        }
        for what, is_requested in unsupported.items():
            if is_requested:
                raise UnsupportedCombinationError(
                    f"{self.name} runs through transformers and cannot {what}"
                )


def _visible_slots(rows: Rows, row: int) -> np.ndarray:
    """The slots of all positions that a row attends to, its own last."""
    start = rows.tail_start[row]
    tail = rows.tails[start : start + rows.tail_length[row]]
    slots = np.concatenate((rows.tables[rows.table[row]][: rows.prefix[row]], tail))
    is_complete = len(slots) == rows.positions[row] + 1 and not (slots < 0).any()
    if not is_complete or slots[-1] != rows.slots[row]:
        raise UnsupportedCombinationError(
            "a model run through transformers attends to every earlier position and to no other"
        )
    return slots


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """The length of the common prefix."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _stores_keys(past: Any, *kinds: str) -> bool:
    """Whether the cache has layers of these kinds and nothing else. Sliding windows and recurrent
    states cannot be cropped, and passes of several tokens start anew from most recurrent states."""
    layers: list[Any] = getattr(past, "layers", [])
    is_plain = type(past).__name__ == "DynamicCache" and bool(layers)
    return is_plain and all(type(layer).__name__ in kinds for layer in layers)


def _spec(model: Any) -> ModelSpec:
    """The spec that the engine needs; the layers' shapes are used only to compute memory."""
    config: Any = model.config.get_text_config()

    def first_value(*names: str, default: int) -> int:
        values = [getattr(config, name, None) for name in names]
        return next((int(value) for value in values if value is not None), default)

    hidden = first_value("hidden_size", "n_embd", "d_model", default=1)
    heads = first_value("num_attention_heads", "n_head", "num_heads", default=1)
    shape = Attention(
        num_heads=heads,
        num_kv_heads=first_value("num_key_value_heads", default=heads),
        head_dim=first_value("head_dim", default=max(1, hidden // heads)),
        scale=1.0,
    )
    head = model.get_output_embeddings()
    return ModelSpec(
        architecture=type(model).__name__,
        vocab_size=head.weight.shape[0] if head is not None else int(config.vocab_size),
        hidden_size=hidden,
        max_positions=first_value("max_position_embeddings", "n_positions", default=1 << 20),
        norm_eps=0.0,
        layers=(LayerSpec(shape, None),)
        * first_value("num_hidden_layers", "n_layer", "num_layers", default=1),
    )
