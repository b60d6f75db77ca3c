"""Any `transformers` causal language model, as it is, behind the `Model` protocol."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.spec import LayerSpec, ModelSpec

#: Sequences whose keys and values are kept between passes.
MAX_KEPT = 32
# Going back by at most this many tokens edits a kept sequence; going back further copies it, for
# then another sequence that shares its start is likely still being decoded.
_REWIND = 64


class HuggingFaceModel:
    """Runs an `AutoModelForCausalLM` over paths of tokens.

    The cache holds token ids; each row's visible path is read back from it and the model is run on
    what it has not seen of that path. Chains, forks, rewinds and token trees are right; each branch
    of a tree is a run of its own, so a tree is not cheaper than its branches.

    Fewer guarantees than with the engine's own models: results are not batch-invariant (a row may
    differ in its last bits with how the text before it was cut into passes), and rows cannot run
    part of the layers, enter as embeddings or hidden states, see what comes after them, leave holes
    in their context, carry adapters or give back hidden states: `UnsupportedCombinationError`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.name: str = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.spec = _spec(model)
        self._kept: list[tuple[np.ndarray, Any]] = []

    def new_cache(self, num_slots: int) -> KeyValues:
        """One token id for each of `num_slots` positions."""
        return KeyValues([torch.zeros(num_slots, 1, 1, dtype=torch.int64)], [torch.empty(0)])

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Logits of the rows wanted. Raises `UnsupportedCombinationError` as the class says."""
        self._check(rows, output_spec)
        tokens = cache.keys[0][:, 0, 0].numpy()
        tokens[rows.slots] = rows.tokens
        paths = [tokens[_path(rows, row)] for row in output_spec.logits.tolist()]
        logits = torch.empty(len(paths), self.spec.vocab_size)
        waiting = sorted(range(len(paths)), key=lambda index: -len(paths[index]))
        while waiting:
            path = paths[waiting[0]]
            covered = [i for i in waiting if np.array_equal(paths[i], path[: len(paths[i])])]
            start = min(len(paths[i]) for i in covered) - 1
            scores = self._score(path, start)
            for index in covered:
                logits[index] = scores[len(paths[index]) - 1 - start]
            waiting = [index for index in waiting if index not in covered]
        return Output(logits, {})

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        raise UnsupportedCombinationError(f"{self.name} cannot score hidden states from outside")

    @torch.inference_mode()
    def _score(self, path: np.ndarray, start: int) -> torch.Tensor:
        """Logits float32 `[len(path) - start, vocab_size]` of the path's tokens from `start` on."""
        known, past = self._take(path, start)
        ids = torch.from_numpy(path[known:].astype(np.int64)).to(self.model.device)
        output = self.model(input_ids=ids[None], past_key_values=past, use_cache=True)
        past = getattr(output, "past_key_values", None)
        if past is not None:
            self._kept.insert(0, (path.copy(), past))
            del self._kept[MAX_KEPT:]
        scores: torch.Tensor = output.logits[0, start - known :]
        return scores.float().cpu()

    def _take(self, path: np.ndarray, limit: int) -> tuple[int, Any]:
        """Keys and values of the first tokens of `path`, at most `limit`, and how many."""
        best, shared = None, 0
        for index, (tokens, _) in enumerate(self._kept):
            length = _common(tokens, path)
            if length > shared:
                best, shared = index, length
        known = min(shared, limit)
        if best is None or known == 0:
            return 0, None
        tokens, past = self._kept[best]
        if known == len(tokens):
            del self._kept[best]
            return known, past
        if not _can_crop(past):
            return 0, None
        if len(tokens) - known > _REWIND:
            past = copy.deepcopy(past)
        else:
            del self._kept[best]
        past.crop(known - len(tokens))
        return known, past

    def _check(self, rows: Rows, output_spec: OutputSpec) -> None:
        partial = bool((rows.start != 0).any() or (rows.stop != self.spec.num_layers).any())
        refused = {
            "run part of its layers": partial,
            "enter embeddings or hidden states": bool((rows.tokens < 0).any()),
            "score rows it does not store": bool((rows.slots < 0).any()),
            "give back hidden states": bool(output_spec.hidden),
            "carry adapters": rows.adapters is not None and bool((rows.adapters >= 0).any()),
            "run layers in parallel": rows.parallel is not None,
            "keep different positions in each layer": any(t.ndim != 1 for t in rows.tables),
        }
        for what, asked in refused.items():
            if asked:
                raise UnsupportedCombinationError(
                    f"{self.name} runs through transformers and cannot {what}"
                )


def _path(rows: Rows, row: int) -> np.ndarray:
    """The slots of everything a row sees, itself last."""
    start = rows.tail_start[row]
    tail = rows.tails[start : start + rows.tail_length[row]]
    slots = np.concatenate((rows.tables[rows.table[row]][: rows.prefix[row]], tail))
    whole = len(slots) == rows.positions[row] + 1 and not (slots < 0).any()
    if not whole or slots[-1] != rows.slots[row]:
        raise UnsupportedCombinationError(
            "a model run through transformers sees all that comes before a token, and no more"
        )
    return slots


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """The length of the common start."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _can_crop(past: Any) -> bool:
    """Whether every layer keeps all positions; windows and states cannot go back."""
    layers: list[Any] = getattr(past, "layers", [])
    return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)


def _spec(model: Any) -> ModelSpec:
    """What the engine asks of a spec; the layers' shapes serve for counting memory alone."""
    config: Any = model.config.get_text_config()

    def first(*names: str, default: int) -> int:
        found = [getattr(config, name, None) for name in names]
        return next((int(value) for value in found if value is not None), default)

    hidden = first("hidden_size", "n_embd", "d_model", default=1)
    heads = first("num_attention_heads", "n_head", "num_heads", default=1)
    shape = Attention(
        num_heads=heads,
        num_kv_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=max(1, hidden // heads)),
        scale=1.0,
    )
    head = model.get_output_embeddings()
    return ModelSpec(
        architecture=type(model).__name__,
        vocab_size=head.weight.shape[0] if head is not None else int(config.vocab_size),
        hidden_size=hidden,
        max_positions=first("max_position_embeddings", "n_positions", default=1 << 20),
        norm_eps=0.0,
        layers=(LayerSpec(shape, None),)
        * first("num_hidden_layers", "n_layer", "num_layers", default=1),
    )
