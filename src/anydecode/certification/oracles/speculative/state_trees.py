"""State-space and hybrid models over a whole tree of tokens, in float64 and in closed form: the
output of a node is a sum over its ancestors, whose inputs are multiplied by the transitions
accumulated between the two (arXiv:2505.14969, with the names of arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anydecode.certification.oracles.transformer import rms_norm, softmax
from anydecode.models.checkpoint import Checkpoint


class TreeOracle:
    """A Mamba, a Mamba-2 or a Granite hybrid, from its tensors and its config."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tensors: dict[str, Any] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }
        self.is_hybrid = self.config["model_type"] == "granitemoehybrid"
        self.eps = 1e-6 if self.is_hybrid else 1e-5

    def logits(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """The logits of all nodes; `parents[i]` is -1 for a first token, else less than i."""
        sees = np.zeros((len(tokens), len(tokens)), bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                sees[node] = sees[parent]
            sees[node, node] = True
        outer = ("model.embed_tokens", "model.norm") if self.is_hybrid else _OUTER
        embedding = self.tensors[f"{outer[0]}.weight"]
        x = embedding[list(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(x, layer, sees, parents)
        y = rms_norm(x, self.tensors[f"{outer[1]}.weight"], self.eps)
        logits: np.ndarray = y @ embedding.T + self.tensors["lm_head.bias"]
        return logits

    def _layer(
        self, x: np.ndarray, layer: int, sees: np.ndarray, parents: Sequence[int]
    ) -> np.ndarray:
        if not self.is_hybrid:
            name = f"backbone.layers.{layer}"
            y = rms_norm(x, self.tensors[f"{name}.norm.weight"], self.eps)
            mixer = self._mamba if self.config["model_type"] == "mamba" else self._mamba2
            return x + mixer(y, f"{name}.mixer", sees, parents)
        name, scale = f"model.layers.{layer}", self.config["residual_multiplier"]
        y = rms_norm(x, self.tensors[f"{name}.input_layernorm.weight"], self.eps)
        if self.config["layer_types"][layer] == "mamba":
            x = x + scale * self._mamba2(y, f"{name}.mamba", sees, parents)
        else:
            x = x + scale * self._attention(y, f"{name}.self_attn", sees)
        y = rms_norm(x, self.tensors[f"{name}.post_attention_layernorm.weight"], self.eps)
        gate, up = np.split(y @ self.tensors[f"{name}.shared_mlp.input_linear.weight"].T, 2, -1)
        mlp = (_silu(gate) * up) @ self.tensors[f"{name}.shared_mlp.output_linear.weight"].T
        return x + scale * mlp

    def _convolved(self, x: np.ndarray, name: str, parents: Sequence[int]) -> np.ndarray:
        """A node reads itself and the last ancestors before it."""
        kernel = self.tensors[f"{name}.conv1d.weight"][:, 0]
        y = np.tile(self.tensors[f"{name}.conv1d.bias"], (len(x), 1))
        for node in range(len(x)):
            ancestor = node
            for tap in reversed(range(kernel.shape[1])):
                if ancestor >= 0:
                    y[node] += kernel[:, tap] * x[ancestor]
                    ancestor = parents[ancestor]
        return _silu(y)

    def _mamba2(
        self, x: np.ndarray, name: str, sees: np.ndarray, parents: Sequence[int]
    ) -> np.ndarray:
        get = self.tensors
        heads, inner = len(get[f"{name}.D"]), len(get[f"{name}.norm.weight"])
        groups, size = 2, 32
        z, channels, steps = np.split(
            x @ get[f"{name}.in_proj.weight"].T, [inner, 2 * inner + 2 * groups * size], -1
        )
        channels = self._convolved(channels, name, parents)
        values, keys, queries = np.split(channels, [inner, inner + groups * size], -1)
        values = values.reshape(len(x), heads, -1)
        keys, queries = (
            part.reshape(len(x), groups, size).repeat(heads // groups, 1)
            for part in (keys, queries)
        )
        steps = np.log1p(np.exp(steps + get[f"{name}.dt_bias"]))
        # [node, head]: the logarithm of the transitions from the start to the node.
        total = sees @ (steps * -np.exp(get[f"{name}.A_log"]))
        between = np.where(sees[:, :, None], total[:, None] - total[None], -np.inf)
        scores = np.einsum("ihn,jhn->ijh", queries, keys) * np.exp(between) * steps[None]
        y = np.einsum("ijh,jhp->ihp", scores, values) + get[f"{name}.D"][:, None] * values
        y = (y.reshape(len(x), inner) * _silu(z)).reshape(len(x), groups, -1)
        y = rms_norm(y, np.ones(inner // groups), self.eps).reshape(len(x), inner)
        output: np.ndarray = (y * get[f"{name}.norm.weight"]) @ get[f"{name}.out_proj.weight"].T
        return output

    def _mamba(
        self, x: np.ndarray, name: str, sees: np.ndarray, parents: Sequence[int]
    ) -> np.ndarray:
        get = self.tensors
        values, z = np.split(x @ get[f"{name}.in_proj.weight"].T, 2, -1)
        values = self._convolved(values, name, parents)
        rank, size = self.config["time_step_rank"], self.config["state_size"]
        steps, keys, queries = np.split(
            values @ get[f"{name}.x_proj.weight"].T, [rank, rank + size], -1
        )
        steps = steps @ get[f"{name}.dt_proj.weight"].T + get[f"{name}.dt_proj.bias"]
        steps = np.log1p(np.exp(steps))
        moves = steps[:, :, None] * -np.exp(get[f"{name}.A_log"])  # [node, channel, number]
        total = np.einsum("ij,jcn->icn", sees, moves)
        y = get[f"{name}.D"] * values
        for node in range(len(x)):
            seen = np.flatnonzero(sees[node])
            factors = np.exp(total[node] - total[seen])
            inputs = (steps * values)[seen][:, :, None] * keys[seen][:, None]
            y[node] += np.einsum("jcn,jcn,n->c", factors, inputs, queries[node])
        output: np.ndarray = (y * _silu(z)) @ get[f"{name}.out_proj.weight"].T
        return output

    def _attention(self, x: np.ndarray, name: str, sees: np.ndarray) -> np.ndarray:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (x @ self.tensors[f"{name}.{part}_proj.weight"].T for part in "qkv")
        q = q.reshape(len(x), heads, -1)
        k, v = (y.reshape(len(x), kv_heads, -1).repeat(heads // kv_heads, 1) for y in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * self.config["attention_multiplier"]
        mixed = np.einsum("hij,jhd->ihd", softmax(np.where(sees, scores, -np.inf)), v)
        output: np.ndarray = mixed.reshape(len(x), -1) @ self.tensors[f"{name}.o_proj.weight"].T
        return output


_OUTER = "backbone.embeddings", "backbone.norm_f"


def _silu(x: np.ndarray) -> np.ndarray:
    silu: np.ndarray = x / (1 + np.exp(-x))
    return silu
