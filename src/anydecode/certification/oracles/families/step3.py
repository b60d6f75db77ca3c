"""The forward pass of Step-3 in float64, after the published code."""

from __future__ import annotations

import numpy as np

from anydecode.models.checkpoint import Checkpoint


class Forward:
    """The model over a whole text, one sublayer after the other, from its tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config["text_config"]
        self.tensors: dict[str, np.ndarray] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }

    def logits(self, tokens: list[int]) -> np.ndarray:
        """The logits of every position, `[len(tokens), vocab_size]`."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            y = self._norm(x, f"{name}.post_attention_layernorm")
            if str(layer) in self.config["moe_layers_enum"].split(","):
                x = x + self._experts(y, f"{name}.moe") + self._mlp(y, f"{name}.share_expert")
            else:
                x = x + self._mlp(y, f"{name}.mlp")
        return self._product(self._norm(x, "model.norm"), "lm_head")

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        result: np.ndarray = x @ self.tensors[f"{name}.weight"].T
        return result

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        result: np.ndarray = x / size * self.tensors[f"{name}.weight"]
        return result

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (self._product(x, f"{name}.{kind}_proj") for kind in ("gate", "up"))
        return self._product(_silu(gate) * up, f"{name}.down_proj")

    def _experts(self, x: np.ndarray, name: str) -> np.ndarray:
        """The experts with the largest probabilities, weighted by these."""
        scores = self._product(x, f"{name}.gate")
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        gate, up, down = (self.tensors[f"{name}.{k}_proj.weight"] for k in ("gate", "up", "down"))
        result = np.zeros_like(x)
        for row, (state, weights) in enumerate(zip(x, probabilities, strict=True)):
            chosen = np.argsort(-weights)[: self.config["moe_top_k"]]
            total = weights[chosen].sum() if self.config["norm_expert_weight"] else 1.0
            for expert in chosen:
                inner = _silu(gate[expert] @ state) * (up[expert] @ state)
                result[row] += weights[expert] / total * (down[expert] @ inner)
        return result

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        """Heads of low-rank queries over one key and one value per position."""
        dim, heads, count = self.config["head_dim"], self.config["num_attention_heads"], len(x)
        query = self._norm(self._product(x, f"{name}.q_proj"), f"{name}.inter_norm")
        query = self._product(query, f"{name}.wq").reshape(count, heads, dim)
        key, value = (self._product(x, f"{name}.{kind}_proj") for kind in "kv")
        outputs = []
        for head in range(heads):
            scores = self._rotated(query[:, head]) @ self._rotated(key).T * dim**-0.5
            scores[np.triu_indices(count, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ value)
        return self._product(np.concatenate(outputs, -1), f"{name}.o_proj")

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        frequencies = self.config["rope_theta"] ** -(np.arange(half) / half)
        angles = np.arange(len(x))[:, None] * frequencies
        first, second = x[:, :half], x[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
