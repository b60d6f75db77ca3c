"""Oracle test of FiRST: prompts layer by layer, and texts without the layers that they skip."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth import fewer_layers
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.rounds import plain_token, rounds
from anydecode.certification.tiny import layer_routed_model
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.network import Network

#: In the last two, the mean of the probabilities and that of their logits choose differently.
PROMPTS = (*fewer_layers.PROMPTS, "a bad cab", "if x < 3: return y")
LENGTH = 40


class SkippingForward(Forward):
    """A forward pass whose prompt decides which layers run."""

    def __init__(self, network: Network, routers: LayerRouters) -> None:
        super().__init__(network)
        self.routers, self.skipped = routers, set[int]()

    def read(self, prompt: list[int]) -> np.ndarray:
        """Runs the prompt; returns its last logits."""
        states = [self._embedding(token) for token in prompt]
        for layer in range(len(self.weights.layers)):
            if layer in self.routers.layers:
                index = self.routers.layers.index(layer)
                scores = [self.routers.weight[index] @ x + self.routers.bias[index] for x in states]
                if np.mean([1 / (1 + np.exp(-score)) for score in scores]) < 0.5:
                    self.skipped.add(layer)
                    continue
            states = [self._through(x, layer) for x in states]
        return self._logits(states[-1])

    def step_kept(self, token: int) -> np.ndarray:
        x = self._embedding(token)
        for layer in range(len(self.weights.layers)):
            if layer not in self.skipped:
                x = self._through(x, layer)
        return self._logits(x)

    def _through(self, x: np.ndarray, layer: int) -> np.ndarray:
        x = x + self._attention(x, layer)
        return x + self._mlp(x, layer)


@oracle_test("first-router")
def first_router() -> Iterator[Check]:
    """A layer runs where the mean probability over the prompt's tokens is at least .5."""
    with layer_routed_model() as llm:
        routers = llm.model.layer_routers  # type: ignore[attr-defined]
    for temperature in (0.0, 0.9):
        wrong = wrong_counts = 0
        subsets = set()
        with layer_routed_model() as llm:
            network: Network = llm.model.network  # type: ignore[attr-defined]
            for prompt in PROMPTS:
                forward, text = SkippingForward(network, routers), list(prompt.encode())
                logits = forward.read(text)
                subsets.add(frozenset(forward.skipped))
                num_layers = len(network.weights.layers) - len(forward.skipped)
                for one in rounds(llm, "first-router", prompt, LENGTH, temperature=temperature):
                    token = plain_token(logits, len(text), temperature)
                    wrong += one.generated != [token]
                    counts = one.entry["mixers"], one.entry["mlps"]
                    wrong_counts += counts != (num_layers, num_layers)
                    text += one.generated
                    logits = forward.step_kept(text[-1])
        where = f"T={temperature}"
        yield Check(f"tokens equal the replay, {where}", wrong == 0, f"{wrong} differ")
        yield Check(f"sublayers equal the replay, {where}", wrong_counts == 0)
        detail = "; ".join(str(sorted(one)) for one in subsets)
        yield Check(f"prompts skip different layers, {where}", len(subsets) > 1, detail)


@measure(
    "first-router", "share of tokens that differ from the full model's", samples=12, margin=0.9
)
def first_router_loss(samples: int) -> float:
    """On the full model's texts, with random routers."""
    return fewer_layers.agreement_lost("first-router", samples, layer_routed_model)
