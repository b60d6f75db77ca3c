"""Oracle test of mtp-future (arXiv:2507.11851): every tree follows from the masks behind the last
accepted candidate, which run a copy of the model with the adapter merged, and from the head's
tensors; samples follow the target under the rejection rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.oracles.speculative.state_drafters import TargetStates, shares
from anydecode.certification.oracles.transformer import rms_norm
from anydecode.certification.rounds import TracedRound, accepted, rounds
from anydecode.certification.tiny_future import (
    future_masks,
    future_model,
    future_network,
    small_future_model,
    small_future_network,
)
from anydecode.models.future_masks import FutureMasks, SamplerLayer
from anydecode.models.network import Network

PROMPTS = ("the cat sat on the cat", "a quick zebra")


class Masked(TargetStates):
    """A text behind which masks stand that run the layers with the adapter."""

    def __init__(self, network: Network, parts: FutureMasks) -> None:
        super().__init__(network)
        merged = deepcopy(network)
        for layer in merged.weights.layers:
            for weight in layer.matrices:
                factors = parts.factors[weight.name]
                weight.data = weight.data + factors.scale * (factors.up @ factors.down)
        self.parts = parts
        self.adapted = TargetStates(merged)
        self.adapted.keys, self.adapted.values = self.keys, self.values
        self.num_tokens = 0

    def group(self, text: list[int], count: int) -> list[np.ndarray]:
        """The states after the final norm of the masks behind `text`, which continues the text of
        the call before."""
        for token in text[self.num_tokens :]:
            self.states(token)
        self.num_tokens = len(text)
        states = []
        for mask in self.parts.masks[:count]:
            x = mask.astype(np.float64)
            for layer in range(len(self.weights.layers)):
                x = x + self.adapted._attention(x, layer)
                x = x + self.adapted._mlp(x, layer)
            states.append(self.normed(x))
        for stored in (*self.keys, *self.values):
            del stored[len(text) :]
        return states


def layer_outputs(layer: SamplerLayer, x: np.ndarray) -> np.ndarray:
    """A linear layer, SiLU and a layer norm, in float64."""
    y = layer.weight.astype(np.float64) @ x + layer.bias
    y = y / (1 + np.exp(-y))
    return (y - y.mean()) / np.sqrt(y.var() + 1e-5) * layer.norm + layer.norm_bias


def next_token(
    parts: FutureMasks,
    network: Network,
    state: np.ndarray,
    last: int,
    temperature: float,
    position: int,
) -> int:
    """The candidate at `position` behind the token `last`."""
    head, embedding = network.weights.head.data, network.weights.embedding.data
    probable = np.argsort(-(head @ state), kind="stable")[:64]
    inputs = np.concatenate([embedding[last], state])
    outputs = layer_outputs(parts.second, layer_outputs(parts.first, inputs))
    logits = np.full(len(head), -np.inf)
    logits[probable] = head[probable] @ outputs
    return shares(logits, temperature, position)[0][0]


@oracle_test("mtp-future")
def mtp_future() -> Iterator[Check]:
    """Trees and numbers of rows equal the oracle's; the rejection rule is exact."""
    for key, masks in (
        ("mtp-future", 2),
        ("mtp-future:masks=3", 3),
        ("mtp-future:masks=3,linear=true", 3),
    ):
        is_linear = "linear" in key
        for temperature in (0.0, 0.8):
            about = f"{key}, T={temperature}"
            found, equal = [], True
            for prompt in PROMPTS:
                with future_model(prefix_cache=False) as llm:
                    trace = rounds(llm, key, prompt, 32, temperature=temperature)
                    num_rows = llm.engine.runners["target"].num_rows
                found += trace
                equal &= _follows(trace, masks, is_linear, temperature)
                expected = _num_rows(trace, masks, is_linear)
                yield Check(
                    f"{about}: passes have the masks' rows",
                    num_rows == expected,
                    f"{num_rows} rows, {expected} expected",
                )
            yield Check(f"{about}: trees equal the oracle's", equal)
            count = accepted(found)
            yield Check(f"{about}: drafts are accepted", count > 5, str(count))
    yield from rejection_checks("mtp-future", small_future_model, script=small_script(), kind="iid")


def small_script() -> Callable[[tuple[int, ...]], np.ndarray]:
    """The logits of `small_future_network`, from the last token alone."""
    network = small_future_network()
    weights = network.weights

    def logits(text: tuple[int, ...]) -> np.ndarray:
        state = weights.embedding.data[text[-1]]
        row: np.ndarray = rms_norm(state, weights.final_norm, 1e-5) @ weights.head.data.T
        return row.astype(np.float32)

    return logits


def _num_rows(trace: list[TracedRound], masks: int, is_linear: bool) -> int:
    """The rows of a generation: the prompt, then the last token, the candidates and the masks."""
    rows = len(trace[0].text) - 1
    for one in trace:
        groups = 1 if is_linear else len(one.tokens) + 1
        rows += 1 + len(one.tokens) + masks * groups
    return rows


def _follows(trace: list[TracedRound], masks: int, is_linear: bool, temperature: float) -> bool:
    """Whether every draft is the chain of the masks behind the last accepted candidate."""
    network = future_network()
    parts = future_masks(network)
    model, prefix = Masked(network, parts), list[int]()
    is_last = True  # whether masks stood behind the last accepted candidate
    for one in trace:
        chain: list[int] = []
        for state in model.group(prefix, masks) if prefix and is_last else ():
            last, position = [*one.text, *chain][-1], len(one.text) + len(chain)
            chain.append(next_token(parts, network, state, last, temperature, position))
        if one.paths != [tuple(chain[: length + 1]) for length in range(len(chain))]:
            return False
        prefix = one.text + one.generated[:-1]
        is_last = not is_linear or len(one.generated) == len(one.tokens) + 1
    return len(trace) > 5
