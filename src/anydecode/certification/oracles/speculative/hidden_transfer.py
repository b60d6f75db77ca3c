"""Oracle test of hidden-transfer (arXiv:2404.12022): every tree follows from pseudo states behind
the last accepted node, which run position by position, and samples follow the target under the
rejection rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.mtp_future import small_script
from anydecode.certification.oracles.speculative.ppd import plan
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.oracles.speculative.state_drafters import TargetStates, shares
from anydecode.certification.rounds import TracedRound, accepted, rounds
from anydecode.certification.tiny_transfer import (
    small_transfer_model,
    transfer_maps,
    transfer_model,
    transfer_network,
)
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.network import Network

PROMPTS = ("the cat sat on the cat", "a quick zebra")


class Transferred(TargetStates):
    """A text behind whose last token pseudo states stand."""

    def __init__(self, network: Network, maps: HiddenTransfer) -> None:
        super().__init__(network)
        self.maps, self.length, self.last = maps, 0, list[np.ndarray]()

    def logits(self, text: list[int], count: int) -> list[np.ndarray]:
        """The logits of the pseudo states behind `text`, which continues the text of the call
        before."""
        for token in text[self.length :]:
            self.last = self.states(token)
        self.length = len(text)
        rows, head = [], self.weights.head.data
        for map, start in zip(self.maps.maps[:count], self.maps.layers, strict=False):
            x = map.astype(np.float64) @ self.last[start]
            for layer in range(start, len(self.weights.layers)):
                x = x + self._attention(x, layer)
                x = x + self._mlp(x, layer)
            rows.append(head @ self.normed(x))
        for stored in (*self.keys, *self.values):
            del stored[len(text) :]
        return rows


@oracle_test("hidden-transfer")
def hidden_transfer() -> Iterator[Check]:
    """Trees and numbers of rows equal the oracle's; the rejection rule is exact."""
    for key, size, layers in (
        ("hidden-transfer", 8, (1, 2, 2)),
        ("hidden-transfer:size=5", 5, (0, 3, 4)),
        ("hidden-transfer:size=14", 14, (3,)),
    ):
        for temperature in (0.0, 0.8):
            about = f"{key}, layers {layers}, T={temperature}"
            found, equal = [], True
            for prompt in PROMPTS:
                with transfer_model(layers, prefix_cache=False) as llm:
                    trace = rounds(llm, key, prompt, 32, temperature=temperature)
                    num_rows = llm.engine.runners["target"].num_rows
                found += trace
                equal &= _follows(trace, layers, size, temperature, num_rows)
            yield Check(f"{about}: trees and numbers of rows equal the oracle's", equal)
            count = accepted(found)
            yield Check(f"{about}: drafts are accepted", count > 5, str(count))
    yield from rejection_checks("hidden-transfer", small_transfer_model, script=small_script())


def _follows(
    trace: list[TracedRound], layers: tuple[int, ...], size: int, temperature: float, num_rows: int
) -> bool:
    """Whether every tree has the candidates of its state, and the passes have so many rows."""
    network = transfer_network()
    maps = transfer_maps(network, layers)
    planned = plan(maps.accuracies.astype(np.float64), size)
    model, count, prefix = Transferred(network, maps), 0, list[int]()
    rows = len(trace[0].text) - 1
    for one in trace:
        slots = [
            [token for token, _ in shares(row, temperature, len(one.text) + number)]
            for number, row in enumerate(model.logits(prefix, count) if count else ())
        ]
        tree, numbers = planned[count]
        paths = [tuple(slots[i][rank] for i, rank in enumerate(path)) for path in tree]
        if sorted(one.paths) != sorted(paths):
            return False
        rows += 1 + len(paths) + sum(numbers)
        last = tuple(one.generated[:-1])
        count = dict(zip([(), *paths], numbers, strict=True))[last]
        prefix = [*one.text, *last]
    return len(trace) > 5 and rows == num_rows
