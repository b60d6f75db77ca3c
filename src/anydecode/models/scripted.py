"""Test doubles: a model whose logits are a known function of the tokens each row attends to, and a
byte tokenizer. Tests of trees, forks, evictions and restarts run in milliseconds with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from anydecode.kernels.host import to_host
from anydecode.kernels.interface import (
    PROPAGATE,
    Attention,
    KeyValues,
    Output,
    OutputSpec,
    Rows,
    SkippedParts,
    Variant,
)
from anydecode.kernels.routes import Route, RoutedPass, part_of
from anydecode.models.spec import LayerSpec, ModelSpec

#: The tokens a row attends to, by position, holes left out.
Path = tuple[int, ...]
#: From a path to logits `[vocab_size]`.
Script = Callable[[Path], np.ndarray]

EOS, BOS, MASK = 256, 257, 258
BYTE_VOCABULARY = 259

_HIDDEN_SIZE = 4


class ScriptedModel:
    """A `Model` whose logits are a known function of the visible tokens.

    The cache of each layer stores the token of every slot. A row reads the tokens it attends to
    through its slots, layer by layer, as a real model does; reading a slot in which nothing was
    stored raises RuntimeError.

    Rows that stop early, or run another variant of the layers, have additional noise. Rows of a
    route have that of the number of layers that they have run in full. A causal row whose
    position differs from the number of tokens before it has other logits. A hidden state identifies
    a path that this model has processed, so another model cannot use it.

    Args:
        script: A function from the visible tokens to logits, or a mapping from a suffix of them to
            the logits of some tokens; the longest suffix that is a key is used, and all other
            tokens have logit -20. None: the logits are a pseudo-random function of `seed` and the
            last `memory` visible tokens, plus a bonus for tokens that followed the same token
            before, so that texts have structure.
        vocab_size: The number of tokens.
        seed: The seed of the pseudo-random logits.
        memory: The number of tokens on which they depend.
        noise: The scale of an additional pseudo-random error. Two models with the same seed and
            different noise often agree.
        num_layers: The number of layers.
        causal: Whether rows attend to earlier positions only.
        max_positions: The context length.
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
        self._logits_by_suffix = script if isinstance(script, Mapping) else {}
        self.script: Script = (
            self._lookup
            if self._logits_by_suffix
            else script
            if callable(script)
            else self._random_logits
        )
        self._rows: dict[Path, np.ndarray] = {}
        self._paths: dict[int, tuple[Path, int]] = {}

    def new_cache(self, num_slots: int) -> KeyValues:
        """A cache of one number per slot and layer: the token, or -1."""

        def empty() -> list[np.ndarray]:
            return [np.full((num_slots, 1, 1), -1, np.float32) for _ in self.spec.layers]

        return KeyValues(empty(), empty())

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One forward pass: stores every row's token in its layers, then reads what each row
        attends to.

        Raises:
            RuntimeError: A row attends to an empty slot, or a causal row does not attend to itself.
        """
        stored = [keys[:, 0, 0] for keys in cache.keys]
        tokens = rows.tokens.copy()
        if rows.inputs is not None:
            inputs, is_state = to_host(rows.inputs), tokens < 0
            is_embedding = is_state & (rows.start == 0)
            tokens[is_state] = inputs[is_state, 0].astype(np.int32)
            tokens[is_embedding] = self.tokens_of(inputs[is_embedding])
        is_routed = np.zeros(len(rows), bool)
        if rows.variant is not None:
            routes = {i for i, one in enumerate(rows.variants) if isinstance(one, Route)}
            is_routed = np.isin(rows.variant, sorted(routes))
        for row in np.flatnonzero((rows.slots >= 0) & ~is_routed):
            for layer in range(rows.start[row], rows.stop[row]):
                stored[layer][rows.slots[row]] = tokens[row]
        state = self._states(rows, stored, tokens)
        last = rows.stop if rows.variant is None else rows.stop - (rows.variant >= 0)
        if is_routed.any():
            state = self._route(rows, cache, tokens, state)
        final_states = np.array([state(int(row), int(last[row])) for row in output_spec.logits])
        logits = self.head(final_states.reshape(-1, _HIDDEN_SIZE))
        hidden = {
            layer: np.array([state(int(row), layer) for row in index], np.float32).reshape(
                -1, _HIDDEN_SIZE
            )
            for layer, index in output_spec.hidden.items()
        }
        return Output(logits, hidden)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Input embeddings of tokens, float32 `[n, hidden_size]`."""
        inputs = np.zeros((len(tokens), _HIDDEN_SIZE), np.float32)
        inputs[:, 0] = tokens
        return inputs

    def tokens_of(self, inputs: np.ndarray) -> np.ndarray:
        """The tokens that rows of input embeddings stand for, int32 `[n]`."""
        return inputs[:, 0].astype(np.int32)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Logits float32 `[n, vocab_size]` of hidden states."""
        rows = [
            self._path_logits(int(high) << 24 | int(low), int(layer))
            for _, layer, high, low in hidden.tolist()
        ]
        return np.array(rows, np.float32).reshape(-1, self.spec.vocab_size)

    def _states(
        self, rows: Rows, stored: list[np.ndarray], tokens: np.ndarray
    ) -> Callable[[int, int], np.ndarray]:
        """A function from a row and a number of layers to the hidden state: the row's token, the
        number of layers, and the number of its path in two parts."""

        def state(row: int, layer: int) -> np.ndarray:
            number = (
                self._record_path(rows, row, layer - 1, stored, int(tokens[row])) if layer else 0
            )
            return np.array([tokens[row], layer, number >> 24, number % (1 << 24)], np.float32)

        return state

    def _route(
        self,
        rows: Rows,
        cache: KeyValues,
        tokens: np.ndarray,
        state: Callable[[int, int], np.ndarray],
    ) -> Callable[[int, int], np.ndarray]:
        """Run the rows of routes, one route after the other; returns a function as `_states`, which
        knows the states that these rows end with."""
        assert rows.variant is not None
        ends: dict[int, np.ndarray] = {}
        for number in np.unique(rows.variant[rows.variant >= 0]).tolist():
            route = rows.variants[number]
            if not isinstance(route, Route):
                continue
            index = np.flatnonzero(rows.variant == number)
            routed = self._routed(part_of(rows, index), cache, tokens[index])
            route.run(routed)
            ends |= dict(zip(index.tolist(), routed.states, strict=True))

        def end(row: int, layer: int) -> np.ndarray:
            return ends[row] if row in ends else state(row, layer)

        return end

    def _routed(self, rows: Rows, cache: KeyValues, tokens: np.ndarray) -> RoutedPass:
        """The pass of rows that follow one route, with their inputs as tokens."""
        stored: list[np.ndarray] = []
        state: Callable[[int, int], np.ndarray]

        def begin(rows: Rows, cache: KeyValues) -> None:
            nonlocal state
            stored[:] = [keys[:, 0, 0] for keys in cache.keys]
            state = self._states(rows, stored, tokens)

        def run_layers(
            x: np.ndarray, active: np.ndarray, first: int, last: int, variant: Variant | None
        ) -> np.ndarray:
            skips = variant if isinstance(variant, SkippedParts) else SkippedParts()
            mixers = [layer for layer in range(first, last) if layer not in skips.mixers]
            for row in active.tolist():
                for layer in mixers if routed.rows.slots[row] >= 0 else ():
                    stored[layer][routed.rows.slots[row]] = tokens[row]
            if variant == PROPAGATE:
                return x
            num_full = sum(layer not in skips.mlps for layer in mixers)
            ran = x.copy()
            for i, row in enumerate(active.tolist()):
                if mixers:
                    ran[i] = state(row, mixers[-1] + 1)
                ran[i, 1] = x[i, 1] + num_full
            return ran

        inputs, guides = np.zeros((len(rows), _HIDDEN_SIZE), np.float32), rows.guides
        inputs[:, 0] = tokens
        assert guides is not None
        depth = self.spec.num_layers
        routed = RoutedPass(inputs, guides, depth, run_layers, self.head, begin, rows, cache)
        return routed

    def _record_path(
        self, rows: Rows, row: int, layer: int, stored: list[np.ndarray], token: int
    ) -> int:
        table = rows.tables[rows.table[row]]
        table = table[layer] if table.ndim == 2 else table
        first = int(rows.tail_start[row])
        tail = rows.tails[first : first + rows.tail_length[row]]
        slots = np.concatenate([table[: rows.prefix[row]], tail])
        visible = tuple(stored[layer][slots[slots >= 0]].astype(int).tolist())
        if -1 in visible:
            raise RuntimeError(f"row {row} attends to a slot in which layer {layer} stored nothing")
        if self.spec.causal and (not visible or visible[-1] != token):
            raise RuntimeError(
                f"the row of token {token} does not attend to itself: {visible[-4:]}"
            )
        path = visible, int(rows.positions[row])
        digest = hashlib.blake2b(repr(path).encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "big")
        self._paths[number] = path
        return number

    def _path_logits(self, number: int, layer: int) -> np.ndarray:
        visible, position = self._paths[number] if layer else ((), -1)
        if not self.spec.causal:
            return np.asarray(self.script((*visible, position)))
        logits = np.asarray(self.script(visible))
        if position != len(visible) - 1:
            logits = np.roll(logits, position - len(visible) + 1)
        if self.noise:
            logits = logits + self.noise * self._normal((self.seed, 1, *visible[-4:]))
        if layer < self.spec.num_layers:
            logits = logits + self._normal((self.seed, 2, *visible[-4:])) / max(1, layer)
        return logits

    def _lookup(self, visible: Path) -> np.ndarray:
        logits = np.full(self.spec.vocab_size, -20.0)
        for start in range(len(visible) + 1):
            if visible[start:] in self._logits_by_suffix:
                for token, logit in self._logits_by_suffix[visible[start:]].items():
                    logits[token] = logit
                return logits
        raise KeyError(f"the script has no entry for the end of {visible}")

    def _random_logits(self, visible: Path) -> np.ndarray:
        key = (self.seed, 0, *visible[-self.memory :])
        if key not in self._rows:
            self._rows[key] = 2.5 * self._normal(key)
        logits = self._rows[key]
        if self.spec.causal and len(visible) > 8:
            logits = logits.copy()
            for position in range(1, len(visible)):
                if visible[position - 1] == visible[-1]:
                    logits[visible[position]] += 1.5
        return logits

    def _normal(self, key: Path) -> np.ndarray:
        words = [part % (1 << 32) for part in key]
        return np.random.default_rng(words).normal(size=self.spec.vocab_size)


@lru_cache(maxsize=1 << 13)
def normal_row(key: Path) -> np.ndarray:
    """Normally distributed numbers that depend on `key` only, float64 `[BYTE_VOCABULARY]`,
    read-only. Kept, since an oracle asks for the rows that the engine has asked for."""
    row = np.random.default_rng(key).normal(size=BYTE_VOCABULARY)
    row.setflags(write=False)
    return row


class ByteTokenizer:
    """A `Tokenizer` with one token per byte, and EOS, BOS and mask tokens."""

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
        """One byte; empty for special tokens."""
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
        """One line `role: content` per message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class FillInTokenizer(ByteTokenizer):
    """`ByteTokenizer` with the special tokens of fill-in-the-middle models."""

    vocab_size = BYTE_VOCABULARY + 3
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

    def token_text(self, token: int) -> str:
        """A printable name."""
        if token >= BYTE_VOCABULARY:
            return self.marks[token - BYTE_VOCABULARY]
        return super().token_text(token)


class PieceTokenizer(ByteTokenizer):
    """A `Tokenizer` with tokens of several bytes, and EOS. Text is split greedily into the longest
    matching tokens."""

    mask_id: int | None = None

    def __init__(self, *pieces: str) -> None:
        self._pieces = [piece.encode() for piece in pieces]
        self.vocab_size = len(pieces) + 1
        self.eos_ids = frozenset({len(pieces)})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The longest matching tokens, from left to right."""
        remaining, tokens = text.encode(), []
        while remaining:
            fitting = [
                token for token, piece in enumerate(self._pieces) if remaining.startswith(piece)
            ]
            tokens.append(max(fitting, key=lambda token: len(self._pieces[token])))
            remaining = remaining[len(self._pieces[tokens[-1]]) :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes; empty for EOS."""
        return self._pieces[token] if token < len(self._pieces) else b""

    def token_text(self, token: int) -> str:
        """A printable name."""
        return self.token_bytes(token).decode() or "<eos>"

    def is_special(self, token: int) -> bool:
        return token == len(self._pieces)
