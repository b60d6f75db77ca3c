"""Random heads and modules that draft for the tiny model of `tiny`, in their published layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anydecode.certification.tiny import drafter_config, layer_tensors, random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network


def medusa_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 3, layers: int = 1, own_heads: bool = True
) -> Checkpoint:
    """Random heads in the layout of Medusa, which sometimes agree with a target of small
    `residual`. Without `own_heads` their last matrix is the target's head."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    tensors: dict[str, np.ndarray] = {}
    for head in range(heads):
        for block in range(layers):
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = 0.7 * matrix(hidden, hidden)
            tensors[f"{name}.bias"] = 0.1 * matrix(1, hidden)[0]
        if own_heads:
            tensors[f"{head}.{layers}.weight"] = _predicting(target, head + 2)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers}
    return Checkpoint("medusa", Path("medusa"), config, tensors)


def hydra_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 3, layers: int = 2, has_prefix: bool = False
) -> Checkpoint:
    """Random heads in the layout of Hydra, with the layer of Hydra++ if `has_prefix`. They often
    agree with a target of small `residual`: they pass the last embedding on to the target's
    head."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    output = target.weights.head.data
    tensors: dict[str, np.ndarray] = {}
    for head in range(heads):
        width = (head + 2) * hidden
        name = f"hydra_mlp.{head}.1"
        last = np.eye(hidden, width, width - hidden, dtype=np.float32)
        tensors[f"{name}.res_connection.weight"] = last + 0.3 * matrix(hidden, width)
        tensors[f"{name}.res_connection.bias"] = 0.1 * matrix(1, hidden)[0]
        for block in range(layers):
            name = f"hydra_mlp.{head}.{2 * block + 1}.linear"
            tensors[f"{name}.weight"] = 0.7 * matrix(hidden, hidden if block else width)
            tensors[f"{name}.bias"] = 0.1 * matrix(1, hidden)[0]
        tensors[f"hydra_lm_head.{head}.1.weight"] = output + 0.1 * matrix(len(output), hidden)
        tensors[f"hydra_lm_head.{head}.1.bias"] = 4 * matrix(len(output), len(output))[0]
    if has_prefix:
        name = "prefix_embeding_layer"
        tensors |= layer_tensors(f"{name}.layers.0", hidden, hidden, matrix)
        for norm in ("layers.0.input_layernorm", "norm"):
            tensors[f"{name}.{norm}.weight"] = 1 + 0.1 * matrix(1, hidden)[0]
    config = {"hydra_num_heads": heads, "hydra_num_layers": layers, "grounded_heads": True}
    return Checkpoint("hydra", Path("hydra"), config, tensors)


def blockwise_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 3, modulus: int = 0
) -> Checkpoint:
    """Random proposal heads, which often agree with a target of small `residual`: their hidden part
    has a unit for each token, which adds the row of the target's head for the token that follows,
    and random units. With a `modulus`, tokens that it divides cannot be drafted."""
    states, following = _following(target)
    (count, hidden), matrix = states.shape, random_matrices(seed)
    head, tokens = target.weights.head.data, following
    rows: list[np.ndarray] = []
    for _ in range(heads):
        tokens = following[tokens]
        rows.append(
            np.hstack([0.06 * head[tokens].T, 1.5 * matrix(hidden, max(count, hidden))[:, :hidden]])
        )
    inner = np.concatenate([states, 2 * matrix(hidden, hidden)])
    tensors = {
        "blockwise.hidden.weight": inner + 0.3 * matrix(*inner.shape),
        "blockwise.hidden.bias": np.repeat(
            np.array([-0.4 * hidden, 0], np.float32), (count, hidden)
        ),
        "blockwise.output.weight": np.concatenate(rows),
        "blockwise.output.bias": 0.1 * matrix(1, heads * hidden)[0],
    }
    if modulus:
        tensors["token_map"] = np.arange(count)[np.arange(count) % modulus > 0]
    config = {
        "blockwise_num_heads": heads,
        "blockwise_hidden_size": len(inner),
        "vocab_size": target.spec.vocab_size,
    }
    return Checkpoint("blockwise", Path("blockwise"), config, tensors)


def clover_2_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 5, layers: int = 2, own_table: bool = True
) -> Checkpoint:
    """A random drafter in the layout of Clover-2, with embeddings of its own if `own_table`. It
    often agrees with a target of small `residual`: it passes the last embedding on. Queries and
    keys have biases in common, so that most cosines are positive."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    one, common = np.eye(hidden, dtype=np.float32), 8 * matrix(1, hidden)[0]

    def bias() -> np.ndarray:
        return 0.1 * matrix(1, hidden)[0]

    tensors = {
        "clover_head_mlp.weight": one + 0.1 * matrix(hidden, hidden),
        "clover_head_mlp.bias": bias(),
        "clover_head_mlp2.weight": np.hstack([0.3 * one, one]) + 0.2 * matrix(hidden, 2 * hidden),
        "clover_head_mlp2.bias": bias(),
        "clover_norm.weight": 1 + bias(),
        "clover_head_norm.weight": 1 + bias(),
    }
    for name in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        tensors |= {
            f"{name}.input_layernorm.weight": 1 + bias(),
            f"{name}.q.weight": matrix(hidden, hidden),
            f"{name}.q.bias": common,
            f"{name}.k.weight": matrix(hidden, hidden),
            f"{name}.k.bias": common,
            f"{name}.v.weight": 5 * one + matrix(hidden, hidden),
            f"{name}.v.bias": bias(),
        }
    for layer in range(layers):
        name = f"layers.{layer}"
        tensors |= layer_tensors(name, hidden, hidden, matrix)
        tensors[f"{name}.input_layernorm.weight"] = 1 + bias()
    if own_table:
        table = target.weights.embedding.data
        tensors["clover_embed_tokens.weight"] = table + 2 * matrix(len(table), hidden)
    return _clover(target, heads, layers, tensors)


def clover_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 3, layers: int = 1
) -> Checkpoint:
    """A random drafter of Clover, which often agrees as `clover_2_checkpoint` does."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    one, common = np.eye(hidden, dtype=np.float32), 8 * matrix(1, hidden)[0]
    tensors = {
        f"clover{part}_norm.weight": 1 + 0.1 * matrix(1, hidden)[0] for part in ("", "_head")
    }
    for head in range(heads):
        name = f"clover_heads.{head}.attention"
        for part in "qk":
            tensors[f"{name}.{part}.weight"] = matrix(hidden, hidden)
            tensors[f"{name}.{part}.bias"] = common
        tensors |= {
            f"{name}.input_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
            f"{name}.v.weight": 5 * one + matrix(hidden, hidden),
            f"{name}.v.bias": 0.1 * matrix(1, hidden)[0],
            f"clover_heads.{head}.mlp.weight": 0.5 * matrix(hidden, hidden),
            f"clover_heads.{head}.mlp.bias": 0.1 * matrix(1, hidden)[0],
        }
    for layer in range(layers):
        tensors |= layer_tensors(f"layers.{layer}", hidden, hidden, matrix)
        tensors[f"layers.{layer}.input_layernorm.weight"] = 1 + 0.1 * matrix(1, hidden)[0]
    return _clover(target, heads, layers, tensors)


def _clover(target: Network, heads: int, layers: int, tensors: dict[str, np.ndarray]) -> Checkpoint:
    clover = {"num_heads": heads, "num_layers": layers}
    config = {**drafter_config(target), "clover": clover}
    return Checkpoint("clover", Path("clover"), config, tensors)


def falcon_checkpoint(target: Network, *, seed: int = 0, size: int = 2) -> Checkpoint:
    """A random drafter in the layout of Falcon, which predicts `size` tokens ahead. It often agrees
    with a target of small `residual`: its cells pass the token's embedding on, and its MLP has a
    unit for each token, which adds the row of the target's head for the token so many steps
    behind."""
    states, following = _following(target)
    (count, hidden), matrix = states.shape, random_matrices(seed)
    tokens = np.arange(count)
    for _ in range(size):
        tokens = following[tokens]
    one, open_gate = np.eye(hidden, dtype=np.float32), np.full(hidden, 2.0, np.float32)
    x, tensors = target.weights.embedding.data, dict[str, np.ndarray]()
    for cell in range(2):
        width = hidden if cell else 2 * hidden
        quarters = [0.3 * matrix(hidden, width) for _ in range(4)]
        quarters[2][:, :hidden] += 2 * one
        biases = [open_gate, matrix(1, hidden)[0], 0 * open_gate, open_gate]
        tensors |= {
            f"lstm.weight_ih_l{cell}": np.concatenate(quarters),
            f"lstm.weight_hh_l{cell}": matrix(4 * hidden, hidden),
            f"lstm.bias_ih_l{cell}": np.concatenate(biases),
            f"lstm.bias_hh_l{cell}": 0.1 * matrix(1, 4 * hidden)[0],
        }
        x = np.tanh(np.tanh(2 * x))
    layer = layer_tensors("layers.0", hidden, hidden, matrix)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True))
    layer |= {
        "layers.0.self_attn.o_proj.weight": 6 * layer["layers.0.self_attn.o_proj.weight"],
        "layers.0.mlp.gate_proj.weight": x / 8,
        "layers.0.mlp.up_proj.weight": x / 8,
        "layers.0.mlp.down_proj.weight": 0.04 * target.weights.head.data[tokens].T,
    }
    config = {**drafter_config(target), "intermediate_size": count, "k_mask": size}
    return Checkpoint("falcon", Path("falcon"), config, tensors | layer)


def chimera_checkpoint(
    target: Network, *, seed: int = 0, heads: int = 4, modulus: int = 0
) -> Checkpoint:
    """A random drafter of Chimera, which often agrees with a target of small `residual`: it passes
    the last token's embedding on. With a `modulus`, tokens that it divides cannot be drafted."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    one = np.eye(hidden, dtype=np.float32)
    tensors = {
        "trimlp.0.linear.weight": 0.5 * matrix(3 * hidden, 3 * hidden),
        "trimlp.0.linear.bias": 0.1 * matrix(1, 3 * hidden)[0],
        "trimlp.1.weight": np.hstack([0.2 * matrix(hidden, 2 * hidden), one]),
        **layer_tensors("fast_layer1.0", hidden, hidden, matrix),
        "fast_layer1.0.input_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
    }
    for head in range(heads):
        tensors[f"resolvers.{head}.weight"] = np.hstack([0.3 * matrix(hidden, hidden), one])
    if modulus:
        count = np.arange(target.spec.vocab_size)
        tensors["token_map"] = count[count % modulus > 0]
    config = {**drafter_config(target), "chimera_num_heads": heads}
    return Checkpoint("chimera", Path("chimera"), config, tensors)


#: Names in the layouts of modules that predict further tokens: the prefixes of the layer and of the
#: other tensors, the norms of embedding and state, the projection and the last norm.
MTP_LAYOUTS = {
    "nextn": (
        "model.layers.1.", "model.layers.1.", "enorm", "hnorm", "eh_proj", "shared_head.norm"
    ),
    "qwen": (
        "mtp.layers.0.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    ),
    "mimo": (
        "model.mtp_layers.0.", "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm",
        "input_proj", "final_layernorm",
    ),
    "mimo v2": (
        "model.mtp.layers.0.", "model.mtp.layers.0.", "enorm", "hnorm", "eh_proj",
        "final_layernorm",
    ),
    "longcat": (
        "model.mtp.layers.0.", "model.mtp.", "layers.0.enorm.m", "layers.0.hnorm.m",
        "layers.0.eh_proj", "norm",
    ),
}  # fmt: skip
#: Parts of a layer that have other names in a layout.
MTP_PARTS = {
    "mimo v2": {"post_attention_layernorm": "pre_mlp_layernorm"},
    "longcat": {"mlp": "transformer_layer.mlp"},
}


def mtp_checkpoint(
    target: Network, *, seed: int = 0, layout: str = "nextn", modules: int = 1
) -> Checkpoint:
    """Random modules that predict further tokens, alone, in one of `MTP_LAYOUTS`; several in that
    of MiMo-V2. They often agree with a target of small `residual`: they pass their token's
    embedding on."""
    tensors: dict[str, np.ndarray] = {}
    for number in range(modules):
        tensors |= {
            name.replace(".layers.0.", f".layers.{number}."): tensor
            for name, tensor in _mtp_tensors(target, seed + 100 * number, layout).items()
        }
    config = drafter_config(target)
    if layout == "mimo v2":  # whose modules have a window; here one of more than any text
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = target.spec.max_positions
    return Checkpoint("mtp", Path("mtp"), config, tensors)


def _mtp_tensors(target: Network, seed: int, layout: str) -> dict[str, np.ndarray]:
    """The tensors of the first module."""
    hidden, matrix = target.spec.hidden_size, random_matrices(seed)
    layer, module, *norms, projection, last = MTP_LAYOUTS[layout]
    parts: list[np.ndarray] = [np.eye(hidden, dtype=np.float32), 0.2 * matrix(hidden, hidden)]
    tensors = {
        f"{module}{projection}.weight": np.hstack(parts[::-1] if layout == "mimo" else parts),
        **layer_tensors(layer.rstrip("."), hidden, hidden, matrix),
    }
    for part, other in MTP_PARTS.get(layout, {}).items():
        own = f"{layer}{part}."
        for name in [one for one in tensors if one.startswith(own)]:
            tensors[f"{layer}{other}.{name[len(own) :]}"] = tensors.pop(name)
    for name in (f"{layer}input_layernorm", *(f"{module}{norm}" for norm in (*norms, last))):
        tensors[f"{name}.weight"] = 1 + 2 * matrix(1, hidden)[0]
    return tensors


def _following(target: Network) -> tuple[np.ndarray, np.ndarray]:
    """The state of each token `[vocab_size, hidden_size]`, and the token that the target predicts
    from it, if its layers added nothing to the embeddings."""
    embedding, head = target.weights.embedding.data, target.weights.head.data
    states = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True))
    return states, (states @ head.T).argmax(-1)


def _predicting(target: Network, steps: int) -> np.ndarray:
    """A head that predicts the token `steps` tokens behind a state's, float32 `[vocab_size,
    hidden_size]`, if the target's layers added nothing to the embeddings: each row is the sum of
    the states before its token."""
    states, following = _following(target)
    tokens = np.arange(len(states))
    for _ in range(steps):
        tokens = following[tokens]
    rows = np.zeros_like(states)
    np.add.at(rows, tokens, 0.15 * states)
    return rows
