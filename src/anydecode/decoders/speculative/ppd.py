"""PPD: trained prompt tokens behind nodes of a draft tree predict the next tree in the pass that
verifies it.

Chen et al., "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM
Inference", arXiv:2405.18628.

The state of a text is the number of prompt tokens behind its last accepted node: so many tokens
after the next one are predicted. Each state has a tree of candidates, and a number of prompt tokens
behind each of its nodes. They follow from the accuracies of the predictions: a node is the rank of
a token among its parent's candidates, and its value the product of the accuracies along its path.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from pathlib import Path

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_candidates
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.mask_groups import MaskDrafter, MaskOutput
from anydecode.decoders.speculative.static_trees import REFRESH, RankPath
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.tensor_file import read_tensors
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Accuracies where none were measured: `[prompt tokens, ranks]`.
ACCURACIES = np.outer([0.45, 0.25, 0.15], 0.4 ** np.arange(4))
#: The largest tree that is considered if the size follows from the costs of passes.
MAX_SIZE = 32

Accuracies = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StateTree:
    """The rank paths of the candidates of a state, parents first, and the number of prompt tokens
    behind the text and behind each of them."""

    paths: tuple[RankPath, ...]
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class TreePlan:
    """The tree of each state, from 0, and the expected number of tokens per pass."""

    trees: tuple[StateTree, ...]
    tokens: float


def by_rank(shares: np.ndarray) -> Accuracies:
    """Accuracies from an array `[prompt tokens, ranks]`."""
    return tuple(map(tuple, shares.astype(np.float64).tolist()))


def best_paths(accuracies: Accuracies, depth: int, count: int) -> dict[RankPath, float]:
    """The `count` rank paths of up to `depth` tokens with the largest values, if above 0."""
    found: dict[RankPath, float] = {}
    heap: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while heap and len(found) <= count:
        value, length, path = heappop(heap)
        found[path] = -value
        for rank, share in enumerate(accuracies[length] if length < depth else ()):
            if share > 0:
                heappush(heap, (value * share, length + 1, (*path, rank)))
    del found[()]
    return found


@lru_cache(256)
def plan(accuracies: Accuracies, size: int) -> TreePlan:
    """The trees of up to `size` candidates and prompt tokens with the most tokens per pass, of
    those with equally many candidates in all states, as far as there are so many."""
    plans = [_plan(accuracies, size, count) for count in range(size + 1)]
    return max(plans, key=lambda one: round(one.tokens, 9))


def _plan(accuracies: Accuracies, size: int, count: int) -> TreePlan:
    num_prompts = len(accuracies)
    states = [best_paths(accuracies, depth, count) for depth in range(num_prompts + 1)]
    gains = [sum(values.values()) for values in states]
    trees, chances = [], np.zeros((num_prompts + 1, num_prompts + 1))
    for state, values in enumerate(states):
        ends = [1.0, *values.values()]  # the probability that the path is accepted and ends here
        nodes = {path: node for node, path in enumerate(((), *values))}
        for path, value in values.items():
            ends[nodes[path[:-1]]] -= value
        prompts = _place(ends, gains, size - len(values))
        trees.append(StateTree(tuple(values), tuple(prompts)))
        np.add.at(chances[state], prompts, ends)
    balance = np.vstack([chances.T - np.eye(num_prompts + 1), np.ones(num_prompts + 1)])
    steady = np.linalg.lstsq(balance, np.eye(num_prompts + 2)[-1], rcond=None)[0]
    return TreePlan(tuple(trees), float(steady @ (1 + np.array(gains))))


def _place(ends: Seq[float], gains: Seq[float], size: int) -> list[int]:
    """The number of prompt tokens behind each node, `size` in all: from the full number behind
    each, those are taken away one by one whose loss is the least."""
    full = len(gains) - 1
    prompts = [full] * len(ends)

    def entry(node: int) -> tuple[float, int]:
        number = prompts[node]
        loss = ends[node] * (gains[number] - gains[number - 1]) if number else np.inf
        return loss, -node

    heap = [entry(node) for node in range(len(ends))]
    heapify(heap)
    for _ in range(full * len(ends) - size):
        node = -heap[0][1]
        prompts[node] -= 1
        heapreplace(heap, entry(node))
    return prompts


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Trained prompt tokens.

    Args:
        embeddings: float32 `[count, hidden_size]`, used unchanged.
        accuracies: `[count, ranks]`: how often the token at each distance is the candidate of each
            rank.
    """

    embeddings: np.ndarray
    accuracies: np.ndarray


def load_prompts(path: Path) -> PromptTokens:
    """Load a safetensors file with `embeddings` and `accuracies`, see `PromptTokens`.

    Raises:
        CheckpointError: There is no such file, or its tensors are no prompt tokens.
    """
    names = "embeddings", "accuracies"
    tensors, _ = read_tensors(path, "prompt tokens for ppd", names)
    embeddings, accuracies = (tensors[name] for name in names)
    is_valid = embeddings.ndim == accuracies.ndim == 2 and len(embeddings) == len(accuracies) > 0
    if not is_valid or len(embeddings) > 16 or not 1 <= accuracies.shape[1] <= 64:
        raise CheckpointError(
            f"{path} has embeddings {embeddings.shape} and accuracies {accuracies.shape}; allowed"
            " are [1 to 16, hidden size] and [as many, 1 to 64]"
        )
    in_range = (accuracies >= 0).all() and (accuracies.sum(1) <= 1.001).all()
    if not in_range:
        raise CheckpointError(f"{path} has accuracies that are not shares")
    return PromptTokens(embeddings, accuracies)


class PlannedDrafter(MaskDrafter):
    """Drafts from what stands behind the last accepted node: prompt tokens, or other rows that
    predict tokens. The trees are those of `plan`.

    Args:
        size: Number of candidates and prompt tokens; 0: that with the most expected tokens per
            measured time of a pass.
        rule: The acceptance rule.
    """

    def __init__(self, size: int, rule: Acceptance) -> None:
        self.size = size
        self.has_noise = not rule.reads_probabilities
        self._sizes: dict[tuple[Accuracies, int, int], int] = {}

    @abstractmethod
    def accuracies(self, sequence: Sequence) -> Accuracies:
        """How often the token at each distance is the candidate of each rank."""

    def draft(
        self, sequence: Sequence, masks: Seq[MaskOutput], size: int
    ) -> tuple[TokenTree, dict[int, int]]:
        accuracies = self.accuracies(sequence)
        chosen = min(size, self.size or self._best_size(sequence, accuracies))
        shape = plan(accuracies, chosen).trees[len(masks)]
        tree = TokenTree()
        nodes: dict[RankPath, int] = {(): ROOT}
        samplers: dict[int, Sampler] = {ROOT: sequence.sampler.fork()}
        ranked: dict[int, np.ndarray] = {}
        for path in shape.paths:
            parent = nodes.get(path[:-1])
            if parent is None:
                continue
            if parent not in ranked:
                slot = len(path) - 1
                ranked[parent] = draft_candidates(
                    sequence,
                    samplers[parent],
                    masks[slot].logits,
                    sequence.length + slot,
                    has_noise=self.has_noise,
                ).tokens
            if path[-1] < len(ranked[parent]):
                nodes[path] = node = tree.add(int(ranked[parent][path[-1]]), parent)
                samplers[node] = samplers[parent].fork()
                samplers[node].advance(tree.tokens[node])
        counts = zip(((), *shape.paths), shape.prompts, strict=True)
        return tree, {nodes[path]: count for path, count in counts if path in nodes}

    def _best_size(self, sequence: Sequence, accuracies: Accuracies) -> int:
        """The size with the most expected tokens per time; costs are read again after every
        `REFRESH` tokens."""
        model, context = sequence.cost_model, sequence.length
        others = model.num_others()
        key = accuracies, others, context // REFRESH
        if key not in self._sizes:
            self._sizes[key] = max(
                range(1, MAX_SIZE + 1),
                key=lambda size: (
                    (others + plan(accuracies, size).tokens)
                    / model.seconds(others + 1 + size, context)
                ),
            )
        return self._sizes[key]


class PromptDrafter(PlannedDrafter):
    """Drafts from prompt tokens.

    Args:
        size: See `PlannedDrafter`.
        prompts: The prompt tokens; None: the model's mask token stands for each.
        rule: The acceptance rule.
    """

    def __init__(self, size: int, prompts: PromptTokens | None, rule: Acceptance) -> None:
        super().__init__(size, rule)
        self.prompts = prompts
        self._accuracies = by_rank(ACCURACIES if prompts is None else prompts.accuracies)

    def prepare(self, sequence: Sequence) -> None:
        if self.prompts is None:
            super().prepare(sequence)
            return
        width = sequence.model().spec.hidden_size
        if self.prompts.embeddings.shape[1] != width:
            raise InvalidRequestError(
                f"the prompt tokens have {self.prompts.embeddings.shape[1]} numbers each, and the"
                f" model has a hidden size of {width}: use those that were trained for it"
            )

    def accuracies(self, sequence: Sequence) -> Accuracies:
        return self._accuracies

    def add_mask(self, sequence: Sequence, tree: TokenTree, parent: int, number: int) -> int:
        if self.prompts is None:
            return super().add_mask(sequence, tree, parent, number)
        node = tree.add(-1, parent)
        tree.embeddings[node] = self.prompts.embeddings[number]
        return node


@register(
    Card(
        "ppd",
        "speculative",
        paper="Parallel Prompt Decoding (arXiv:2405.18628)",
        exactness="token-exact",
        summary="Trained prompt tokens behind nodes of a tree draft the next tree in its pass.",
        needs=("mask token",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly; the paper's rule is acceptance='typical' (see"
            " typical-acceptance)",
            "without prompts= the model's mask token stands for all three prompt tokens, for models"
            " that were trained with masks; the accuracies are then assumed",
            "prompt tokens stand behind the text too, and a node may have none; the released search"
            " has at least one behind every candidate and none behind the text",
            "all states have equally many candidates; the released search chooses two numbers",
            "8 nodes by default, which is faster on processors; size=0 chooses the size by the"
            " measured costs of passes, as the paper does for each GPU",
            "above temperature 0 candidates are ranked with the noise that the target will use",
            "one virtual token per prompt token, as in the released inference",
            "anydecode train prompts starts from the mean embedding (the paper: from those of a"
            " text) and has groups behind many tokens of a text (the paper: one group per text)",
        ),
        bounds={"size": Range(0, 64)},
        remote={"size": Range(0, 64), "acceptance": ACCEPTANCE_WORDS},
    )
)
def ppd(
    size: int = 8, prompts: str | Path | None = None, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Parallel prompt decoding.

    Args:
        size: Number of candidates and prompt tokens of a pass; 0: by the measured costs of passes.
        prompts: A safetensors file of `anydecode train prompts`: the prompt tokens' `embeddings`,
            `[count, hidden size]`, and the `accuracies` of their predictions, `[count, ranks]`.
        acceptance: "token-exact", "rejection", "typical" (the paper's), "top-m" or "judge", or
            a rule.
    """
    rule = acceptance_rule(acceptance)
    loaded = None if prompts is None else load_prompts(Path(prompts))
    return Speculative(PromptDrafter(size, loaded, rule), size or MAX_SIZE, rule)
