"""A target in torch, on a device such as a GPU: it writes texts in large batches, and computes its
states when they are needed, faster than they could be read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.linear import Linear
from anydecode.models.network import GatedMlp, LayerWeights, Network
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.models.tokenizer import Tokenizer
from anydecode.training.drafters.layers import as_tensor, layer_shape
from anydecode.training.generated import LONG_TURN, SHORT_TURN, TOP_P, is_long, turn_parts
from anydecode.training.own_answers import task_prompts
from anydecode.training.transformer import rotate

#: Texts that are written at once, and steps between two looks at which of them have ended.
NUM_SLOTS, STEPS = 2048, 16
#: Halvings of the interval in which the threshold of top-p is searched.
HALVINGS = 20
#: Part of the free memory of a GPU that the keys and values may take.
MEMORY_SHARE = 0.5
#: Weights of a model and of a layer of Llama's kind.
_USED_BY_MODEL = {"embedding", "layers", "final_norm", "head"}
_USED_BY_LAYER = {"attention_norm", "query", "key", "value", "output", "mlp_norm", "mlp"}
#: Fields of a spec that models of Llama's kind differ in.
_OWN = {"architecture", "vocab_size", "hidden_size", "max_positions", "norm_eps", "layers"}


@dataclass(frozen=True)
class Turn:
    """A text to write: what it starts with, how many tokens may follow, and how they are chosen.

    Attributes:
        given: The tokens before it.
        max_tokens: The most tokens that are written.
        temperature: 0 for the most probable tokens.
        ends: The index of the tokens that end it among those given to `TorchTarget.write`.
    """

    given: Sequence[int]
    max_tokens: int
    temperature: float
    ends: int = 0


class _Layer(NamedTuple):
    """The weights of a layer: of queries, keys and values, and of gate and inputs of the MLP, side
    by side."""

    attention_norm: torch.Tensor
    projections: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_and_up: torch.Tensor
    down: torch.Tensor


class TorchTarget:
    """A target of Llama's kind in bfloat16.

    Args:
        network: The target.
        tokenizer: Its tokenizer.
        device: A device of torch.
        num_slots: See `NUM_SLOTS`.

    Raises:
        UnsupportedCombinationError: The target is of another kind.
    """

    def __init__(
        self, network: Network, tokenizer: Tokenizer, device: str, num_slots: int = NUM_SLOTS
    ) -> None:
        check_plain(network)
        self.shape, self.tokenizer = layer_shape(network), tokenizer
        self.device, self.num_slots = torch.device(device), num_slots
        self.max_positions = network.spec.max_positions
        weights = network.weights
        self._embedding = self._matrix(as_tensor(weights.embedding))
        is_tied = weights.head is weights.embedding
        self._head = self._embedding if is_tied else self._matrix(as_tensor(weights.head))
        assert weights.final_norm is not None
        self._final_norm = self._vector(weights.final_norm)
        self._layers = [self._layer(layer) for layer in weights.layers]
        self._frequencies = torch.from_numpy(self.shape.frequencies).to(self.device)
        attention = network.spec.layers[-1].attention
        assert attention is not None
        self._scale = attention.scale

    def _matrix(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.bfloat16)

    def _vector(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, torch.bfloat16)

    def _layer(self, layer: LayerWeights) -> _Layer:
        assert layer.query and layer.key and layer.value and layer.output
        assert isinstance(layer.mlp, GatedMlp)
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        projections, mlp = (layer.query, layer.key, layer.value), layer.mlp
        bias = None
        if any(linear.bias is not None for linear in projections):
            bias = self._vector(np.concatenate([_bias(linear) for linear in projections]))
        return _Layer(
            self._vector(layer.attention_norm),
            self._matrix(torch.cat([as_tensor(linear.weight) for linear in projections])),
            bias,
            self._matrix(as_tensor(layer.output.weight)),
            self._vector(layer.mlp_norm),
            self._matrix(torch.cat([as_tensor(one.weight) for one in (mlp.gate, mlp.up)])),
            self._matrix(as_tensor(mlp.down.weight)),
        )

    @property
    def chunk(self) -> int:
        """See `Writer`."""
        return 8 * self.num_slots

    # --- states

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """See `StateComputer`."""
        x = functional.embedding(tokens.to(self.device), self._embedding)
        rope = self._rope(torch.arange(tokens.shape[1], device=self.device))
        found = {0: x}
        for number, layer in enumerate(self._layers, 1):
            q, k, v = self._heads(layer, x, rope)
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
            )
            x = self._rest(layer, x, mixed.transpose(1, 2).flatten(-2))
            if number in layers:
                found[number] = x
        return [found[number].float() for number in layers] + [self._normed(x).float()]

    # --- texts

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """See `prompts_to_answer`."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            return task_prompts(tokenizer, count, seed)
        opening, end = turn_parts(tokenizer)
        given = tokenizer.encode(opening, special=False)
        sizes = range(tokenizer.vocab_size)
        over = {*tokenizer.eos_ids, *tokenizer.encode(end, special=False)[:1]}
        lines = {token for token in sizes if b"\n" in tokenizer.token_bytes(token)}
        room = self.max_positions - len(given)
        kinds = [(min(SHORT_TURN, room), 1), (min(LONG_TURN, room), 0)]
        turns = [
            Turn(given, limit, 1.0, ends)
            for limit, ends in (kinds[is_long(index)] for index in range(count))
        ]
        written = self.write(turns, [over, over | lines], seed, TOP_P)
        turns_without_ends = [one[len(given) : -1 if one[-1] in over else None] for one in written]
        texts = dict.fromkeys(tokenizer.decode(one).strip() for one in turns_without_ends)
        chats = [
            tokenizer.render_chat([{"role": "user", "content": text}])
            for text in texts
            if len(text) > 8
        ]
        return [tokenizer.encode(chat, special=False) for chat in chats]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        tokens: int,
        random: Random,
    ) -> list[list[int]]:
        """An answer of at most `tokens` tokens to each of `prompts`, the end of the text
        included."""
        turns = [
            Turn(prompt, tokens, temperature)
            for prompt, temperature in zip(prompts, temperatures, strict=True)
        ]
        written = self.write(turns, [self.tokenizer.eos_ids], random.randrange(2**31))
        return [text[len(turn.given) :] for text, turn in zip(written, turns, strict=True)]

    @torch.no_grad()
    def write(
        self,
        turns: Sequence[Turn],
        ends: Sequence[set[int] | frozenset[int]],
        seed: int,
        top_p: float = 1.0,
    ) -> list[list[int]]:
        """Write texts, as many at once as there are slots; a slot whose text has ended takes the
        next.

        Args:
            turns: What to write.
            ends: Sets of tokens; a text ends behind the first of those of the set `Turn.ends`.
            seed: Random seed. The texts also depend on the number of slots.
            top_p: As `SamplingParams.top_p`.

        Returns:
            The tokens of each text, those before it included.

        Raises:
            InvalidRequestError: A text may have more tokens than the model has positions.
        """
        size = max(len(turn.given) + turn.max_tokens for turn in turns)
        if size > self.max_positions:
            raise InvalidRequestError(
                f"a prompt and its answer may have {size} tokens, but the model"
                f" {self.max_positions} positions: give fewer --tokens"
            )
        slots = min(self._affordable_slots(size), len(turns))
        random = torch.Generator(self.device).manual_seed(seed)
        with self.device:
            shape = (len(self._layers), 2, slots, self.shape.kv_heads, size, self.shape.head_width)
            cache = torch.zeros(shape, dtype=torch.bfloat16)
            texts = torch.zeros(slots, size + 1, dtype=torch.long)
            is_end = torch.zeros(len(ends), len(self._embedding), dtype=torch.bool)
            for row, one in enumerate(ends):
                is_end[row, torch.tensor(sorted(one), dtype=torch.long)] = True
            positions, given, last, kinds = torch.zeros(4, slots, dtype=torch.long)
            temperatures = torch.zeros(slots)
            active = torch.zeros(slots, dtype=torch.bool)
            rows = torch.arange(slots)
        written: list[list[int]] = [[] for _ in turns]
        owners, following = [-1] * slots, 0
        while True:
            running = active.tolist()
            stops = positions.tolist()
            for slot in range(slots):
                if running[slot]:
                    continue
                if owners[slot] >= 0:
                    written[owners[slot]] = texts[slot, : stops[slot] + 1].tolist()
                    owners[slot] = -1
                if following < len(turns):
                    turn = turns[following]
                    texts[slot, : len(turn.given)] = torch.tensor(turn.given, device=self.device)
                    positions[slot], given[slot] = 0, len(turn.given)
                    last[slot] = len(turn.given) + turn.max_tokens - 1
                    kinds[slot], temperatures[slot] = turn.ends, turn.temperature
                    active[slot], owners[slot], stops[slot] = True, following, 0
                    following += 1
            if max(owners) < 0:
                return written
            longest = min(size, max(stops) + STEPS + 1)
            for _ in range(STEPS):
                logits = self._step(texts[rows, positions], positions, cache[..., :longest, :])
                chosen = _sample(logits, temperatures, top_p, random)
                after = positions + 1
                chosen = torch.where(active & (after >= given), chosen, texts[rows, after])
                texts[rows, after] = chosen
                ended = (after >= given) & (is_end[kinds, chosen] | (after >= last))
                positions = torch.where(active, after, positions)
                active = active & ~ended

    def _affordable_slots(self, size: int) -> int:
        """The number of texts of `size` tokens that fit into memory together, at most
        `num_slots`."""
        if self.device.type != "cuda":
            return self.num_slots
        numbers = 2 * len(self._layers) * self.shape.kv_heads * self.shape.head_width
        free = torch.cuda.mem_get_info(self.device)[0]
        count = int(MEMORY_SHARE * free / (numbers * size * torch.bfloat16.itemsize))
        return max(1, min(self.num_slots, count))

    def _step(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """The logits behind one token of each text, float32 `[slots, vocab_size]`. Stores its keys
        and values at `positions`."""
        x = functional.embedding(tokens, self._embedding)[:, None]
        rope = self._rope(positions[:, None, None])
        slots = torch.arange(len(tokens), device=self.device)
        length = cache.shape[-2]
        hidden = torch.arange(length, device=self.device) > positions[:, None, None, None]
        for layer, (keys, values) in zip(self._layers, cache, strict=True):
            q, k, v = self._heads(layer, x, rope)
            at = positions.clamp(max=length - 1)
            keys[slots, :, at], values[slots, :, at] = k[:, :, 0], v[:, :, 0]
            grouped = q.view(len(q), self.shape.kv_heads, -1, self.shape.head_width)
            scores = (grouped @ keys.transpose(-1, -2)).float() * self._scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            mixed = weights.to(values.dtype) @ values
            x = self._rest(layer, x, mixed.flatten(1)[:, None])
        return functional.linear(self._normed(x)[:, 0], self._head).float()

    # --- parts

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._final_norm)

    def _heads(
        self, layer: _Layer, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[batch, heads, rows, head_width]`, the first two rotated."""
        shape = self.shape
        projected = functional.linear(
            self._norm(x, layer.attention_norm), layer.projections, layer.bias
        )
        heads = projected.view(*x.shape[:-1], -1, shape.head_width).transpose(1, 2)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        return rotate(q, rope), rotate(k, rope), v

    def _rest(self, layer: _Layer, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output, from mixed values `[batch, rows, heads * head_width]`."""
        x = x + functional.linear(mixed, layer.output)
        both = functional.linear(self._norm(x, layer.mlp_norm), layer.gate_and_up)
        gate, up = both.chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, layer.down)


def check_plain(network: Network) -> None:
    """Raise UnsupportedCombinationError for a target that is not of Llama's kind, or has weights
    that `TorchTarget` does not use."""
    spec, weights = network.spec, network.weights
    last = spec.layers[-1]
    plain = vars(LayerSpec(last.attention, last.rope, interleaved_rope=last.interleaved_rope))
    others = {one.name: one.default for one in fields(ModelSpec) if one.name not in _OWN}
    attention = last.attention
    is_plain = (
        all(getattr(spec, name) == value for name, value in others.items())
        and attention is not None
        and (attention.window, attention.softcap, attention.chunk) == (None, None, None)
        and attention.slopes is None
        and attention.latent_dim is None
        and all(vars(layer) == plain for layer in spec.layers)
        and _has_only(weights, _USED_BY_MODEL)
        and all(_has_only(layer, _USED_BY_LAYER) for layer in weights.layers)
        and all(linear.bias is None for layer in weights.layers for linear in _unbiased(layer))
    )
    if not is_plain:
        raise UnsupportedCombinationError(
            f"{spec.architecture}: texts can be written with --device only by models of the kind"
            " of Llama"
        )


def _has_only(weights: Any, names: set[str]) -> bool:
    """Whether no other fields are set."""
    return all(value is None or name in names for name, value in vars(weights).items())


def _unbiased(layer: LayerWeights) -> list[Linear]:
    """The matrices whose biases `TorchTarget` does not add."""
    mlp = layer.mlp
    assert layer.output is not None and isinstance(mlp, GatedMlp)
    return [layer.output, mlp.gate, mlp.up, mlp.down]


def _bias(linear: Linear) -> np.ndarray:
    rows = linear.weight.out_features
    return np.zeros(rows, np.float32) if linear.bias is None else linear.bias


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_p: float, random: torch.Generator
) -> torch.Tensor:
    """A token of each row of `logits`; the most probable one where the temperature is 0."""
    is_greedy = temperatures == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperatures)[:, None]
    if top_p < 1.0:
        scaled = scaled.masked_fill(~_nucleus(scaled.softmax(-1), top_p), float("-inf"))
    noise = torch.empty_like(scaled).exponential_(generator=random)
    sampled = (scaled - noise.log()).argmax(-1)
    return torch.where(is_greedy, logits.argmax(-1), sampled)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens have the probability, at least, of the last of the fewest most probable ones
    that have `top_p` together: a search of the threshold by halving, which needs no sorting."""
    low, high = torch.zeros(2, len(probabilities), 1, device=probabilities.device)
    high += 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = probabilities.where(probabilities >= middle, 0.0).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return probabilities >= low


def open_target(
    network: Network, tokenizer: Tokenizer | None, name: str, device: str
) -> TorchTarget:
    """The target on `device`. Raises InvalidRequestError where torch has no such device."""
    if tokenizer is None:
        raise InvalidRequestError(f"{name} has no tokenizer to write texts with")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequestError(
            f"device {device!r}: {str(error).splitlines()[0] or 'unknown'}"
        ) from None
    return TorchTarget(network, tokenizer, device)
