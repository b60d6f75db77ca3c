"""Chimera: a drafter that fuses the last three tokens with the target's states of all tokens.

Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference
by Fusing all Tokens", arXiv:2402.15758.

The drafter is the model of the runner "draft" (`models/chimera.py` opens it). The target's states
are stored once per token as keys and values. The row of a trigram attends to them and to itself.
Behind a drafted token, the row of its trigram attends to the drafter's output before that token
too, which stands for the target's state there. The tree is that of EAGLE-2, with one resolver per
level.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.eagle import EagleDrafter
from anydecode.models.spec import CHIMERA
from anydecode.scoring.score import DecoderAction, ScoreRequest, Scores
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT


class ChimeraTree(GrowingTree):
    """A draft tree of Chimera. The drafter's cache has two kinds of rows behind the text: of the
    trigram that ends with a node, which no other row sees, and of this row's output, which those
    behind the node see."""

    def start(self, chain: Seq[int] = ()) -> Generator[DecoderAction, Any, None]:
        sequence = self.sequence
        sequence.align(self.runner)
        self._model: Any = sequence.model(self.runner)
        spans = sequence.store_context(self.runner)
        self._state = sequence.draft_states[self.runner].known(sequence.length - 2)
        self._outputs: dict[int, np.ndarray] = {}  # by the node that the trigram ends with
        self._rows: dict[int, int] = {}  # of the outputs
        self._num_rows = 0
        request = self._request([ROOT], [], [])
        request.groups[0] = [*spans, *request.groups[0]]
        scores = yield request
        self._samplers[ROOT] = sequence.sampler.fork()
        self._take([ROOT], scores)

    def expand(self, nodes: Seq[int]) -> Generator[DecoderAction, Any, None]:
        if not len(nodes):
            return
        tree, parents, outputs = self.tree, list[int](), list[np.ndarray]()
        for before in dict.fromkeys(tree.parents[node] for node in nodes):
            self._rows[before] = self._num_rows + len(parents)
            parents.append(ROOT if before == ROOT else self._rows[tree.parents[before]])
            outputs.append(self._outputs[before])
        scores = yield self._request(nodes, parents, outputs)
        for node in nodes:
            self._advance_sampler(node)
        self._take(nodes, scores)

    def retain(self, tokens: Seq[int]) -> None:
        """Keep nothing: the target's states take the place of the outputs."""

    def _request(
        self, nodes: Seq[int], parents: list[int], outputs: list[np.ndarray]
    ) -> ScoreRequest:
        """Rows of `outputs`, which follow the rows `parents`, then of the trigrams of `nodes`."""
        trigrams = self._model.trigram_states(np.array([self._trigram(node) for node in nodes]))
        inputs = np.concatenate([*(one[None] for one in outputs), trigrams])
        before = [ROOT if node == ROOT else self._rows[self.tree.parents[node]] for node in nodes]
        self._num_rows += len(inputs)
        request = self.sequence.extend(
            [-1] * len(inputs),
            [*parents, *before],
            runner=self.runner,
            hidden=(self._model.spec.num_layers,),
            inputs=inputs,
        )
        (span,) = request.groups[0]
        span.logits = False
        return request

    def _trigram(self, node: int) -> list[int]:
        """The last three tokens of a path; the first token of a shorter text is repeated."""
        path = [] if node == ROOT else self.tree.path(node)
        last = [*self.sequence.all_tokens[-3:], *(self.tree.tokens[one] for one in path)][-3:]
        return last[:1] * (3 - len(last)) + last

    def _take(self, nodes: Seq[int], scores: Scores) -> None:
        """Keep the outputs of the trigrams of `nodes`, of one level, and what they predict."""
        outputs = scores.hidden[self._model.spec.num_layers][-len(nodes) :].copy()
        step = 0 if nodes[0] == ROOT else self.depths[nodes[0]]
        rows = self._model.resolve(self._state, outputs, step)
        for node, output, row in zip(nodes, outputs, rows, strict=True):
            self._outputs[node] = output
            self.store_candidates(node, row)


class ChimeraDrafter(EagleDrafter):
    """`EagleDrafter` with the trees of Chimera, where the draft model is one of its."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True, drafts_trigrams=True)

    def new_tree(self, sequence: Sequence) -> GrowingTree:
        spec = sequence.model(self.runner).spec
        tree = ChimeraTree if spec.architecture == CHIMERA else GrowingTree
        return tree(sequence, self.runner, self.noise)


@register(
    Card(
        "chimera",
        "speculative",
        paper="Chimera (arXiv:2402.15758)",
        exactness="token-exact",
        summary="A layer fuses the last three tokens with the target's states of all tokens.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "drafters are those of its recipe, in a layout of their own: what a published head of"
            " all tokens reads is resolved by a matrix, and then read by the target's head",
            "the row of a trigram sees the target's states and itself; in the training of the"
            " published code it also sees the trigrams before, and its generation, which does not"
            " run with the drafters of this training, takes the row of the last state, which sees"
            " the last trigram",
            "`anydecode train drafter --recipe chimera` learns with the loss of the other recipes"
            " beside the distance to the target's states, from the model's own answers, and starts"
            " with the target's last layer; its trigrams are of the text's tokens (the published"
            " code: of the drafter's own, behind the first)",
            "8 nodes in 4 levels of 4 by default, by probability (the code: a fixed tree of 25"
            " nodes in 5 levels), which is faster on processors",
            "verified token-exactly, and above temperature 0 a node's weight is its estimated"
            " acceptance probability given the noise that the target will use; with"
            " acceptance='rejection' it is the draft probability, and the rule is that for chosen"
            " tokens (the code tests whole paths in turn, which is not exact)",
            CHOSEN_NOISE,
            "with a draft model of another kind, the same tree with that model",
            "at most the last 2,048 tokens of a prompt that were not cached are read",
        ),
        remote={
            "size": Range(1, 64),
            "depth": Range(1, 32),
            "width": Range(1, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def chimera(
    size: int = 8,
    depth: int = 4,
    width: int = 4,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Chimera's draft trees.

    Args:
        size: Number of verified nodes.
        depth: Number of levels, one resolver and one pass each, if the draft model has so many.
        width: Number of nodes that each level expands, and of children of each of them.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(ChimeraDrafter(depth, width, rule), size, rule)
