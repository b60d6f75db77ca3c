"""Test doubles: a model whose logits are a known function of what each row really sees, and a
tokenizer of bytes. They find mistakes in trees, forks, evictions and restarts within milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.spec import LayerSpec, ModelSpec

#: From the visible tokens (by position, holes left out) to logits `[vocab_size]`.
Path = tuple[int, ...]
Script = Callable[[Path], np.ndarray]

EOS, BOS, MASK = 256, 257, 258
BYTE_VOCABULARY = 259

_HIDDEN_SIZE = 4


class ScriptedModel:
    """Implements `Model`. Each layer's cache holds the token of every slot, so a row finds out what
    it sees through its own slots, layer by layer, as a real model would; reading a slot in which
    nothing was stored is an error.

    `script` is a function, or a mapping from the last visible tokens (the longest suffix that is a
    key wins) to the logits of the tokens that stand out. Without one, logits are pseudo-random in
    the last `memory` visible tokens and `seed`, sharpened towards repeating what stood there before
    so that texts have structure. `noise` adds pseudo-random error: two models with one seed and
    different noise often agree. Rows that stop early, or whose layers run in parallel, answer with
    noise of their own. A causal row
    whose position is not the number of tokens before it gets other logits than one where it is.
    A hidden state names a path this model has met, so it means nothing to another model.
    """

    def __init__(
        self,
        script: Script | Mapping[Path, Mapping[int, float]] | None = None,
        vocab_size: int = BYTE_VOCABULARY,
        *,
        seed: int = 0,
        memory: int = 2,
        noise: float = 0.0,
        num_layers: int = 4,
        causal: bool = True,
        max_positions: int = 4096,
    ) -> None:
        layer = LayerSpec(Attention(1, 1, 1, 1.0), None)
        self.spec = ModelSpec(
            architecture="scripted",
            vocab_size=vocab_size,
            hidden_size=_HIDDEN_SIZE,
            max_positions=max_positions,
            norm_eps=1e-5,
            layers=(layer,) * num_layers,
            causal=causal,
        )
        self.name = "scripted"
        self.seed = seed
        self.memory = memory
        self.noise = noise
        self._table = script if isinstance(script, Mapping) else {}
        self.script: Script = (
            self._looked_up if self._table else script if callable(script) else self._random
        )
        self._rows: dict[Path, np.ndarray] = {}
        self._paths: dict[int, tuple[Path, int]] = {}

    def new_cache(self, num_slots: int) -> KeyValues:
        """One number per slot and layer: the token, or -1."""

        def empty() -> list[torch.Tensor]:
            return [torch.full((num_slots, 1, 1), -1.0) for _ in self.spec.layers]

        return KeyValues(empty(), empty())

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One pass: store every row's token in its layers, then look at what each row sees."""
        held = [keys.numpy()[:, 0, 0] for keys in cache.keys]
        tokens = rows.tokens.copy()
        if rows.inputs is not None:
            fed = tokens < 0
            tokens[fed] = rows.inputs[torch.from_numpy(fed), 0].numpy().astype(np.int32)
        for row in np.flatnonzero(rows.slots >= 0):
            for layer in range(rows.start[row], rows.stop[row]):
                held[layer][rows.slots[row]] = tokens[row]
        states = self._states(rows, held, tokens)
        last = rows.stop if rows.parallel is None else rows.stop - (rows.parallel > 0)
        answers = np.array([states(int(row), int(last[row])) for row in output_spec.logits])
        logits = self.head(torch.from_numpy(answers.reshape(-1, _HIDDEN_SIZE)))
        hidden = {
            layer: torch.from_numpy(
                np.array([states(int(row), layer) for row in index], np.float32).reshape(
                    -1, _HIDDEN_SIZE
                )
            )
            for layer, index in output_spec.hidden.items()
        }
        return Output(logits, hidden)

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """What stands for these tokens as an input: float32 `[n, hidden_size]`."""
        inputs = torch.zeros(len(tokens), _HIDDEN_SIZE)
        inputs[:, 0] = torch.from_numpy(np.asarray(tokens, np.float32))
        return inputs

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, vocab_size]` of hidden states."""
        rows = [
            self._answer(int(high) << 24 | int(low), int(layer))
            for _, layer, high, low in hidden.tolist()
        ]
        table = np.array(rows, np.float32).reshape(-1, self.spec.vocab_size)
        return torch.from_numpy(table)

    def _states(
        self, rows: Rows, held: list[np.ndarray], tokens: np.ndarray
    ) -> Callable[[int, int], np.ndarray]:
        """The state of a row after some layers: its token, the layers, and its path's number."""

        def state(row: int, layer: int) -> np.ndarray:
            number = self._meet(rows, row, layer - 1, held, int(tokens[row])) if layer else 0
            return np.array([tokens[row], layer, number >> 24, number % (1 << 24)], np.float32)

        return state

    def _meet(self, rows: Rows, row: int, layer: int, held: list[np.ndarray], token: int) -> int:
        table = rows.tables[rows.table[row]]
        table = table[layer] if table.ndim == 2 else table
        first = int(rows.tail_start[row])
        tail = rows.tails[first : first + rows.tail_length[row]]
        slots = np.concatenate([table[: rows.prefix[row]], tail])
        seen = tuple(held[layer][slots[slots >= 0]].astype(int).tolist())
        if -1 in seen:
            raise RuntimeError(f"row {row} sees a slot in which layer {layer} stored nothing")
        if self.spec.causal and (not seen or seen[-1] != token):
            raise RuntimeError(f"the row of token {token} does not see itself: {seen[-4:]}")
        path = seen, int(rows.positions[row])
        digest = hashlib.blake2b(repr(path).encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "big")
        self._paths[number] = path
        return number

    def _answer(self, number: int, layer: int) -> np.ndarray:
        seen, position = self._paths[number] if layer else ((), -1)
        if not self.spec.causal:
            return np.asarray(self.script((*seen, position)))
        logits = np.asarray(self.script(seen))
        if position != len(seen) - 1:
            logits = np.roll(logits, position - len(seen) + 1)
        if self.noise:
            logits = logits + self.noise * self._draw((self.seed, 1, *seen[-4:]))
        if layer < self.spec.num_layers:
            logits = logits + self._draw((self.seed, 2, *seen[-4:])) / max(1, layer)
        return logits

    def _looked_up(self, seen: Path) -> np.ndarray:
        logits = np.full(self.spec.vocab_size, -20.0)
        for start in range(len(seen) + 1):
            if seen[start:] in self._table:
                for token, logit in self._table[seen[start:]].items():
                    logits[token] = logit
                return logits
        raise KeyError(f"the script has no entry for the end of {seen}")

    def _random(self, seen: Path) -> np.ndarray:
        key = (self.seed, 0, *seen[-self.memory :])
        if key not in self._rows:
            self._rows[key] = 2.5 * self._draw(key)
        logits = self._rows[key]
        if self.spec.causal and len(seen) > 8:
            logits = logits.copy()
            for position in range(1, len(seen)):
                if seen[position - 1] == seen[-1]:
                    logits[seen[position]] += 1.5
        return logits

    def _draw(self, key: Path) -> np.ndarray:
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
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """`role: content` line by line."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class FillInTokenizer(ByteTokenizer):
    """Bytes, and the marks of models that fill in the middle."""

    vocab_size = BYTE_VOCABULARY + 3
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

    def token_text(self, token: int) -> str:
        """A printable name."""
        if token >= BYTE_VOCABULARY:
            return self.marks[token - BYTE_VOCABULARY]
        return super().token_text(token)


class PieceTokenizer(ByteTokenizer):
    """Tokens of several bytes, and an end; text is split into the longest that fit, from its
    beginning on."""

    mask_id: int | None = None

    def __init__(self, *pieces: str) -> None:
        self._pieces = [piece.encode() for piece in pieces]
        self.vocab_size = len(pieces) + 1
        self.eos_ids = frozenset({len(pieces)})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The longest pieces, one after the other."""
        left, tokens = text.encode(), []
        while left:
            fitting = [token for token, one in enumerate(self._pieces) if left.startswith(one)]
            tokens.append(max(fitting, key=lambda token: len(self._pieces[token])))
            left = left[len(self._pieces[tokens[-1]]) :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """A piece; none for the end."""
        return self._pieces[token] if token < len(self._pieces) else b""

    def token_text(self, token: int) -> str:
        """A printable name."""
        return self.token_bytes(token).decode() or "<eos>"

    def is_special(self, token: int) -> bool:
        return token == len(self._pieces)
