"""Small random models of Kimi K3 with published names, their logits by the equations of the report
(Kimi Team, arXiv:2607.24653), token by token in double precision, and their GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY
from gguf_models import finish, writer_with

HIDDEN, HEADS, HEAD, WINDOW, INNER = 48, 3, 16, 4, 40
RANK, QUERY_RANK, PLAIN, SHARED, VALUE = 20, 24, 10, 6, 12
EXPERTS, CHOSEN, EXPERT, LATENT = 5, 2, 24, 28
#: Five layers in blocks of two, so that the last block is not whole.
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "hidden_act": "situ",
    "activation_situ_beta": 2.0,
    "activation_situ_linear_beta": 3.0,
    "attn_res_block_size": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": CHOSEN,
    "num_shared_experts": 2,
    "moe_intermediate_size": EXPERT,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "kv_lora_rank": RANK,
    "q_lora_rank": QUERY_RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": SHARED,
    "v_head_dim": VALUE,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [3, 5],
        "kda_layers": [1, 2, 4],
        "num_heads": HEADS,
        "head_dim": HEAD,
        "short_conv_kernel_size": WINDOW,
        "gate_lower_bound": -3.0,
        "use_full_rank_gate": True,
    },
}
Tensors = dict[str, np.ndarray]


def kimi_k3_tensors(seed: int = 0) -> Tensors:
    """Random float32 tensors by published name. No norm has ones."""
    generator, tensors = np.random.default_rng(seed), Tensors()

    def add(name: str, *shape: int, scale: float = 0.25, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape) * scale + mean
        tensors[f"language_model.{name}"] = values.astype(np.float32)

    def norm(name: str, size: int = HIDDEN) -> None:
        add(f"{name}.weight", size, scale=0.3, mean=1.0)

    def score(name: str) -> None:
        norm(f"{name}_norm")
        add(f"{name}_proj.weight", 1, HIDDEN)

    def mlp(name: str, inner: int) -> None:
        for part in ("gate", "up"):
            add(f"{name}.{part}_proj.weight", inner, HIDDEN)
        add(f"{name}.down_proj.weight", HIDDEN, inner)

    add("model.embed_tokens.weight", BYTE_VOCABULARY, HIDDEN, scale=1.0)
    add("lm_head.weight", BYTE_VOCABULARY, HIDDEN, scale=0.12)
    norm("model.norm")
    score("model.output_attn_res")
    for layer in range(CONFIG["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        attention, experts = f"{start}.self_attn", f"{start}.block_sparse_moe"
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{start}.{name}")
        score(f"{start}.self_attention_res")
        score(f"{start}.mlp_res")
        if layer + 1 in CONFIG["linear_attn_config"]["kda_layers"]:
            for part in "qkv":
                add(f"{attention}.{part}_proj.weight", HEADS * HEAD, HIDDEN)
                add(f"{attention}.{part}_conv1d.weight", HEADS * HEAD, 1, WINDOW, scale=0.5)
            add(f"{attention}.f_a_proj.weight", HEAD, HIDDEN)
            add(f"{attention}.f_b_proj.weight", HEADS * HEAD, HEAD)
            add(f"{attention}.b_proj.weight", HEADS, HIDDEN)
            add(f"{attention}.A_log", HEADS, scale=0.5)
            add(f"{attention}.dt_bias", HEADS * HEAD, scale=0.5, mean=-1.0)
            add(f"{attention}.g_proj.weight", HEADS * HEAD, HIDDEN)
            norm(f"{attention}.o_norm", HEAD)
            add(f"{attention}.o_proj.weight", HIDDEN, HEADS * HEAD)
        else:
            add(f"{attention}.q_a_proj.weight", QUERY_RANK, HIDDEN)
            norm(f"{attention}.q_a_layernorm", QUERY_RANK)
            add(f"{attention}.q_b_proj.weight", HEADS * (PLAIN + SHARED), QUERY_RANK)
            add(f"{attention}.kv_a_proj_with_mqa.weight", RANK + SHARED, HIDDEN)
            norm(f"{attention}.kv_a_layernorm", RANK)
            add(f"{attention}.kv_b_proj.weight", HEADS * (PLAIN + VALUE), RANK)
            add(f"{attention}.g_proj.weight", HEADS * VALUE, HIDDEN)
            add(f"{attention}.o_proj.weight", HIDDEN, HEADS * VALUE)
        if layer < CONFIG["first_k_dense_replace"]:
            mlp(f"{start}.mlp", INNER)
            continue
        add(f"{experts}.gate.weight", EXPERTS, HIDDEN)
        add(f"{experts}.gate.e_score_correction_bias", EXPERTS, scale=0.2)
        for expert in range(EXPERTS):
            for part, shape in (
                ("w1", (EXPERT, LATENT)),
                ("w2", (LATENT, EXPERT)),
                ("w3", (EXPERT, LATENT)),
            ):
                add(f"{experts}.experts.{expert}.{part}.weight", *shape, scale=0.4)
        add(f"{experts}.routed_expert_down_proj.weight", LATENT, HIDDEN)
        add(f"{experts}.routed_expert_up_proj.weight", HIDDEN, LATENT)
        norm(f"{experts}.routed_expert_norm", LATENT)
        mlp(f"{experts}.shared_experts", 2 * EXPERT)
    return tensors


def kimi_k3_module(seed: int = 1) -> Tensors:
    """Random tensors of a module that predicts further tokens, whose layer is like the last one but
    for the scores of streams, by published name."""
    last, found = CONFIG["num_hidden_layers"] - 1, Tensors()
    start, module = (f"language_model.model.layers.{layer}." for layer in (last, last + 1))
    for name, tensor in kimi_k3_tensors(seed).items():
        if name.startswith(start) and "_res_" not in name:
            found[module + name.removeprefix(start)] = tensor
    generator = np.random.default_rng(seed)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norm = 1.0 + 0.3 * generator.standard_normal(HIDDEN)
        found[f"{module}{name}.weight"] = norm.astype(np.float32)
    projection = 0.25 * generator.standard_normal((HIDDEN, 2 * HIDDEN))
    return {**found, f"{module}eh_proj.weight": projection.astype(np.float32)}


def kimi_k3_checkpoint(seed: int = 0, **config: Any) -> Checkpoint:
    """A model as a loader would return it."""
    own = {**CONFIG, **config}
    return Checkpoint("tiny", Path("tiny"), own, kimi_k3_tensors(seed))


@dataclass
class KimiK3:
    """What a model computes; the attributes after the first two are those of a wrong twin.

    Attributes:
        tensors: By published name.
        eps: Of norms, but for those of latents and of low-rank queries.
        block: Layers of a block.
        decay_limit: The largest decay of one step, as an exponent.
        gates_attention: Whether the output of attention has a gate.
        norms_experts: Whether the sum of the experts' outputs is normed.
        caps: Of the gate and of the input of MLPs.
        normed_sums: Whether the normed streams are added, not the streams.
    """

    tensors: Tensors
    eps: float = CONFIG["rms_norm_eps"]
    block: int = CONFIG["attn_res_block_size"]
    decay_limit: float = -3.0
    gates_attention: bool = True
    norms_experts: bool = True
    caps: tuple[float, float] = (2.0, 3.0)
    normed_sums: bool = False
    _name: str = field(default="", init=False)

    def forward(self, tokens: list[int]) -> np.ndarray:
        """Logits `[len(tokens), vocab_size]`."""
        return self._norm(self.states(tokens), "model.norm") @ self._of("lm_head.weight").T

    def states(self, tokens: list[int]) -> np.ndarray:
        """The last hidden states before the final norm `[len(tokens), hidden]`."""
        current, sums = self._of("model.embed_tokens.weight")[tokens], []
        for layer in range(CONFIG["num_hidden_layers"]):
            self._name = f"model.layers.{layer}."
            x = self._mixed(current, sums, "self_attention_res") if sums else current
            starts_block = layer % self.block == 0
            if starts_block:
                sums.append(current)
            is_full = layer + 1 in CONFIG["linear_attn_config"]["full_attn_layers"]
            x = self._norm(x, "input_layernorm")
            x = self._attention(x) if is_full else self._delta(x)
            current = x if starts_block else current + x
            x = self._norm(self._mixed(current, sums, "mlp_res"), "post_attention_layernorm")
            current = current + (self._experts(x) if layer else self._mlp(x, "mlp"))
        self._name = ""
        return self._mixed(current, sums, "model.output_attn_res")

    def chain(self, text: list[int], count: int) -> list[int]:
        """The `count` tokens that the module of `kimi_k3_module` drafts behind `text`."""
        states, tokens, drafted = list(self.states(text)[:-1]), text[1:], list[int]()
        for _ in range(count):
            embedded = self._of("model.embed_tokens.weight")[tokens]
            self._name = f"model.layers.{CONFIG['num_hidden_layers']}."
            pair = [self._norm(embedded, "enorm"), self._norm(np.stack(states), "hnorm")]
            x = self._linear(np.concatenate(pair, -1), "eh_proj")
            x = x + self._attention(self._norm(x, "input_layernorm"))
            x = x + self._experts(self._norm(x, "post_attention_layernorm"))
            last = self._norm(x[-1], "shared_head.norm")
            self._name = ""
            drafted.append(int((self._of("lm_head.weight") @ last).argmax()))
            states.append(x[-1])
            tokens = [*tokens, drafted[-1]]
        return drafted

    def _of(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[f"language_model.{self._name}{name}"], np.float64)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._of(f"{name}.weight").T

    def _norm(self, x: np.ndarray, name: str, eps: float | None = None) -> np.ndarray:
        return _normed(x, self.eps if eps is None else eps) * self._of(f"{name}.weight")

    def _mixed(self, current: np.ndarray, sums: list[np.ndarray], name: str) -> np.ndarray:
        """The sum over streams `[streams, rows, hidden]`, weighted by a softmax."""
        streams = np.stack([*sums, current])
        normed = self._norm(streams, f"{name}_norm")
        shares = np.exp(self._linear(normed, f"{name}_proj"))
        values = normed if self.normed_sums else streams
        return (shares * values).sum(0) / shares.sum(0)

    def _delta(self, x: np.ndarray) -> np.ndarray:
        """Kimi delta attention."""
        count, mixed = len(x), {}
        for part in "qkv":
            kernel = self._of(f"self_attn.{part}_conv1d.weight")[:, 0]
            inputs = np.pad(self._linear(x, f"self_attn.{part}_proj"), ((WINDOW - 1, 0), (0, 0)))
            y = sum(inputs[i : i + count] * kernel[:, i] for i in range(WINDOW))
            mixed[part] = (y * _sigmoid(y)).reshape(count, HEADS, HEAD)
        q, k = (
            mixed[part] / np.sqrt((mixed[part] ** 2).sum(-1, keepdims=True) + 1e-6) for part in "qk"
        )
        steps = self._linear(self._linear(x, "self_attn.f_a_proj"), "self_attn.f_b_proj")
        steps = (steps + self._of("self_attn.dt_bias")).reshape(count, HEADS, HEAD)
        rate = np.exp(self._of("self_attn.A_log"))[:, None]
        decays = np.exp(self.decay_limit * _sigmoid(rate * steps))
        strengths = _sigmoid(self._linear(x, "self_attn.b_proj"))
        state, found = np.zeros((HEADS, HEAD, HEAD)), []
        for row in range(count):
            state = state * decays[row][:, :, None]
            change = mixed["v"][row] - np.einsum("hkv,hk->hv", state, k[row])
            state = state + np.einsum("hk,hv,h->hkv", k[row], change, strengths[row])
            found.append(np.einsum("hkv,hk->hv", state, q[row]) * HEAD**-0.5)
        gate = _sigmoid(self._linear(x, "self_attn.g_proj")).reshape(count, HEADS, HEAD)
        y = self._norm(np.stack(found), "self_attn.o_norm") * gate
        return self._linear(y.reshape(count, -1), "self_attn.o_proj")

    def _attention(self, x: np.ndarray) -> np.ndarray:
        """Latent attention without positions."""
        count = len(x)
        q = self._norm(self._linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        q = self._linear(q, "self_attn.q_b_proj").reshape(count, HEADS, PLAIN + SHARED)
        latents, shared = np.split(self._linear(x, "self_attn.kv_a_proj_with_mqa"), [RANK], -1)
        latents = self._norm(latents, "self_attn.kv_a_layernorm", 1e-6)
        both = self._linear(latents, "self_attn.kv_b_proj").reshape(count, HEADS, PLAIN + VALUE)
        k, v = np.split(both, [PLAIN], -1)
        shared = np.broadcast_to(shared[:, None], (count, HEADS, SHARED))
        scores = np.einsum("qhd,khd->hqk", q, np.concatenate([k, shared], -1))
        scores = scores * (PLAIN + SHARED) ** -0.5
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
        y = y.reshape(count, -1)
        if self.gates_attention:
            y = y * _sigmoid(self._linear(x, "self_attn.g_proj"))
        return self._linear(y, "self_attn.o_proj")

    def _gated(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        cap, up_cap = self.caps
        return cap * np.tanh(gate / cap) * _sigmoid(gate) * up_cap * np.tanh(up / up_cap)

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(self._gated(gate, up), f"{name}.down_proj")

    def _experts(self, x: np.ndarray) -> np.ndarray:
        name = "block_sparse_moe"
        scores = _sigmoid(self._linear(x, f"{name}.gate"))
        order = np.argsort(-scores - self._of(f"{name}.gate.e_score_correction_bias"), -1)
        chosen = np.zeros_like(scores)
        np.put_along_axis(chosen, order[:, :CHOSEN], 1.0, -1)
        shares = 1.5 * scores * chosen / (scores * chosen).sum(-1, keepdims=True)
        latent, total = self._linear(x, f"{name}.routed_expert_down_proj"), 0.0
        for expert in range(EXPERTS):
            one = f"{name}.experts.{expert}"
            y = self._gated(self._linear(latent, f"{one}.w1"), self._linear(latent, f"{one}.w3"))
            total = total + shares[:, expert : expert + 1] * self._linear(y, f"{one}.w2")
        if self.norms_experts:
            total = self._norm(np.asarray(total), f"{name}.routed_expert_norm")
        routed = self._linear(np.asarray(total), f"{name}.routed_expert_up_proj")
        return routed + self._mlp(x, f"{name}.shared_experts")


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _normed(x: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return normed


METADATA: dict[str, Any] = {
    "block_count": CONFIG["num_hidden_layers"],
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": [0, 0, 1, 0, 1],
    "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
    "attention.q_lora_rank": QUERY_RANK,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": RANK + SHARED,
    "attention.value_length": RANK,
    "attention.key_length_mla": PLAIN + SHARED,
    "attention.value_length_mla": VALUE,
    "rope.dimension_count": SHARED,
    "ssm.conv_kernel": WINDOW,
    "kda.head_dim": HEAD,
    "kda.gate_lower_bound": -3.0,
    "expert_count": EXPERTS,
    "expert_used_count": CHOSEN,
    "expert_feed_forward_length": EXPERT,
    "expert_shared_count": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_gating_func": 2,
    "expert_latent_length": LATENT,
    "leading_dense_block_count": 1,
    "activation.situ_beta": 2.0,
    "activation.situ_linear_beta": 3.0,
    "attn_res.block_size": 2,
}
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
#: Tensors of a layer, and their names in files.
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "q_a", "q_b")},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"self_attn.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    **{f"mlp.{part}": f"ffn_{name}" for part, name in _MLP.items()},
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{
        f"block_sparse_moe.shared_experts.{part}": f"ffn_{name}_shexp"
        for part, name in _MLP.items()
    },
    **{
        f"block_sparse_moe.routed_expert_{part}": f"ffn_routed_{part.removesuffix('_proj')}"
        for part in ("down_proj", "up_proj", "norm")
    },
}


def kimi_k3_gguf(path: Path, tensors: Tensors, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes of a model; `changes` replace or remove (None)
    metadata."""
    writer = writer_with(path, "kimi-k3", {**METADATA, **changes}, BYTE_VOCABULARY)
    usual = {name.removeprefix("language_model."): x for name, x in tensors.items()}
    outer = {"embed_tokens": "token_embd", "norm": "output_norm"}
    for name, other in outer.items():
        writer.add_tensor(f"{other}.weight", usual[f"model.{name}.weight"])
    writer.add_tensor("output.weight", usual["lm_head.weight"])
    writer.add_tensor("output_res_score.weight", _score(usual, "model.output_attn_res"))
    for layer in range(CONFIG["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        own = {name.removeprefix(start): x for name, x in usual.items() if name.startswith(start)}
        for name, tensor in _stored(own):
            writer.add_tensor(f"blk.{layer}.{name}", np.ascontiguousarray(tensor, np.float32))
    finish(writer)
    return path


def _score(tensors: Tensors, name: str) -> np.ndarray:
    """The weights of a norm times those of the product behind it."""
    product: np.ndarray = tensors[f"{name}_norm.weight"] * tensors[f"{name}_proj.weight"][0]
    return product


def _stored(own: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a layer in a file."""
    is_delta = "self_attn.A_log" in own
    yield "attn_res_score.weight", _score(own, "self_attention_res")
    yield "ffn_res_score.weight", _score(own, "mlp_res")
    for name, tensor in own.items():
        module = name.removesuffix(".weight")
        if module in _NAMES:
            yield f"{_NAMES[module]}.weight", tensor
        elif module == "self_attn.g_proj":
            yield f"{'ssm_g' if is_delta else 'attn_gate'}.weight", tensor
        elif module.endswith("_conv1d"):
            yield f"ssm_conv1d_{module[-8]}.weight", tensor.reshape(1, -1, 1, WINDOW)
        elif module == "self_attn.A_log":
            yield "ssm_a", -np.exp(tensor)
        elif module == "self_attn.dt_bias":
            yield "ssm_dt.bias", tensor
        elif module.endswith("e_score_correction_bias"):
            yield "exp_probs_b.bias", tensor
        elif module == "self_attn.kv_b_proj":
            heads = tensor.reshape(HEADS, PLAIN + VALUE, RANK)
            yield "attn_k_b.weight", heads[:, :PLAIN].swapaxes(1, 2)
            yield "attn_v_b.weight", heads[:, PLAIN:]
    if "block_sparse_moe.gate.weight" in own:
        for part, kind in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            names = [f"block_sparse_moe.experts.{i}.{part}.weight" for i in range(EXPERTS)]
            yield f"ffn_{kind}_exps.weight", np.stack([own[name] for name in names])
