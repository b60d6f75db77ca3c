"""Grammar-aligned decoding (Park et al., "Grammar-Aligned Decoding", arXiv:2405.21047): ASAp.

Masking alone distorts: it takes prefixes that the model likes but that hardly ever end well. ASAp
learns, sample by sample, how likely each prefix is to end within the constraint, and weighs tokens
with it. The estimates start at one, only fall, and end at the truth, so the samples of one prompt
come to follow the model's own distribution given the constraint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.constrained.free import split, spoken, unmasked
from anydecode.decoders.decoder import Decoder
from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.constrained import ConstraintState
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Prompts whose tries are kept.
MOST_TRIES = 64


@dataclass(eq=False)
class Node:
    """A prefix. `probability` is the model's, of its last token; `mass` what the model gives to the
    tokens allowed next; `hope` the estimate that the text ends within the constraint."""

    probability: float = 1.0
    mass: float = 1.0
    hope: float = 1.0
    children: dict[int, Node] = field(default_factory=dict)

    def settle(self) -> None:
        """Bring `hope` up to date with the children; those never visited are hoped for in full."""
        lost = sum(child.probability * (1 - child.hope) for child in self.children.values())
        self.hope = max(0.0, self.mass - lost)


@register(
    Card(
        "asap",
        "constraint",
        paper="Grammar-Aligned Decoding (arXiv:2405.21047)",
        exactness="lossy",
        summary="Learns over samples which prefixes end within the constraint; undoes its bias.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=(
            "called lossy because plain masking is what it departs from: it follows the model's"
            " distribution given the constraint, which is reached as samples accumulate",
            "unvisited children are kept as one sum instead of one node each",
        ),
    )
)
class Asap(Decoder):
    """One trie per prompt, temperature and constraint; every finished sample refines it."""

    def __init__(self) -> None:
        self.tries: OrderedDict[Hashable, Node] = OrderedDict()

    def decode(self, sequence: Sequence) -> Decoding:
        node = self.trie(sequence)
        path = [node]
        for said in sequence.tokens:
            node = node.children.setdefault(said, Node())
            path.append(node)
        while not sequence.finished:
            scores = yield sequence.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            distribution, state = unmasked(scores.sampler_after(-1), row)
            token = self._draw(sequence, node, distribution, state, position)
            if token is None:
                node.hope = 0.0
                self._refine(path[:-1])
                raise ConstraintError("the constraint allows none of the tokens that may come here")
            if token not in node.children:
                node.children[token] = Node(float(np.exp(distribution.log_probability(token))))
            node = node.children[token]
            path.append(node)
            sequence.record_logprobs(row, position, token, sequence.sampler)
            sequence.emit([token])
        self._refine(path[:-1])

    def trie(self, sequence: Sequence) -> Node:
        """What is known about the prompt of `sequence`."""
        free, state = split(sequence.sampler)
        origin = getattr(state, "origin", None)
        if state is not None and origin is None:
            origin = sequence.root.id  # who knows which constraint this is: learn for it alone
        first = (tuple(sequence.prompt), sequence.adapter, sequence.namespace)
        key = (
            *first,
            free.temperature,
            origin,
            *map(_settings, (*free.pre_temperature, *free.post_temperature)),
        )
        self.tries.setdefault(key, Node())
        self.tries.move_to_end(key)
        if len(self.tries) > MOST_TRIES:
            self.tries.popitem(last=False)
        return self.tries[key]

    @staticmethod
    def _draw(
        sequence: Sequence,
        node: Node,
        distribution: Distribution,
        state: ConstraintState | None,
        position: int,
    ) -> int | None:
        """A token with weight p times hope, or None where no token has any."""
        tokens = spoken(distribution)
        scores = distribution.scores.astype(np.float64)
        mask = None if state is None else state.mask()
        if mask is not None:
            if mask.dtype != np.bool_:
                mask = np.isin(np.arange(int(tokens[-1]) + 1), mask)
            allowed = mask[tokens]
            node.mass = float(distribution.probabilities()[allowed].sum())
            scores = np.where(allowed, scores, -np.inf)
        for token, child in node.children.items():
            index = int(np.searchsorted(tokens, token))
            if child.hope < 1 and index < len(tokens) and tokens[index] == token:
                with np.errstate(divide="ignore"):
                    scores[index] += np.log(child.hope)
        kept = np.flatnonzero(scores > -np.inf)
        if not len(kept):
            return None
        if sequence.sampler.is_greedy:
            return int(tokens[kept[scores[kept].argmax()]])
        held = Distribution(tokens[kept].astype(np.int32), scores[kept])
        return held.sample(sequence.noise, position)

    @staticmethod
    def _refine(path: list[Node]) -> None:
        for node in reversed(path):
            node.settle()


def _settings(part: object) -> Hashable:
    """The kind of a policy's part and its numbers."""
    plain = {name: value for name, value in vars(part).items() if isinstance(value, (int, float))}
    return (type(part).__name__, *sorted(plain.items()))
