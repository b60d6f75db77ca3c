"""Oracle test of dflash (arXiv:2602.06036, 2604.12989, 2607.05147, 2605.29707): the trees that
follow from a forward pass of target and drafter over the whole text, written from the drafter's
tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative import eagle
from anydecode.certification.oracles.speculative.state_drafters import TargetStates, shares
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.rounds import accepted, rounds
from anydecode.certification.tiny import with_drafter
from anydecode.certification.tiny_blocks import (
    as_deepspec,
    as_speculators,
    dflash2_checkpoint,
    dflash_checkpoint,
    domino_checkpoint,
    dspark_checkpoint,
    pard_checkpoint,
    peagle_checkpoint,
)
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

PROMPTS = ("the cat sat on the cat", "a quick zebra")
Path = tuple[int, ...]
Drafter = Callable[[Network], Checkpoint]

#: The drafters of the test by name: kinds and layouts.
DRAFTERS: dict[str, Drafter] = {
    "DFlash": dflash_checkpoint,
    "DFlash, a window": partial(dflash_checkpoint, window=4),
    "DFlash, causal": partial(dflash_checkpoint, causal_head=True),
    "DFlash of speculators": lambda target: as_speculators(dflash_checkpoint(target), target),
    "DSpark": dspark_checkpoint,
    "DSpark, gated": partial(dspark_checkpoint, kind="gated"),
    "DSpark, recurrent": partial(dspark_checkpoint, kind="rnn"),
    "DSpark of DeepSpec": lambda target: as_deepspec(dspark_checkpoint(target), target),
    "DSpark of speculators": lambda target: as_speculators(dspark_checkpoint(target), target),
    "DFlash2": dflash2_checkpoint,
    "DFlash2, four candidates": partial(dflash2_checkpoint, top_k=4),
    "DFlash2 of speculators": lambda target: as_speculators(
        dflash2_checkpoint(target, has_factors=False), target
    ),
    "Domino": domino_checkpoint,
    "Domino, shifted": partial(domino_checkpoint, shifted=True, num_free=1),
    "Domino of speculators": lambda target: as_speculators(domino_checkpoint(target), target),
    "P-EAGLE": peagle_checkpoint,
    "PARD": pard_checkpoint,
}


class Drafting:
    """A block drafter in float64, over the whole text, from its tensors and its config."""

    def __init__(self, checkpoint: Checkpoint, target: Network) -> None:
        self.tensors: dict[str, Any] = {
            name.removeprefix("logits_correction."): np.asarray(tensor, np.float64)
            for name, tensor in checkpoint.tensors.items()
        }
        config = checkpoint.config
        nested = config.get("transformer_layer_config", {}), config.get("dflash_config", {})
        self.config: dict[str, Any] = {**nested[0], **config, **nested[1]}
        self.target, self.size = target, self.config["hidden_size"]
        names = f"{config['architectures']}"
        keys = ("shift_label", "sample_from_anchor")
        self.is_shifted = "DSpark" in names or any(self.config.get(key) for key in keys)
        self.embedding = self._own("embed_tokens", target.weights.embedding.data)
        self.head = self._own("lm_head", target.weights.head.data)

    def _own(self, name: str, other: np.ndarray) -> np.ndarray:
        return np.asarray(self.tensors.get(f"{name}.weight", other), np.float64)

    def context(self, text: list[int]) -> np.ndarray:
        """What each position but the last adds to the drafter's context, `[positions, size]`."""
        taps = self.config.get("aux_hidden_state_layer_ids")
        if taps is None:
            taps = [layer + 1 for layer in self.config["target_layer_ids"]]
        forward, rows = TargetStates(self.target), []
        for token in text[:-1]:
            states = forward.states(token)
            rows.append(self.tensors["fc.weight"] @ np.concatenate([states[tap] for tap in taps]))
        return self._norm(np.stack(rows), "hidden_norm")

    def block(self, text: list[int], size: int) -> np.ndarray:
        """The normed hidden states of the slots that predict `size` tokens, `[size, size]`."""
        context, start = self.context(text), len(text) - 1
        count = size if self.is_shifted else size + 1
        x = self.embedding[[text[-1]] + [self.config["mask_token_id"]] * (count - 1)]
        types = self.config.get("layer_types", [])
        for layer in range(self.config["num_hidden_layers"]):
            is_window = "sliding_attention" in types[layer : layer + 1]
            visible = np.ones((count, start + count), bool)
            places = start + np.arange(count)[:, None] - np.arange(start + count)
            is_causal = is_window and self.config.get("is_causal") is not False
            is_causal &= not self.config.get("sliding_window_non_causal")
            if is_causal or self.config.get("causal_head"):
                visible &= places >= 0
            if is_window:
                visible &= places < self.config["sliding_window"]
            x = self._layer(f"layers.{layer}", x, context, visible)
        return self._norm(x, "norm")[count - size :]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def _layer(
        self, name: str, x: np.ndarray, context: np.ndarray, visible: np.ndarray
    ) -> np.ndarray:
        heads, width = self.config["num_attention_heads"], self.config["head_dim"]
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)
        inputs = self._norm(x, f"{name}.input_layernorm")
        inputs, after = self._convolved(f"{name}.attention_conv", inputs)
        both, places = np.concatenate([context, inputs]), np.arange(len(context) + len(x))

        def product(part: str, rows: np.ndarray) -> np.ndarray:
            return np.asarray(rows @ self.tensors[f"{name}.{part}.weight"].T)

        def rotated(part: str, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
            parts = product(f"self_attn.{part}_proj", rows).reshape(len(rows), -1, width)
            if f"{name}.self_attn.{part}_norm.weight" in self.tensors:  # layers of Llama have none
                parts = self._norm(parts, f"{name}.self_attn.{part}_norm")
            return rotate(parts, positions, frequencies)

        q, k = rotated("q", inputs, places[len(context) :]), rotated("k", both, places)
        v = product("self_attn.v_proj", both).reshape(len(both), -1, width)
        k, v = (rows.repeat(heads // rows.shape[1], 1) for rows in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
        weights = softmax(np.where(visible, scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        x = x + after(product("self_attn.o_proj", mixed))
        y = self._norm(x, f"{name}.post_attention_layernorm")
        y, after = self._convolved(f"{name}.mlp_conv", y)
        gate = product("mlp.gate_proj", y)
        inner = gate / (1 + np.exp(-gate)) * product("mlp.up_proj", y)
        return np.asarray(x + after(product("mlp.down_proj", inner)))

    def _convolved(
        self, name: str, x: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """The inputs of a sublayer after its convolution, and the convolution of its outputs
        (DFlash2); the inputs themselves, and the identity, if it has none."""
        if f"{name}.base_kernel" not in self.tensors:
            return x, lambda y: y
        base, size = self.tensors[f"{name}.base_kernel"], self.config["conv_group_size"]
        changes = x @ self.tensors[f"{name}.kernel_projection.weight"].T
        kernels = base + changes.reshape(len(x), 2, base.shape[1], -1).repeat(size, -1)

        def convolved(rows: np.ndarray, side: int) -> np.ndarray:
            out = np.zeros_like(rows)
            for row in range(len(rows)):
                for tap in range(min(base.shape[1], row + 1)):
                    out[row] += kernels[row, side, tap] * rows[row - tap]
            return out

        return convolved(x, 0), lambda y: convolved(y, 1)

    def _selected(self, logits: np.ndarray, hidden: np.ndarray, token: int) -> np.ndarray:
        """The logits of the most probable tokens, with the scores of DFlash2's selector."""
        kept = np.sort(np.argsort(-logits, kind="stable")[: self.config["selector_top_k"]])
        before, after, mix = (
            self.tensors[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        found = np.full(len(logits), -np.inf)
        for one in kept:
            found[one] = logits[one] + (before[token] * (mix @ hidden)) @ after[one]
        return found

    def step(
        self, hidden: np.ndarray, token: int, state: np.ndarray | None
    ) -> tuple[np.ndarray, float, np.ndarray | None]:
        """The logits of a slot after `token`, of all tokens; the confidence; the next state."""
        logits, confidence = self.head @ hidden, 1.0
        if "selector_rank" in self.config:
            if cap := self.config.get("final_logit_softcapping"):
                logits = cap * np.tanh(self.config["output_multiplier"] * logits / cap)
            logits = self._selected(logits, hidden, token)
        if "markov_head.markov_w1.weight" in self.tensors:
            previous = self.tensors["markov_head.markov_w1.weight"][token]
            latent = previous
            kind = self.config["markov_head_type"]
            if kind == "gated":
                pair = np.concatenate([hidden, previous])
                latent = previous * _sigmoid(self._product("markov_head.gate_proj", pair))
            if kind == "rnn":
                state = np.zeros_like(previous) if state is None else state
                joined = np.concatenate([state, previous, hidden])
                gate, fresh, out = self._product("markov_head.joint_proj", joined).reshape(3, -1)
                state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(fresh)
                latent = np.tanh(out)
            logits = logits + self.tensors["markov_head.markov_w2.weight"] @ latent
            pair = np.concatenate([hidden, previous])
            confidence = float(_sigmoid(self._product("confidence_head.proj", pair))[0])
        if "prefix_gru.weight_ih_l0" in self.tensors:
            state = np.array([token]) if state is None else np.append(state, token)
            if len(state) > self.config["pure_draft_prefix_len"]:
                features = np.concatenate([hidden, self._read(state)])
                mixed = self.tensors["embed_proj.0.weight"] @ features
                logits = logits + self.tensors["embed_proj.2.weight"] @ (mixed * _sigmoid(mixed))
        if "d2t" in self.tensors:
            tokens = self.tensors["d2t"].astype(int) + np.arange(len(logits))
            spread = np.full(self.config["vocab_size"], -np.inf)
            spread[tokens] = logits
            logits = spread
        return logits, confidence, state

    def _read(self, tokens: np.ndarray) -> np.ndarray:
        """The state of Domino's gated recurrent unit after `tokens`."""
        ours, theirs = (self.tensors[f"prefix_gru.weight_{one}_l0"] for one in ("hh", "ih"))
        state = np.zeros(ours.shape[1])
        for token in tokens:
            (reset, keep, fresh), own = (
                (theirs @ self.embedding[token]).reshape(3, -1),
                (ours @ state).reshape(3, -1),
            )
            share = _sigmoid(keep + own[1])
            state = share * state + (1 - share) * np.tanh(fresh + _sigmoid(reset + own[0]) * own[2])
        return state

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.tensors[f"{name}.weight"] @ x + self.tensors[f"{name}.bias"])

    @property
    def num_slots(self) -> int:
        """The number of tokens that the block predicts."""
        return int(self.config["block_size"]) - (not self.is_shifted)

    @property
    def has_confidence(self) -> bool:
        return "confidence_head.proj.weight" in self.tensors


class ParallelEagle:
    """P-EAGLE: the rows of the text as those of EAGLE-3, then rows of mask tokens with one learned
    state, each of which sees all rows before it."""

    has_confidence = False

    def __init__(self, checkpoint: Checkpoint, target: Network) -> None:
        config: dict[str, Any] = {
            **checkpoint.config["transformer_layer_config"],
            **checkpoint.config,
            "eagle_config": checkpoint.config,
        }
        flat = Checkpoint(checkpoint.name, checkpoint.path, config, checkpoint.tensors)
        self.rows, self.target = eagle.Drafting(flat, target), target
        self.mask = int(config["mask_token_id"])
        proposals = config["speculators_config"]["proposal_methods"]
        self.num_slots = int(proposals[0]["speculative_tokens"])

    def block(self, text: list[int], size: int) -> np.ndarray:
        """The logits of `size` slots, of all tokens."""
        rows, forward, cache = self.rows, TargetStates(self.target), eagle.Cache()
        state, found = None, []
        for position, token in enumerate(text):
            if state is not None:
                last, _ = rows.row(cache, token, state, position)
            state = rows.target_state(forward.states(token), np.empty(0))
        found.append(last)
        state = rows.tensors["fc.weight"] @ rows.tensors["mask_hidden"].ravel()
        for slot in range(1, size):
            found.append(rows.row(cache, self.mask, state, len(text) - 1 + slot)[0])
        return np.stack(found)

    def step(
        self, hidden: np.ndarray, token: int, state: np.ndarray | None
    ) -> tuple[np.ndarray, float, np.ndarray | None]:
        """The logits of a slot, which do not depend on the token before it."""
        return hidden, 1.0, None


class ParallelModel(Drafting):
    """PARD: a language model over the text and mask tokens, each row of which sees those before it.
    The last rows predict the drafts."""

    def __init__(self, checkpoint: Checkpoint, target: Network) -> None:
        self.tensors = {
            name.removeprefix("model."): np.asarray(tensor, np.float64)
            for name, tensor in checkpoint.tensors.items()
        }
        self.config, self.is_shifted = {**checkpoint.config, "block_size": 12}, True
        self.config["head_dim"] = checkpoint.config["hidden_size"] // 4
        self.embedding = self.tensors["embed_tokens.weight"]
        self.head = self.tensors["lm_head.weight"]

    def block(self, text: list[int], size: int) -> np.ndarray:
        x = self.embedding[text + [self.config["pard_token"]] * (size - 1)]
        visible, nothing = np.tri(len(x), dtype=bool), np.empty((0, x.shape[1]))
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(f"layers.{layer}", x, nothing, visible)
        return self._norm(x, "norm")[-size:]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def make_drafting(name: str, target: Network) -> Drafting | ParallelEagle:
    """The drafter of `DRAFTERS` over this target."""
    checkpoint = DRAFTERS[name](target)
    if name == "P-EAGLE":
        return ParallelEagle(checkpoint, target)
    return (ParallelModel if name == "PARD" else Drafting)(checkpoint, target)


def drafted(
    drafting: Drafting | ParallelEagle,
    text: list[int],
    temperature: float,
    size: int,
    width: int | None,
    threshold: float,
) -> set[Path]:
    """The nodes of the tree after `text`, as paths: of each level the best `size` nodes, expanded
    into `width` children (None: all), and of all levels the best `size`."""
    slots = min(size, drafting.num_slots)
    hidden = drafting.block(text, slots)
    level: list[tuple[float, Path, float, np.ndarray | None]] = [(1.0, (), 1.0, None)]
    found: list[tuple[float, Path]] = []
    for slot in range(slots):
        children = []
        for weight, path, trust, state in level:
            logits, confidence, after = drafting.step(
                hidden[slot], path[-1] if path else text[-1], state
            )
            for token, belief in shares(logits, temperature, len(text) + slot)[:width]:
                share = weight * belief
                limit = trust * confidence if drafting.has_confidence else share
                if limit >= threshold:
                    children.append((share, (*path, token), trust * confidence, after))
        level = sorted(children, key=lambda child: -child[0])[:size]
        found += [child[:2] for child in level]
    return {path for _, path in sorted(found, key=lambda node: -node[0])[:size]}


def _compare(
    name: str, key: str, size: int, width: int | None = 1, threshold: float = 0.1
) -> Iterator[Check]:
    for temperature in (0.0, 0.8):
        with with_drafter(DRAFTERS[name], cache_positions=1024, prefix_cache=False) as llm:
            traces = [rounds(llm, key, p, 16, temperature=temperature) for p in PROMPTS]
            network: Network = llm.model.network  # type: ignore[attr-defined]
            drafting = make_drafting(name, network)
        num_first = 0 if name == "PARD" else 1  # rounds without states, which it does not read
        firsts = [one for trace in traces for one in trace[:num_first]]
        others = [one for trace in traces for one in trace[num_first:]]
        wrong = [
            one
            for one in others
            if set(one.paths) != drafted(drafting, one.text, temperature, size, width, threshold)
        ]
        about = f"{key}, {name}, T={temperature}"
        detail = f"{len(wrong)} of {len(others)} differ"
        yield Check(f"{about}: trees equal the oracle's", not wrong and len(others) > 5, detail)
        num_drafted = sum(len(one.tokens) for one in others)
        yield Check(f"{about}: tokens are drafted", num_drafted > 10, str(num_drafted))
        if drafting.has_confidence or name in ("P-EAGLE", "PARD"):
            count = accepted(others)
            yield Check(f"{about}: drafts are accepted", count > 2, str(count))
        is_empty = not any(one.tokens for one in firsts)
        yield Check(f"{about}: nothing is drafted before the first pass", is_empty)


@oracle_test("dflash")
def dflash() -> Iterator[Check]:
    """The drafts of published kinds of drafters equal the oracle's, which computes every row again
    from the text."""
    for name in DRAFTERS:
        yield from _compare(name, "dflash", 7)
    yield from _compare("DFlash", "dflash:size=9,tree=true,threshold=0", 9, None, 0.0)
    yield from _compare("DSpark", "dflash:size=5,tree=true,threshold=0.5", 5, None, 0.5)
