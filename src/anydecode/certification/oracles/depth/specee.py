"""Oracle test of SpecEE: texts and exits replayed by a forward pass whose caches have holes behind
the exits, with candidates of a forward pass of the draft model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import Step, agreement_lost, text_checks
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.transformer import rotate, softmax
from anydecode.certification.tiny import predicting_model
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.models.network import Network

DEPTH, ALWAYS = 16, {5, 9, 12}


class HoleForward(Forward):
    """Adds positions that store nothing behind their exit."""

    def __init__(self, network: Network, predictors: ExitPredictors) -> None:
        super().__init__(network)
        self.predictors, self.length = predictors, 0
        self.exits_of_tokens: list[int] = []

    def step_predicted(self, token: int, drafted: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Logits and number of layers; `drafted` are the draft model's logits, None in the
        prompt."""
        x, self.length, before = self._embedding(token), self.length + 1, np.zeros(4)
        checked = set(ALWAYS)
        for recent in self.exits_of_tokens[-5:]:
            checked |= {recent - 2, recent, recent + 2}
        num_layers = DEPTH
        for layer in range(DEPTH):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if drafted is None or layer + 1 not in checked or layer + 1 == DEPTH:
                continue
            best = sorted(range(len(drafted)), key=lambda one: -drafted[one])[:4]
            logits = self._logits(x)
            p = softmax(logits[best])
            one = self.predictors.predictors[layer + 1]
            inner = one.down @ np.concatenate([logits[best], p, p - before]) + one.down_bias
            before = p
            score = one.up @ np.where(inner > 0, inner, 0) + one.up_bias
            if score > 0 and logits.argmax() in best:
                num_layers = layer + 1
                break
        if drafted is not None:
            self.exits_of_tokens.append(num_layers)
        return self._logits(x), num_layers

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        weights, spec = self.weights.layers[layer], self.spec.layers[layer]
        shape, rope = spec.attention, spec.rope
        assert shape and rope and weights.query and weights.key and weights.value
        y, position = self._normed(x, weights.attention_norm), [self.length - 1]
        projected = (one.weight.data @ y for one in (weights.query, weights.key, weights.value))
        q, k, v = (one.reshape(1, -1, shape.head_dim) for one in projected)
        self.keys[layer].append(rotate(k, position, rope.frequencies)[0])
        self.values[layer].append(v[0])
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        mixed = []
        for head, one in enumerate(rotate(q, position, rope.frequencies)[0]):
            group = head * shape.num_kv_heads // shape.num_heads
            mixed.append(softmax(keys[:, group] @ one * shape.scale) @ values[:, group])
        assert weights.output is not None
        output: np.ndarray = weights.output.weight.data @ np.concatenate(mixed)
        return output


@oracle_test("specee")
def specee() -> Iterator[Check]:
    """Exits behind layers 5, 9, 12 and near those of the last five tokens, at a probability above
    .5, where the most probable token is one of the draft model's first four."""
    with predicting_model() as llm:
        predictors = llm.model.exit_predictors  # type: ignore[attr-defined]
        draft: Network = llm.engine.runners["draft"].model.network  # type: ignore[attr-defined]

    def replay(network: Network) -> Step:
        forward, drafter = HoleForward(network, predictors), Forward(draft)

        def step(token: int, index: int) -> tuple[np.ndarray, int, int]:
            drafted = drafter.step(token)
            logits, num_layers = forward.step_predicted(token, drafted if index >= 0 else None)
            return logits, num_layers, num_layers

        return step

    yield from text_checks("specee", predicting_model, replay)


@measure("specee", "share of tokens that differ from the full model's", samples=12, margin=0.9)
def specee_loss(samples: int) -> float:
    """On the full model's texts, with random predictors."""
    return agreement_lost("specee", samples, predicting_model)
