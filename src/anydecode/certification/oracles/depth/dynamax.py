"""Oracle test of DYNAMAX: texts and exits replayed by a Llama that copies keys and values behind
the exit, and by a Mamba whose layers behind it read the state there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import Step, agreement_lost, text_checks
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.state_trees import TreeOracle
from anydecode.certification.oracles.transformer import rms_norm
from anydecode.certification.tiny import add_routers, readable_executor, routed_model
from anydecode.certification.tiny_recurrent import mamba_checkpoint
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.families import build_model
from anydecode.models.mamba_blocks import PARTS
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer

THRESHOLD = 0.9
MAMBA_LAYERS = 8


#: The states that the classifier of each exit has read.
Read = dict[int, list[np.ndarray]]


def leaves(
    routers: ExitRouters, num_layers: int, depth: int, x: np.ndarray, read: Read | None = None
) -> bool:
    """Whether a token with state x after `num_layers` of `depth` layers leaves. `read` has the
    states before it, and gets x."""
    if num_layers not in routers.down or num_layers < depth / 2:
        return False
    block = routers.block
    if block is not None:
        y = rms_norm(x, block.norm[num_layers], 1e-5)
        gate = block.gate[num_layers] @ y
        x = x + block.down[num_layers] @ (gate * _sigmoid(gate) * (block.up[num_layers] @ y))
    if routers.mamba is not None:
        assert read is not None
        read.setdefault(num_layers, []).append(x)
        x = x + scanned(routers.mamba, num_layers, read[num_layers])
    inner = routers.down[num_layers].astype(np.float64) @ x
    score = _sigmoid(routers.up[num_layers] @ (inner * _sigmoid(inner)))
    return bool(score > THRESHOLD)


def scanned(blocks: Any, exit: int, read: list[np.ndarray]) -> np.ndarray:
    """What a block of Mamba adds to the last of the states that it has read: a sum over all of
    them, each weighted with the decays behind it."""
    weights = {part: getattr(blocks, part)[exit].astype(np.float64) for part in PARTS}
    normed = np.stack([rms_norm(x, weights["norm"], 1e-5) for x in read])
    inputs, gates = np.split(normed @ weights["in_proj"].T, 2, axis=1)
    length, (width, window) = len(read), weights["conv"].shape
    convolved = np.tile(weights["conv_bias"], (length, 1))
    for position in range(length):
        for back in range(min(window, position + 1)):
            convolved[position] += weights["conv"][:, window - 1 - back] * inputs[position - back]
    u = convolved * _sigmoid(convolved)
    selected = u @ weights["x_proj"].T
    rank, size = weights["dt_proj"].shape[1], weights["a_log"].shape[1]
    steps = np.log1p(np.exp(selected[:, :rank] @ weights["dt_proj"].T + weights["dt_bias"]))
    into, out_of = selected[:, rank : rank + size], selected[-1, rank + size :]
    result = weights["skip"] * u[-1]
    for channel in range(width):
        rates = np.exp(weights["a_log"][channel])
        for position in range(length):
            elapsed = steps[position + 1 :, channel].sum()
            kept = np.exp(-rates * elapsed) * into[position] @ out_of
            result[channel] += steps[position, channel] * u[position, channel] * kept
    added: np.ndarray = weights["out_proj"] @ (result * gates[-1] * _sigmoid(gates[-1]))
    return added


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 0.5 + 0.5 * np.tanh(0.5 * x)
    return result


class CopyingForward(Forward):
    """Adds positions that leave early; the layers behind copy the last key and value."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.read: Read = {}

    def step_routed(self, token: int, routers: ExitRouters | None) -> tuple[np.ndarray, int]:
        x, depth = self._embedding(token), len(self.weights.layers)
        for layer in range(depth):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if routers is not None and leaves(routers, layer + 1, depth, x, self.read):
                for other in range(layer + 1, depth):
                    self.keys[other].append(self.keys[layer][-1])
                    self.values[other].append(self.values[layer][-1])
                return self._logits(x), layer + 1
        return self._logits(x), depth


class MambaText(TreeOracle):
    """A Mamba over one text, with the states that each layer has read. With `keeps`, layers behind
    an exit read nothing."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__(mamba_checkpoint(layers=MAMBA_LAYERS))
        self.keeps = keeps
        self.read: list[list[np.ndarray]] = [[] for _ in range(MAMBA_LAYERS)]

    def step_routed(self, token: int, routers: ExitRouters | None) -> tuple[np.ndarray, int]:
        embedding = self.tensors["backbone.embeddings.weight"]
        x, num_layers = embedding[token], MAMBA_LAYERS
        for layer, read in enumerate(self.read):
            if layer == num_layers and self.keeps:
                break
            read.append(x)
            if layer < num_layers:
                count = len(read)
                sees, parents = np.tri(count, dtype=bool), list(range(-1, count - 1))
                x = self._layer(np.stack(read), layer, sees, parents)[-1]
                if routers is not None and leaves(routers, layer + 1, MAMBA_LAYERS, x):
                    num_layers = layer + 1
                    routers = None
        y = rms_norm(x, self.tensors["backbone.norm_f.weight"], self.eps)
        logits: np.ndarray = y @ embedding.T + self.tensors["lm_head.bias"]
        return logits, num_layers


def routed_mamba(body: str = "mlp") -> LLM:
    """An engine over a tiny Mamba with random exit routers behind every layer, of a `body` as for
    `routed_model`."""
    model = build_model(mamba_checkpoint(layers=MAMBA_LAYERS), executor=readable_executor())
    add_routers(model, range(1, MAMBA_LAYERS), body)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048)


@oracle_test("dynamax")
def dynamax() -> Iterator[Check]:
    """Tokens leave in the upper half where a router gives more than .9."""
    for name, open_llm, key in (
        ("transformer", routed_model, "dynamax"),
        (
            "transformer, classifiers with a block",
            partial(routed_model, "block"),
            "dynamax",
        ),
        ("transformer, classifiers of Mamba", partial(routed_model, "mamba"), "dynamax"),
        ("Mamba", routed_mamba, "dynamax"),
        ("Mamba with kept states", routed_mamba, "dynamax:state=keep"),
    ):
        with open_llm() as llm:
            routers: ExitRouters = llm.model.exit_routers  # type: ignore[attr-defined]
        is_mamba = open_llm is routed_mamba

        def replay(
            network: Network,
            routers: ExitRouters = routers,
            is_mamba: bool = is_mamba,
            keeps: bool = key != "dynamax",
        ) -> Step:
            text = MambaText(keeps) if is_mamba else CopyingForward(network)

            def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
                logits, num_layers = text.step_routed(token, routers if index >= 0 else None)
                return logits, num_layers, num_layers

            return step

        for check in text_checks(key, open_llm, replay):
            yield Check(f"{name}: {check.name}", check.passed, check.detail)


@measure("dynamax", "share of tokens that differ from the full model's", samples=12, margin=0.7)
def dynamax_loss(samples: int) -> float:
    """On the full model's texts, with random routers."""
    return agreement_lost("dynamax", samples, routed_model)
