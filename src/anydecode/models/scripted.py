"""Test doubles: a model that is a table or a function of the visible tokens, and a tokenizer of
bytes. They check what an engine must get right: which tokens each row really sees."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jinja2.sandbox
import numpy as np
import torch

from anydecode.kernels.interface import Attention, KeyValues, Output, Rows, Want
from anydecode.models.spec import LayerSpec, ModelSpec

#: The tokens a row sees, in order of position.
Path = tuple[int, ...]
Script = Mapping[Path, Mapping[int, float]] | Callable[[Path], np.ndarray]

_FLOOR = -20.0
_HIDDEN_SIZE = 4  # token, layers run, and two halves of the path's number


class ScriptedModel:
    """A `Model` whose logits are a function of the path a row sees through its slots.

    Every layer of the cache keeps the token of each slot, so the path is what storing, sharing,
    forking, keeping and evicting have really made of it; reading a slot in which that layer never
    stored anything raises RuntimeError. `script` is

    - None: seeded pseudo-random logits, in which 5 to 50 tokens stand out, chosen by the last
      `order` visible tokens and their distances from the row's position (all of them if None);
    - a mapping from the last visible tokens (the longest suffix that is a key wins) to the logits
      of the tokens that stand out;
    - a function of the visible tokens to logits `[vocab_size]`.

    A row that stops early gets the full logits plus noise of size `exit_noise` per layer left out.
    Where layers see different tokens, the logits follow all of them. A hidden state carries what is
    needed to go on: the number of a path this model has met, so it means nothing to another one.
    """

    def __init__(
        self,
        script: Script | None = None,
        vocab_size: int = 64,
        *,
        seed: int = 0,
        order: int | None = 3,
        num_layers: int = 4,
        exit_noise: float = 0.5,
        max_positions: int = 4096,
        causal: bool = True,
        name: str = "scripted",
    ) -> None:
        layer = LayerSpec(Attention(1, 1, 1, 1.0), rope=None)
        self.spec = ModelSpec(
            "Scripted",
            vocab_size,
            _HIDDEN_SIZE,
            max_positions,
            1e-6,
            (layer,) * num_layers,
            causal=causal,
        )
        self.name = name
        self.num_passes = 0
        self._script = script
        self._seed = seed
        self._order = order
        self._exit_noise = exit_noise
        self._paths: dict[int, tuple[Path, Path]] = {}  # number -> tokens, distances
        self._logits: dict[tuple[int, int], np.ndarray] = {}

    def new_cache(self, num_slots: int, dtype: torch.dtype | None = None) -> KeyValues:
        """Keys hold token + 1 of each slot, 0 where nothing was stored; values are not used."""
        shape = (num_slots, 1, 1)
        layers = range(self.spec.num_layers)
        return KeyValues([torch.zeros(shape) for _ in layers], [torch.zeros(shape) for _ in layers])

    def run(self, rows: Rows, cache: KeyValues, want: Want) -> Output:
        """One pass: every layer stores the active rows' tokens, then looks at what they see."""
        self.num_passes += 1
        state = self._inputs(rows)
        hidden = {0: state.copy()} if 0 in want.hidden else {}
        for layer in range(self.spec.num_layers):
            active = np.flatnonzero((rows.start <= layer) & (layer < rows.stop))
            stored = cache.keys[layer].numpy().reshape(-1)
            kept = active[rows.slots[active] >= 0]
            stored[rows.slots[kept]] = state[kept, 0] + 1
            for row in active:
                state[row] = self._step(rows, int(row), layer, stored, state[row])
            if layer + 1 in want.hidden:
                hidden[layer + 1] = state.copy()
        taps = {place: torch.from_numpy(hidden[place][want.hidden[place]]) for place in want.hidden}
        return Output(self.head(torch.from_numpy(state[want.logits])), taps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, vocab_size]` of hidden states `[n, 4]`."""
        rows = [
            self._row(_number(high, low), int(layer)) for _, layer, high, low in hidden.tolist()
        ]
        empty = np.empty((0, self.spec.vocab_size), np.float32)
        return torch.from_numpy(np.stack(rows) if rows else empty)

    def embed(self, tokens: np.ndarray) -> torch.Tensor:
        """What rows of these tokens start from, float32 `[n, 4]`."""
        state = np.zeros((len(tokens), _HIDDEN_SIZE), np.float32)
        state[:, 0] = tokens
        return torch.from_numpy(state)

    def _inputs(self, rows: Rows) -> np.ndarray:
        state: np.ndarray = self.embed(rows.tokens).numpy()
        fed = rows.tokens < 0
        if fed.any():
            assert rows.inputs is not None, "rows with token -1 need inputs"
            state[fed] = rows.inputs.numpy()[fed]
        assert (rows.start[~fed] == 0).all(), "a row that starts from a token starts at layer 0"
        assert (state[:, 1] == rows.start).all(), "a hidden state is of another layer"
        return state

    def _step(
        self, rows: Rows, row: int, layer: int, stored: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        slots = visible_slots(rows, row, layer)
        places = np.flatnonzero(slots >= 0)
        tokens = stored[slots[places]].astype(np.int64) - 1
        if (tokens < 0).any():
            raise RuntimeError(f"row {row} sees a slot in which layer {layer} stored nothing")
        distances = places - int(rows.positions[row])
        number = self._meet(tuple(tokens.tolist()), tuple(distances.tolist()))
        before = _number(state[2], state[3])
        if layer and before != number:
            number = self._meet(*_joined(self._paths[before], self._paths[number]))
        high, low = divmod(number, 1 << 24)
        return np.array([state[0], layer + 1, high, low], np.float32)

    def _meet(self, tokens: Path, distances: Path) -> int:
        """The number of a path, 48 bits of its hash."""
        digest = hashlib.blake2b(repr((tokens, distances)).encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "big")
        self._paths[number] = (tokens, distances)
        return number

    def _row(self, number: int, layer: int) -> np.ndarray:
        key = number, layer
        if key not in self._logits:
            tokens, distances = self._paths[number] if layer else ((), ())
            logits = self._full(tokens, distances)
            left = self.spec.num_layers - layer
            if left:
                noise = self._generator("exit", number, layer).standard_normal(len(logits))
                logits = logits + (noise * self._exit_noise * left).astype(np.float32)
            self._logits[key] = logits
        return self._logits[key]

    def _full(self, tokens: Path, distances: Path) -> np.ndarray:
        if callable(self._script):
            return np.asarray(self._script(tokens), np.float32)
        if self._script is not None:
            return self._looked_up(tokens)
        near = sorted(range(len(tokens)), key=lambda i: (abs(distances[i]), distances[i]))
        near = sorted(near[: self._order])
        seen = [(tokens[i], distances[i]) for i in near]
        generator = self._generator("full", *seen)
        vocab = self.spec.vocab_size
        count = int(generator.integers(min(5, vocab), min(50, vocab) + 1))
        logits = _FLOOR + generator.random(vocab)
        logits[generator.permutation(vocab)[:count]] = generator.standard_normal(count) * 2.5
        return logits.astype(np.float32)

    def _looked_up(self, tokens: Path) -> np.ndarray:
        assert isinstance(self._script, Mapping)
        logits = np.full(self.spec.vocab_size, _FLOOR, np.float32)
        for start in range(len(tokens) + 1):
            if tokens[start:] in self._script:
                for token, logit in self._script[tokens[start:]].items():
                    logits[token] = logit
                return logits
        raise KeyError(f"the script has no entry for the end of {tokens}")

    def _generator(self, *key: object) -> np.random.Generator:
        digest = hashlib.blake2b(repr((self._seed, key)).encode(), digest_size=8).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def visible_slots(rows: Rows, row: int, layer: int) -> np.ndarray:
    """The slots a row sees in one layer, by position; -1 are holes."""
    table = rows.tables[rows.table[row]]
    table = table[layer] if table.ndim == 2 else table
    start, length = int(rows.tail_start[row]), int(rows.tail_length[row])
    tail = rows.tails[start : start + length]
    return np.concatenate([table[: rows.prefix[row]], tail])


def _number(high: float, low: float) -> int:
    return (int(high) << 24) + int(low)


def _joined(one: tuple[Path, Path], other: tuple[Path, Path]) -> tuple[Path, Path]:
    return one[0] + other[0], one[1] + other[1]


class ByteTokenizer:
    """A `Tokenizer` whose tokens are the 256 bytes, and after them a few specials."""

    specials = ("<bos>", "<eos>", "<mask>", "<system>", "<user>", "<assistant>", "<end>")

    def __init__(self) -> None:
        self.vocab_size = 256 + len(self.specials)
        self._ids = {text: 256 + i for i, text in enumerate(self.specials)}
        self.bos_id: int | None = self._ids["<bos>"]
        self.mask_id: int | None = self._ids["<mask>"]
        self.eos_ids = frozenset({self._ids["<eos>"], self._ids["<end>"]})
        self.chat_template: str | None = (
            "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Bytes of the text; the specials' names in it are the specials. No BOS is added."""
        ids: list[int] = []
        while text:
            found = [(text.find(name), name) for name in self.specials if name in text]
            place, name = min(found) if found and special else (len(text), "")
            ids += text[:place].encode()
            ids += [self._ids[name]] if name else []
            text = text[place + len(name) :]
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        pieces = (
            self.token_text(token).encode() if token >= 256 else bytes([token])
            for token in ids
            if token < 256 or not skip_special
        )
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return self.specials[token - 256] if token >= 256 else repr(bytes([token]))[2:-1]

    def is_special(self, token: int) -> bool:
        return token >= 256

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
        template = environment.from_string(self.chat_template or "")
        return template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
