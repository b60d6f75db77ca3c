"""Grammar-constrained diffusion (Mündler, Dekoninck and Vechev, "Constrained Decoding of Diffusion
LLMs with Context-Free Grammars", arXiv:2508.10111).

Masks may be unmasked in any order. A token is committed only if some tokens for the remaining masks
can still complete the canvas to a text of the grammar.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.constraints.byte_cache import ByteCache
from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.grammar.byte_grammar import MAX_CACHED_BYTES
from anydecode.constraints.grammar.canvas_grammar import MASK_POSITION, CanvasGrammar
from anydecode.constraints.json.schema_grammar import canvas_grammar_of
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.denoiser import TEMPLATE, Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, best_first, ranking
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.sampler import Sampler, constraint_of
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: The arguments of `_compiled`.
_KEY: StateKey[tuple[str, Vocabulary, frozenset[int], int | None]] = StateKey(
    "diffusion-cfg", "grammar"
)

_grammars: ByteCache[tuple[str, Vocabulary, frozenset[int], int | None], CanvasGrammar] = ByteCache(
    MAX_CACHED_BYTES
)


def _compiled(
    described: str, vocabulary: Vocabulary, ends: frozenset[int], mask: int | None
) -> CanvasGrammar:
    key = described, vocabulary, ends, mask
    found = _grammars.get(key)
    if found is None:
        automata = canvas_grammar_of(described)
        found = CanvasGrammar(automata, vocabulary, ends, -1 if mask is None else mask)
        _grammars.put(key, found, automata.num_bytes + found.num_bytes)
    return found


class CanvasState(ConstraintState):
    """A placeholder in the sampler for a constraint that the decoder itself enforces.

    Args:
        whole: Whether the text has no mask any more.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def mask(self) -> None:
        return None

    def advance(self, token: int) -> None:
        """Do nothing: the canvas holds the text."""

    def rollback(self, count: int) -> None:
        """Do nothing."""

    def fork(self) -> CanvasState:
        return CanvasState(self.whole)

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def can_stop(self) -> bool:
        return self.whole

    @property
    def finished(self) -> bool:
        return self.whole


class GrammaticalDenoiser(Denoiser):
    """Commits one token per step, at the best-ranked position.

    If the sampled token leaves no completion, all tokens of that position that leave none are
    excluded, and ranking and sampling are repeated. Without a constraint, the masks are denoised as
    by `llada`.
    """

    begun = ""

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        part = constraint_of(sequence.sampler)
        if part is None:
            return
        sampler = sequence.sampler
        stateful = [
            processor
            for processor in (*sampler.pre_temperature, *sampler.post_temperature)
            if processor.is_stateful
        ]
        if stateful != [part]:
            raise UnsupportedCombinationError(
                "diffusion-cfg unmasks in any order; penalties and other samplers that depend on"
                " the text before a position do not work with it"
            )
        described = getattr(part.state, "origin", None)
        if isinstance(described, tuple):  # with a forced completion: a completion exists here too
            described = described[0]
        if not isinstance(described, str):
            raise ConstraintError(
                "diffusion-cfg supports JsonSchema, Grammar, Regex and Choice with the engine"
                " llguidance, and not after reasoning"
            )
        tokenizer = sequence.tokenizers["target"]
        if not tokenizer.decode(sequence.prompt).endswith(self.begun):
            raise InvalidRequestError(f"the prompt does not end with {self.begun!r} (begun)")
        ends = frozenset(filter(sequence.stops_at, range(tokenizer.vocab_size)))
        mask = sequence.mask_token if self.mask is None else self.mask
        sequence.state[_KEY] = described, vocabulary(tokenizer, tokenizer.vocab_size), ends, mask
        pre_temperature = [
            Constrained(CanvasState()) if processor is part else processor
            for processor in sampler.pre_temperature
        ]
        sequence.sampler = Sampler(
            sampler.temperature, pre_temperature, sampler.post_temperature, sampler.combiner
        )
        self._check(sequence)

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        grammar = self._grammar(sequence)
        if grammar is None:
            super().unmask_step(sequence, canvas, predictions)
            return
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
        assert canvas.block is not None
        stop = sequence.length + sequence.remaining
        tokens = canvas.tokens[len(sequence.prompt) : stop].tolist()
        answer = [MASK_POSITION if token == canvas.mask else token for token in tokens]
        state = grammar.answer(answer, self.begun.encode())
        allowed: dict[int, np.ndarray] = {}

        def restrict(position: int, logits: np.ndarray) -> np.ndarray:
            if position not in allowed:
                return logits
            mask = allowed[position][: len(logits)]
            restricted = np.full_like(logits, -np.inf)
            restricted[: len(mask)][mask] = logits[: len(mask)][mask]
            return restricted

        predictions.adjust(restrict)
        positions = canvas.masked(*canvas.block)
        while True:
            position = int(
                positions[best_first(self.ranking.rank(canvas, predictions, positions))[0]]
            )
            token = predictions.token(position)
            index = position - len(sequence.prompt)
            if index >= len(answer) or position in allowed or state.accepts(index, token):
                break
            allowed[position] = state.allowed(index)
            predictions.invalidate(position)
            if not np.isfinite(predictions.logits(position)).any():
                raise ConstraintError(
                    "the canvas cannot satisfy the constraint any more: the model rules out every"
                    f" token that the constraint allows at position {position}"
                )
        self._write(sequence, canvas, predictions, position, token)
        self.finish_step(sequence, canvas, predictions, [position], redrawn=len(allowed))

    def _write(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        position: int,
        token: int,
    ) -> None:
        """Commit a token; after an end of text, also commit it to all later masks."""
        self.write(sequence, canvas, predictions, [position], [token], canvas.commit)
        if sequence.stops_at(token):
            later = np.flatnonzero(canvas.committed[position:] == MASKED) + position
            canvas.commit(later, [token] * len(later), [1.0] * len(later))
        part = constraint_of(sequence.sampler)
        if part is not None and not len(canvas.masked(0, sequence.length + sequence.remaining)):
            part.state = CanvasState(whole=True)

    def _check(self, sequence: Sequence) -> None:
        """Raise `ConstraintError` if the first canvas has no completion."""
        grammar = self._grammar(sequence)
        assert grammar is not None
        mask = sequence.mask_token if self.mask is None else self.mask
        template = sequence.state.get(TEMPLATE)
        canvas = [MASK_POSITION] * sequence.remaining
        if template is not None:
            canvas = [MASK_POSITION if token == mask else token for token in template]
        if grammar.is_completable(canvas, self.begun.encode()):
            return
        if template is not None:
            raise ConstraintError(
                "the canvas cannot satisfy the constraint: no tokens for its"
                f" {canvas.count(MASK_POSITION)} masks make a text that meets it"
            )
        raise ConstraintError(
            f"no text that meets the constraint has {'at most' if grammar.ends else 'exactly'}"
            f" {len(canvas)} tokens of this model: max_tokens is too small"
        )

    def _grammar(self, sequence: Sequence) -> CanvasGrammar | None:
        """The compiled grammar of the request's constraint, or None."""
        arguments = sequence.root.state.get(_KEY)
        return None if arguments is None else _compiled(*arguments)


@register(
    Card(
        "diffusion-cfg",
        "diffusion",
        paper="Constrained Decoding of Diffusion LLMs with Context-Free Grammars"
        " (arXiv:2508.10111)",
        exactness="lossy",
        summary="Commits only tokens after which the remaining masks can still satisfy a grammar.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the canvas is an automaton over bytes, not over terminals, and the lexer is compiled"
            " into the grammar; a mask is exactly one token, and the number of masks is fixed (the"
            " paper's gaps have any length)",
            "whether a completion exists is decided from left to right with Earley items, not"
            " bottom-up over triples, and without a time limit",
            "if a sample is rejected, all tokens that leave no completion are excluded at that"
            " position at once; as the check is exact, a token remains, and neither a limit on"
            " samples nor a completion by a witness is needed",
            "grammars use Lark's notation without templates. A terminal is the longest match among"
            " those that may come next, as for autoregressive decoders, without going back to a"
            " shorter one; where several match the same text, any may be meant, but what ignored"
            " text matches too is ignored. At the end of a"
            " recursive rule, what may follow any of its uses counts as what may come next, so that"
            " texts can be lost. Ignored text may also come first and last; the engine xgrammar is"
            " refused",
            "a step checks that some tokens at the masks make the bytes a text of the grammar or of"
            " the schema, and nothing else. Of a schema, keywords that no mask can express (not,"
            " uniqueItems, contains and others) are left to the validator, which has an invalid"
            " answer tried again; other keywords that a grammar cannot express are refused, and"
            " unknown ones are annotations",
            "a complete text may also end at the last position without an end of text",
            "of a JSON Schema, strings have only the short escapes, additional property names none,"
            " and numbers no exponents; of the formats, common values are allowed; a maxLength"
            " above 2,000 counts as 2,000, or as 200 or 40 where the grammar would be too large; a"
            " name that is written twice counts as two properties, and where they are too few then,"
            " the validator refuses them. Keywords beside $ref, anyOf or allOf are merged into one"
            " schema. Refused are those that cannot be merged, a $ref to an anchor or another"
            " document, and a multipleOf whose remainders, counted again for each decimal, are more"
            " than 2,000",
        ),
        remote={
            "block": Range(0, 4096),
            "remasking": RANKING_WORDS,
            "cache": BLOCKWISE_WORDS,
            "begun": Text(256),
        },
    )
)
def diffusion_cfg(
    block: int | None = None,
    remasking: str = "confidence",
    cache: str = "none",
    begun: str = "",
    mask: int | None = None,
) -> Denoiser:
    """Denoises under a constraint; the request needs `constraint=` JsonSchema, Grammar,
    Regex or Choice.

    A terminal is the longest match: two words that would be one need white space between them.
    Where it must be elsewhere, the grammar says so (`"FROM" /[ ]+/ NAME`): ignored text may be
    empty.

    Args:
        block: Positions per block (0: the whole canvas; default: up to 32).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        begun: The end of the prompt, before its first mask, that belongs to the constrained text.
        mask: The mask token (default: the tokenizer's).
    """
    blocks, policy = blocks_and_cache(block, cache)
    decoder = GrammaticalDenoiser(blocks, ranking(remasking), TopKUnmasking(), policy, mask=mask)
    decoder.begun = begun
    return decoder
