"""Texts of a context-free grammar, in whatever order they are filled (Mündler, Dekoninck and
Vechev, "Constrained Decoding of Diffusion LLMs with Context-Free Grammars", arXiv:2508.10111): a
token is written only if some tokens for the masks that are left still make a text of the grammar.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.constraints.byte_grammar import byte_grammar
from anydecode.constraints.canvas_grammar import HOLE, CanvasAnswer, CanvasGrammar
from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.decoders.diffusion import caches
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import best_first, ranking
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.constrained import Constrained, constraint_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence

_KEY = "diffusion-cfg"


@lru_cache(maxsize=32)
def _compiled(
    described: str, vocabulary: Vocabulary, ends: frozenset[int], mask: int
) -> CanvasGrammar:
    return CanvasGrammar(byte_grammar(described), vocabulary, ends, mask)


class CanvasState(ConstraintState):
    """Stands in the policy for a constraint that the decoder itself sees to. `whole`: no mask is
    left in the text."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def mask(self) -> None:
        return None

    def advance(self, token: int) -> None:
        """Nothing to remember: the canvas holds the text."""

    def rollback(self, count: int) -> None:
        """Nothing to forget."""

    def fork(self) -> CanvasState:
        return CanvasState(self.whole)

    def forced(self) -> list[int]:
        return []

    @property
    def may_stop(self) -> bool:
        return self.whole

    @property
    def finished(self) -> bool:
        return self.whole


class GrammaticalDenoiser(Denoiser):
    """One token a pass where the base rule says. If it leaves no completion, all tokens that
    leave none are ruled out there, and the rule is asked again. Without a constraint it is the base
    rule alone."""

    begun = ""

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        part = constraint_of(sequence.sampler)
        if part is None:
            return
        sampler = sequence.sampler
        others = [
            one for one in (*sampler.pre_temperature, *sampler.post_temperature) if one.stateful
        ]
        if others != [part]:
            raise UnsupportedCombinationError(
                "diffusion-cfg fills in any order; penalties and other policies that depend on the"
                " text before do not work with it"
            )
        described = getattr(part.state, "origin", None)
        if not isinstance(described, str):
            raise ConstraintError(
                "diffusion-cfg reads Grammar, Regex and Choice with the engine llguidance, and not"
                " behind reasoning"
            )
        tokenizer = sequence.tokenizers["target"]
        if not tokenizer.decode(sequence.prompt).endswith(self.begun):
            raise InvalidRequestError(f"the prompt does not end with {self.begun!r} (begun)")
        ends = frozenset(filter(sequence.stops_at, range(tokenizer.vocab_size)))
        mask = sequence.mask_token if self.mask is None else self.mask
        sequence.state[_KEY] = described, vocabulary(tokenizer, tokenizer.vocab_size), ends, mask
        before = [
            Constrained(CanvasState()) if one is part else one for one in sampler.pre_temperature
        ]
        sequence.sampler = Sampler(
            sampler.temperature, before, sampler.post_temperature, sampler.combiner
        )
        self._check(sequence)

    def fill(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        rules = self._rules(sequence)
        if rules is None:
            super().fill(sequence, canvas, predictions)
            return
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.end(canvas, predictions))
        assert canvas.block is not None
        room = sequence.length + sequence.remaining
        text = canvas.tokens[len(sequence.prompt) : room].tolist()
        held = [HOLE if token == canvas.mask else token for token in text]
        state = CanvasAnswer(rules, held, self.begun.encode())
        allowed: dict[int, np.ndarray] = {}

        def kept(position: int, logits: np.ndarray) -> np.ndarray:
            if position not in allowed:
                return logits
            mask = allowed[position][: len(logits)]
            left = np.full_like(logits, -np.inf)
            left[: len(mask)][mask] = logits[: len(mask)][mask]
            return left

        predictions.adjust(kept)
        positions = canvas.masked(*canvas.block)
        while True:
            position = int(
                positions[best_first(self.ranking.rank(canvas, predictions, positions))[0]]
            )
            token = predictions.token(position)
            at = position - len(sequence.prompt)
            if at >= len(held) or position in allowed or state.accepts(at, token):
                break
            allowed[position] = state.allowed(at)
            predictions.revise(position)
            if not np.isfinite(predictions.logits(position)).any():
                raise ConstraintError(
                    "the canvas cannot satisfy the constraint any more: the model rules out every"
                    f" token that may stand at position {position}"
                )
        self._write(sequence, canvas, predictions, position, token)
        self.settle(sequence, canvas, predictions, [position], redrawn=len(allowed))

    def _write(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        position: int,
        token: int,
    ) -> None:
        """Commit, and where the text ends, everything behind with it."""
        self._annotate(sequence, canvas, predictions, [position], [token], predictions.sampler)
        canvas.commit([position], [token], [predictions.probability_drawn(position, token)])
        if sequence.stops_at(token):
            behind = np.flatnonzero(canvas.committed[position:] == MASKED) + position
            canvas.commit(behind, [token] * len(behind), [1.0] * len(behind))
        part = constraint_of(sequence.sampler)
        if part is not None and not len(canvas.masked(0, sequence.length + sequence.remaining)):
            part.state = CanvasState(whole=True)

    def _check(self, sequence: Sequence) -> None:
        """Refuse a canvas that has no completion from the start."""
        rules = self._rules(sequence)
        assert rules is not None
        mask = sequence.mask_token if self.mask is None else self.mask
        template = sequence.state.get("template")
        canvas = [HOLE] * sequence.remaining
        if template is not None:
            canvas = [HOLE if token == mask else token for token in template]
        if rules.is_completable(canvas, self.begun.encode()):
            return
        if template is not None:
            raise ConstraintError(
                "the canvas cannot satisfy the constraint: no tokens for its"
                f" {canvas.count(HOLE)} masks make a text that meets it"
            )
        raise ConstraintError(
            f"no text that meets the constraint has {'at most' if rules.ends else 'exactly'}"
            f" {len(canvas)} tokens of this model: max_tokens is too small"
        )

    def _rules(self, sequence: Sequence) -> CanvasGrammar | None:
        held = sequence.root.state.get(_KEY)
        return None if held is None else _compiled(*held)


@register(
    Card(
        "diffusion-cfg",
        "diffusion",
        paper="Constrained Decoding of Diffusion LLMs with Context-Free Grammars"
        " (arXiv:2508.10111)",
        exactness="lossy",
        summary="Writes only tokens after which the masks left can still make a text of a grammar.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the canvas is an automaton of bytes, not of terminals: there is no lexer, a mask is"
            " any one token, and the number of masks is kept (the paper's gaps have any length)",
            "emptiness is decided from the left with Earley's items, not bottom-up over triples,"
            " and without a time limit",
            "where a draw is rejected, every token that leaves no completion is ruled out at that"
            " position at once; as the check is exact, one is left, and neither a bound on draws"
            " nor a completion by a witness is needed",
            "of vocabularies with very many different spellings, masks and tokens drawn again are"
            " of the shorter ones only: a canvas that only long tokens complete may be ruled out",
            "grammars are in Lark's notation without templates; terminals match without a longest"
            " match, and what is ignored may also stand at the beginning and at the end; JSON"
            " schemas and the engine xgrammar are refused",
            "the text may also end, whole, with the last position, without an end of text",
        ),
    )
)
def diffusion_cfg(
    block: int | None = None,
    remasking: str = "confidence",
    cache: str = "none",
    begun: str = "",
    mask: int | None = None,
) -> Denoiser:
    """Needs `constraint=` Grammar, Regex or Choice. `block` masks at a time (0: the whole canvas;
    default: up to 32), ranked by `remasking`. `begun` is the end of the prompt (before its first
    mask) that belongs to the text."""
    made = GrammaticalDenoiser(
        FixedBlocks(block), ranking(remasking), TopKUnmasking(), caches.cache(cache), mask=mask
    )
    made.begun = begun
    return made
