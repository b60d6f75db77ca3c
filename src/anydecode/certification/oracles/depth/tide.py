"""Oracle test of TIDE: texts and exits replayed by a forward pass with routers, which stores keys
and values of the state at the exit in the layers behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import Step, agreement_lost, text_checks
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.tiny import routed_model
from anydecode.models.network import Network

THRESHOLD, MIN_LAYER = 0.85, 8


class _RoutedForward(Forward):
    def step_routed(
        self, token: int, routers: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, int]:
        """Adds a position that leaves at the first router above the threshold; returns its logits
        and its number of layers."""
        x, depth = self._embedding(token), len(self.weights.layers)
        for layer in range(depth):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if layer in routers:
                down, up = routers[layer]
                inner = down.astype(np.float64) @ x
                score = 1 / (1 + np.exp(-up @ (inner / (1 + np.exp(-inner)))))
                if score > THRESHOLD:
                    for other in range(layer + 1, depth):
                        self._attention(x, other)  # for its key and value alone
                    return self._logits(x), layer + 1
        return self._logits(x), depth


@oracle_test("tide")
def tide() -> Iterator[Check]:
    """Tokens leave where a router behind layer 8 or a later one gives more than .85."""
    with routed_model() as llm:
        own = llm.model.exit_routers  # type: ignore[attr-defined]
    routers = {
        exit - 1: (own.down[exit], own.up[exit]) for exit in own.down if exit - 1 >= MIN_LAYER
    }

    def replay(network: Network) -> Step:
        forward = _RoutedForward(network)

        def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
            logits, num_layers = forward.step_routed(token, routers if index >= 0 else {})
            return logits, num_layers, num_layers

        return step

    yield from text_checks("tide", routed_model, replay)


@measure("tide", "share of tokens that differ from the full model's", samples=12, margin=0.7)
def tide_loss(samples: int) -> float:
    """On the full model's texts, with random routers."""
    return agreement_lost("tide", samples, routed_model)
