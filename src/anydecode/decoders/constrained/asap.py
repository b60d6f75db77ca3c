"""Grammar-aligned decoding (Park et al., "Grammar-Aligned Decoding", arXiv:2405.21047): ASAp.

Masking alone biases the distribution: it also follows likely prefixes that rarely lead to a text
within the constraint. ASAp estimates, sample by sample, the probability that each prefix is
completed within the constraint, and weights tokens by it. The estimates start at one, never
increase, and converge to the true probabilities, so the samples of one prompt converge to the
model's distribution given the constraint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.constrained.free import (
    split_constraint,
    token_ids,
    unconstrained_distribution,
)
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.constrained import ConstraintState
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Maximum number of tries (one per prompt, temperature and constraint).
MAX_TRIES = 64
#: Memory of one node of a trie, in bytes.
_BYTES_PER_NODE = 400


@dataclass(eq=False)
class Node:
    """A prefix in the trie.

    Attributes:
        probability: The model's probability of the last token of the prefix.
        mass: The model's probability of all tokens allowed next.
        completion_probability: The estimated probability that the text is completed within the
            constraint ("expected future grammaticality").
        children: The nodes of the next tokens.
    """

    probability: float = 1.0
    mass: float = 1.0
    completion_probability: float = 1.0
    children: dict[int, Node] = field(default_factory=dict)

    def update(self) -> None:
        """Updates `completion_probability` from the children; it is 1 for children not visited."""
        lost_mass = sum(
            child.probability * (1 - child.completion_probability)
            for child in self.children.values()
        )
        self.completion_probability = max(0.0, self.mass - lost_mass)


@register(
    Card(
        "asap",
        "constraint",
        paper="Grammar-Aligned Decoding (arXiv:2405.21047)",
        exactness="lossy",
        summary="Learns over samples which prefixes are completed within the constraint, and"
        " corrects the bias of masking.",
        works_with=("constraints", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "listed as lossy because it differs from plain masking: it follows the model's"
            " distribution given the constraint, to which it converges as samples accumulate",
            "unvisited children are stored as one sum instead of one node each",
            "the first sample of a prompt is that of plain masking, as in the paper; requests that"
            " run side by side do not use each other's results until they are finished",
            "a text that ends at the token limit counts as completed",
            "estimates are kept for the last 64 prompts",
        ),
    )
)
class Asap(Decoder):
    """Keeps one trie per prompt, temperature and constraint; every sample refines it. The `n`
    samples of a request run one after another, each with the estimates from those before it."""

    requirements = Requirements(samples_in_turn=True)

    def __init__(self) -> None:
        self.tries: OrderedDict[Hashable, Node] = OrderedDict()
        self._num_nodes = 0  # of all tries, those of dropped prompts included

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_NODE * self._num_nodes

    def decode(self, sequence: Sequence) -> Decoding:
        node = self.trie(sequence)
        path = [node]
        for generated in sequence.tokens:
            node = node.children.setdefault(generated, Node())
            path.append(node)
        while not sequence.finished:
            scores = yield sequence.score()
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            distribution, state = unconstrained_distribution(scores.sampler_after(-1), row)
            token = self._draw(sequence, node, distribution, state, position)
            if token is None:
                node.completion_probability = 0.0
                self._refine(path[:-1])
                raise ConstraintError("the constraint allows none of the tokens that may come here")
            if token not in node.children:
                node.children[token] = Node(float(np.exp(distribution.log_probability(token))))
            node = node.children[token]
            path.append(node)
            sequence.record_logprobs(row, position, token, sequence.sampler)
            sequence.emit([token])
        self._num_nodes += len(path)
        self._refine(path[:-1])

    def trie(self, sequence: Sequence) -> Node:
        """The root of the trie for the prompt, sampler and constraint of `sequence`."""
        unconstrained, state = split_constraint(sequence.sampler)
        origin = getattr(state, "origin", None)
        if state is not None and origin is None:
            origin = sequence.root.id  # the constraint cannot be identified: a trie of its own
        prompt_key = (tuple(sequence.prompt), sequence.adapter, sequence.namespace)
        key = (
            *prompt_key,
            unconstrained.temperature,
            origin,
            *map(_settings, (*unconstrained.pre_temperature, *unconstrained.post_temperature)),
        )
        self.tries.setdefault(key, Node())
        self.tries.move_to_end(key)
        if len(self.tries) > MAX_TRIES:
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
        """Samples a token with weight probability times completion probability; None if all weights
        are zero."""
        tokens = token_ids(distribution)
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
            if child.completion_probability < 1 and index < len(tokens) and tokens[index] == token:
                with np.errstate(divide="ignore"):
                    scores[index] += np.log(child.completion_probability)
        allowed_indices = np.flatnonzero(scores > -np.inf)
        if not len(allowed_indices):
            return None
        if sequence.sampler.is_greedy:
            return int(tokens[allowed_indices[scores[allowed_indices].argmax()]])
        allowed_distribution = Distribution(
            tokens[allowed_indices].astype(np.int32), scores[allowed_indices]
        )
        return allowed_distribution.sample(sequence.noise, position)

    @staticmethod
    def _refine(path: list[Node]) -> None:
        for node in reversed(path):
            node.update()


def _settings(part: object) -> Hashable:
    """The type of a sampler's part and its numeric settings."""
    numbers = {name: value for name, value in vars(part).items() if isinstance(value, (int, float))}
    return (type(part).__name__, *sorted(numbers.items()))
