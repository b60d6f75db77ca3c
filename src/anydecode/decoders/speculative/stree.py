"""STree: token trees through state-space and hybrid models (Wu et al., "STree: Speculative Tree
Decoding for Hybrid State-Space Models", arXiv:2505.14969).

One pass scores a whole tree: the state of a node is that of its parent, advanced by one step, so no
branch computes the states before it again, and no node's state is kept. After acceptance, the next
pass advances the state over the accepted path again, from the stored inputs of its positions
(activation replay). `kernels/recurrent.py` does both for every tree. This method chooses the size
of the trees: the one with the most expected tokens per cost of a pass and of the replay after it.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import DraftBudget, SpeculationRound, Speculative
from anydecode.decoders.speculative.goodput import chain_drafter
from anydecode.errors import InvalidRequestError
from anydecode.models.interface import Model
from anydecode.scoring.cost import DEFAULT_ROW_COST
from anydecode.scoring.sequence import Sequence

#: Weight of a round in a node's acceptance rate, and of its first rate in that of a node that a
#: smaller budget left out, so that it is tried again.
_LEARNING, _FORGETTING = 0.1, 0.02


def replay_cost(model: Model) -> float:
    """The operations of a position whose states are advanced again, relative to those of a row."""
    recurrences = model.spec.recurrences.values()
    states = sum(int(np.prod(shape.state_shape or 0)) for shape in recurrences)
    network = getattr(model, "network", None)
    if not states or network is None:
        return 0.0
    matrices = {id(weight): weight for layer in network.weights.layers for weight in layer.matrices}
    products = sum(weight.out_features * weight.in_features for weight in matrices.values())
    # A number of a state takes a product with its decay and two products with sums, one of a matrix
    # a product with a sum.
    return 3 * states / (3 * states + 2 * products)


class ReplayBudget(DraftBudget):
    """The tree size with the most expected tokens per cost.

    The rate of a node, by its number in the tree, is how often it was accepted where it was
    drafted; that of node i begins as 1 / (i + 2). Each accepted node is a token more, and is
    advanced again by the next pass.

    Args:
        max_size: Largest number of nodes.
        replay: See `replay_cost`.
        row_cost: The cost of one more row, relative to a pass over one row; None: measured costs.
    """

    def __init__(self, max_size: int, replay: float, row_cost: float | None = None) -> None:
        self.replay = replay
        self.row_cost = row_cost
        self._first_rates = 1 / np.arange(2.0, max_size + 2)
        self.rates = self._first_rates.copy()
        self._size = max_size

    def size(self, sequence: Sequence) -> int:
        accepted = np.concatenate([[0.0], np.cumsum(self.rates)])
        seconds = np.array([self._seconds(sequence, nodes) for nodes in range(len(accepted))])
        row = (seconds[-1] - seconds[0]) / len(self.rates)
        goodput = (1 + accepted) / (seconds + self.replay * row * accepted)
        self._size = int(np.argmax(goodput))
        return self._size

    def _seconds(self, sequence: Sequence, num_nodes: int) -> float:
        """The cost of a pass with so many nodes."""
        if self.row_cost is not None:
            return 1 + self.row_cost * num_nodes
        cost_model = sequence.cost_model
        rows = 1 + cost_model.num_others() + num_nodes
        return cost_model.seconds(rows, len(sequence.all_tokens))

    def observe(self, round: SpeculationRound) -> None:
        """Update the rates of the drafted nodes, and of those that the budget left out."""
        accepted = set(round.result.path)
        drafted = [one for one in enumerate(round.numbers) if one[1] < len(self.rates)]
        for node, number in drafted:
            self.rates[number] += _LEARNING * ((node in accepted) - self.rates[number])
        left_out = slice(max([self._size, *(number + 1 for _, number in drafted)]), None)
        self.rates[left_out] += _FORGETTING * (self._first_rates - self.rates)[left_out]


@register(
    Card(
        "stree",
        "speculative",
        paper="STree (arXiv:2505.14969)",
        exactness="token-exact",
        summary="Token trees through state-space models, sized by what replaying the states costs.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "transitions are accumulated along a path one step at a time, in the order of plain"
            " decoding; the paper multiplies the inputs with products of transitions, which rounds"
            " otherwise, so its texts equal plain decoding's up to rounding only",
            "the state at a node with several children is kept until its last branch begins: at"
            " most log2(nodes) states of one head and layer per thread",
            "any diagonal or delta-rule state, not only Mamba-2's scalar decays",
            "any drafter, by default suffix automata; the paper distils a small Mamba-2 and takes"
            " trees of fixed shapes",
            "the size of a tree follows measured acceptance and costs; the paper's is fixed. With"
            " another rule than token-exact, a row counts as a tenth of a pass, so that no text"
            " depends on measured times",
        ),
        remote={
            "drafter": Nested(),
            "size": Range(1, 64),
            "replay": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
class STree(Speculative):
    """STree: token trees through state-space models.

    Args:
        drafter: Key of the speculative method that drafts.
        size: Largest number of nodes of a tree.
        replay: Cost of advancing the states over an accepted position again, relative to that of
            one more row in a pass; if absent, the share of a row's operations.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """

    def __init__(
        self,
        drafter: str = "suffix",
        size: int = 16,
        replay: float | None = None,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        rule = acceptance_rule(acceptance)
        super().__init__(chain_drafter(drafter, rule), size, rule)
        if replay is not None and replay < 0:
            raise InvalidRequestError(f"stree needs replay >= 0, not {replay}")
        self.replay = replay

    def budget(self, sequence: Sequence) -> DraftBudget:
        replay = self.replay
        if replay is None:
            replay = replay_cost(sequence.model())
        row_cost = None if is_token_exact(self.acceptance) else DEFAULT_ROW_COST
        return ReplayBudget(self.size, replay, row_cost)
