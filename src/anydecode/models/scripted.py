"""Test doubles: a model whose logits are a known function of what each row really sees, and a
tokenizer of bytes. They find mistakes in trees, forks, evictions and restarts within milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anydecode.kernels.interface import Attention, KeyValues, Output, Rows, Want
from anydecode.models.spec import LayerSpec, ModelSpec

#: From the visible tokens (by position, holes left out) to logits `[vocab_size]`.
Script = Callable[[tuple[int, ...]], np.ndarray]

EOS, BOS, MASK = 256, 257, 258
BYTE_VOCABULARY = 259


class ScriptedModel:
    """Implements `Model`. Each layer's cache holds the token of every slot, so a row finds out what
    it sees through its own slots, layer by layer, as a real model would.

    Without a `script`, logits are pseudo-random in the last `memory` visible tokens and `seed`,
    sharpened towards repeating what stood there before so that texts have structure. `noise` adds
    pseudo-random error: two models with one seed and different noise often agree. Rows that stop
    early answer with noise of their own.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = BYTE_VOCABULARY,
        seed: int = 0,
        memory: int = 2,
        noise: float = 0.0,
        num_layers: int = 3,
        causal: bool = True,
        max_positions: int = 4096,
    ) -> None:
        layer = LayerSpec(Attention(1, 1, 1, 1.0), None)
        self.spec = ModelSpec(
            architecture="scripted",
            vocab_size=vocab_size,
            hidden_size=2,
            max_positions=max_positions,
            norm_eps=1e-5,
            layers=(layer,) * num_layers,
            causal=causal,
        )
        self.name = "scripted"
        self.script = script or self._random
        self.seed = seed
        self.memory = memory
        self.noise = noise
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def new_cache(self, num_slots: int) -> KeyValues:
        """One number per slot and layer: the token, or -1."""

        def empty() -> list[torch.Tensor]:
            return [torch.full((num_slots, 1, 1), -1.0) for _ in self.spec.layers]

        return KeyValues(empty(), empty())

    def run(self, rows: Rows, cache: KeyValues, want: Want) -> Output:
        """One pass: store every row's token in its layers, then answer."""
        held = [keys.numpy()[:, 0, 0] for keys in cache.keys]
        tokens = rows.tokens.copy()
        if rows.inputs is not None:
            fed = tokens < 0
            tokens[fed] = rows.inputs[torch.from_numpy(fed), 0].numpy().astype(np.int32)
        for row in np.flatnonzero(rows.slots >= 0):
            for layer in range(rows.start[row], rows.stop[row]):
                held[layer][rows.slots[row]] = tokens[row]
        logits = [self._answer(rows, int(row), held, int(tokens[row])) for row in want.logits]
        table = np.array(logits, np.float32).reshape(-1, self.spec.vocab_size)
        hidden = {
            layer: torch.stack([torch.tensor([float(tokens[row]), float(layer)]) for row in index])
            if len(index)
            else torch.empty(0, 2)
            for layer, index in want.hidden.items()
        }
        return Output(torch.from_numpy(table), hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, which know only their own token."""
        rows = [self.script((int(token),)) for token in hidden[:, 0]]
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, self.spec.vocab_size))

    def _answer(self, rows: Rows, row: int, held: list[np.ndarray], token: int) -> np.ndarray:
        stop = int(rows.stop[row])
        table = rows.tables[rows.table[row]]
        table = table[stop - 1] if table.ndim == 2 else table
        first = int(rows.tail_start[row])
        tail = rows.tails[first : first + rows.tail_length[row]]
        slots = np.concatenate([table[: rows.prefix[row]], tail])
        seen = tuple(held[stop - 1][slots[slots >= 0]].astype(int).tolist())
        if self.spec.causal and (not seen or seen[-1] != token):
            raise AssertionError(f"the row of token {token} does not see itself: {seen[-4:]}")
        if not self.spec.causal:
            seen = (*seen, int(rows.positions[row]))
        logits = self.script(seen)
        if self.noise:
            logits = logits + self.noise * self._draw((self.seed, 1, *seen[-4:]))
        if stop < self.spec.num_layers:
            logits = logits + self._draw((self.seed, 2, *seen[-4:])) / stop
        return logits

    def _random(self, seen: tuple[int, ...]) -> np.ndarray:
        key = (self.seed, 0, *seen[-self.memory :])
        if key not in self._rows:
            self._rows[key] = 2.5 * self._draw(key)
        logits = self._rows[key]
        if self.spec.causal and len(seen) > 8:
            logits = logits.copy()
            for place in range(1, len(seen)):
                if seen[place - 1] == seen[-1]:
                    logits[seen[place]] += 1.5
        return logits

    def _draw(self, key: tuple[int, ...]) -> np.ndarray:
        words = [part % (1 << 32) for part in key]
        return np.random.default_rng(words).normal(size=self.spec.vocab_size)


class ByteTokenizer:
    """Implements `Tokenizer`: one token per byte, and an end, a beginning and a mask."""

    vocab_size = BYTE_VOCABULARY
    eos_ids = frozenset({EOS})
    bos_id: int | None = None
    mask_id: int | None = MASK
    chat_template: str | None = "{role}: {content}"

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of the bytes among `ids`."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """One byte; none for special tokens."""
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        """A printable name."""
        names = {EOS: "<eos>", BOS: "<bos>", MASK: "<mask>"}
        return names.get(token) or repr(bytes([token]))[2:-1]

    def is_special(self, token: int) -> bool:
        return token >= 256

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """`role: content` line by line."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")
