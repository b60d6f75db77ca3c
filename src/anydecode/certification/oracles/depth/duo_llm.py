"""Oracle test of Duo-LLM's oracle: all patterns of MLPs of each token, one forward pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.fewer_layers import layered
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.rounds import TracedRound, plain_token, rounds
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.mlp_routers import NOTHING, SMALL, MlpRouters
from anydecode.models.network import Network
from anydecode.models.small_mlps import SmallMlps

LAYERS, FIRST, COUNT = 10, 1, 8
#: Nats by which float32 may differ.
CLOSE = 1e-3


class PatternForward(Forward):
    """Scores a position with some of its MLPs, with or without keeping it; with `small`, small MLPs
    run in place of the others."""

    def __init__(self, network: Network, small: SmallMlps | None = None) -> None:
        super().__init__(network)
        self.small = small

    def step_pattern(
        self,
        token: int,
        skipped: set[int],
        keep: bool,
        behind_attention: Callable[[int, np.ndarray], None] = lambda layer, state: None,
    ) -> np.ndarray:
        x, length = self._embedding(token), len(self.keys[0])
        for layer in range(LAYERS):
            x = x + self._attention(x, layer)
            behind_attention(layer, x)
            x = x + (self._small(x, layer) if layer in skipped else self._mlp(x, layer))
        if not keep:
            for rows in (*self.keys, *self.values):
                del rows[length:]
        return self._logits(x)

    def _small(self, x: np.ndarray, layer: int) -> np.ndarray:
        if self.small is None:
            return np.zeros_like(x)
        y = self._normed(x, self.small.norm[layer])
        gate = self.small.gate[layer] @ y
        inner = gate / (1 + np.exp(-gate)) * (self.small.up[layer] @ y)
        added: np.ndarray = self.small.down[layer] @ inner
        return added


def nats(logits: np.ndarray, label: int) -> float:
    """-ln of the label's probability."""
    return float(np.logaddexp.reduce(logits) - logits[label])


@oracle_test("duo-llm")
def duo_llm() -> Iterator[Check]:
    """Of ten layers, the eight in the middle have a choice."""
    with TemporaryDirectory() as folder:
        file, routers_file = Path(folder) / "small_mlps.safetensors", Path(folder) / "routers"
        with layered(LAYERS, 1.0) as llm:
            network: Network = llm.model.network  # type: ignore[attr-defined]
        small = random_mlps(network)
        small.save(file)
        yield from _checks(0.0, "duo-llm", None)
        yield from _checks(0.9, "duo-llm:budget=3", 3)
        yield from _checks(0.9, f"duo-llm:small={file}", None, small)
        for mlps in (None, small):
            routers = random_routers(network, NOTHING if mlps is None else SMALL)
            routers.save(routers_file)
            decoder = f"duo-llm:routers={routers_file}" + (f",small={file}" if mlps else "")
            yield from _router_checks(decoder, routers, mlps)


def random_mlps(network: Network) -> SmallMlps:
    """Small MLPs of the layers with a choice."""
    random, size, width = np.random.default_rng(3), network.spec.hidden_size, 8
    middle = range(FIRST, FIRST + COUNT)

    def matrices(*shape: int) -> dict[int, np.ndarray]:
        return {one: random.standard_normal(shape, np.float32) / 4 for one in middle}

    norm, gate, up, down = (
        matrices(*shape) for shape in ((size,), (width, size), (width, size), (size, width))
    )
    return SmallMlps(norm, gate, up, down, model_fingerprint(network))


def random_routers(network: Network, target: str) -> MlpRouters:
    """MLP routers of the layers with a choice."""
    random, layers = np.random.default_rng(4), list(range(FIRST, FIRST + COUNT))
    weight = random.standard_normal((COUNT, network.spec.hidden_size), np.float32)
    bias = random.standard_normal(COUNT, np.float32)
    return MlpRouters(layers, weight, bias, model_fingerprint(network), target)


def _router_checks(decoder: str, routers: MlpRouters, small: SmallMlps | None) -> Iterator[Check]:
    """What the routers choose for each token, from states of the pattern that they choose."""
    where = f"routers{', small MLPs' if small else ''}"
    with layered(LAYERS, 1.0) as llm:
        network: Network = llm.model.network  # type: ignore[attr-defined]
        trace = rounds(llm, decoder, "abcab", 6, temperature=0.9)
    forward, middle = PatternForward(network, small), range(FIRST, FIRST + COUNT)
    for token in b"abca":
        forward.step_pattern(token, set(), keep=True)
    equal_choices, equal_losses = [], []
    for one in trace:
        runs, token = set(one.entry["routed_pattern"]), one.text[-1]

        def compare(layer: int, x: np.ndarray, runs: set[int] = runs) -> None:
            if layer in middle:
                number = layer - FIRST
                score = float(routers.weight[number] @ x + routers.bias[number])
                equal_choices.append(abs(score) < CLOSE or (score > 0) == (layer in runs))

        logits = forward.step_pattern(token, set(middle) - runs, False, compare)
        loss = nats(logits, one.generated[0])
        equal_losses.append(abs(one.entry["routed_loss"] - loss) < CLOSE)
        forward.step_pattern(token, set(), keep=True)
    yield Check(f"{where}: choices equal the replay", all(equal_choices))
    yield Check(f"{where}: losses equal the replay", all(equal_losses))
    chosen = {tuple(one.entry["routed_pattern"]) for one in trace}
    yield Check(f"{where}: tokens choose different patterns", len(chosen) > 1)


def _checks(
    temperature: float, decoder: str, budget: int | None, small: SmallMlps | None = None
) -> Iterator[Check]:
    where = f"T={temperature}, budget {budget}{', small MLPs' if small else ''}"
    with layered(LAYERS, 1.0) as llm:
        network: Network = llm.model.network  # type: ignore[attr-defined]
        trace = rounds(llm, decoder, "abcab", 5, temperature=temperature)
    forward = PatternForward(network, small)
    for token in b"abca":
        forward.step_pattern(token, set(), keep=True)
    results = [_equals(forward, one, budget, temperature) for one in trace]
    names = ("tokens", "losses", "best patterns", "controls")
    for name, equal in zip(names, zip(*results, strict=True), strict=True):
        yield Check(f"{where}: {name} equal the replay", all(equal))
    chosen = {tuple(one.entry["pattern"]) for one in trace}
    yield Check(f"{where}: tokens choose different patterns", len(chosen) > 1)
    gains = [one.entry["full_loss"] - one.entry["loss"] for one in trace]
    yield Check(f"{where}: choices predict better", float(np.mean(gains)) > 0, f"{gains}")


def _equals(
    forward: PatternForward, one: TracedRound, budget: int | None, temperature: float
) -> list[bool]:
    """Whether the token, the losses of all patterns, the best one and the control are right."""
    token, entry = one.text[-1], one.entry
    middle = range(FIRST, FIRST + COUNT)
    table: dict[frozenset[int], np.ndarray] = {}
    for size in range(COUNT + 1):
        for run in combinations(middle, size):
            table[frozenset(run)] = forward.step_pattern(token, set(middle) - set(run), keep=False)
    full = forward.step_pattern(token, set(), keep=True)
    label = plain_token(full, len(one.text), temperature)
    wrong = abs(entry["full_loss"] - nats(full, label))
    for number, loss in enumerate(entry["losses"]):
        chosen = frozenset(FIRST + i for i in range(COUNT) if number >> i & 1)
        wrong = max(wrong, abs(loss - nats(table[chosen], label)))
    allowed = {run: row for run, row in table.items() if budget in (None, len(run))}
    chosen = frozenset(entry["pattern"])
    least = min(nats(row, label) for row in allowed.values())
    is_best = chosen in allowed and nats(allowed[chosen], label) < least + CLOSE
    controls = [
        (nats(full, other), min(nats(row, other) for row in allowed.values()))
        for other in sorted(set(one.text))
    ]
    found = entry["control_full_loss"], entry["control_loss"]
    return [
        one.generated == [label],
        wrong < CLOSE and len(entry["losses"]) == 2**COUNT,
        is_best and abs(entry["loss"] - least) < CLOSE,
        any(np.allclose(found, expected, atol=CLOSE) for expected in controls),
    ]
