"""Beam search (Graves, arXiv:1211.3711).

A fixed number of partial hypotheses is extended in parallel, and only the most likely ones are
kept. The length penalty (Wu et al., arXiv:1609.08144) has the form `sum / length ** penalty` that
most libraries use.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.search.beam_group import BeamGroup, GroupState, LengthRule
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.ranked import RANKED, RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

_STATE: StateKey[GroupState] = StateKey("beam", "state")


@register(
    Card(
        "beam",
        "search",
        paper="Sequence Transduction with Recurrent Neural Networks (arXiv:1211.3711)",
        exactness="lossy",
        summary="Keeps the most likely partial hypotheses and emits the best one at the end.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=("the text is emitted when the search ends, not while it runs",),
        remote={"width": Range(1, 16), "penalty": Range(-50, 50)},
    )
)
class Beam(Decoder):
    """Beam search over `width` hypotheses.

    The score of a hypothesis is `sum of log-probabilities / number of tokens ** penalty`. The
    request's penalties, bans and constraints change the log-probabilities; its temperature and
    truncations (top-k, top-p, ...) are ignored. With `width` 1 the output is that of greedy
    decoding. A request with `n` above 1 receives the `n` best texts of one search, best first.

    Args:
        width: How many hypotheses are kept, and the largest `n`.
        penalty: The exponent of the length, between -50 and 50.
        early: Stop as soon as `width` hypotheses have finished, even if a live one could still
            get a higher score.
    """

    def __init__(self, width: int = 4, penalty: float = 1.0, early: bool = False) -> None:
        if width < 1:
            raise InvalidRequestError(f"width must be at least 1, not {width}")
        if not -50 <= penalty <= 50:  # beyond, `length ** penalty` overflows or vanishes
            raise InvalidRequestError(f"penalty must be between -50 and 50, not {penalty}")
        self.rule = LengthRule(width, penalty, early)
        self.requirements = Requirements(can_sample=False, max_texts=width)

    def prepare(self, sequence: Sequence) -> None:
        sequence.sampler = whole_distribution_sampler(sequence.sampler)

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.setdefault(_STATE, GroupState())
        prompt = yield sequence.score()  # first, so that all branches share it
        group = BeamGroup(self.rule, sequence, state)
        yield from group.open()
        while group.is_active:
            results = [prompt]
            if state.depth:
                results = yield group.requests()
            group.advance(results, {})
        emit_ranked(sequence, group.texts())


def whole_distribution_sampler(sampler: Sampler) -> Sampler:
    """`sampler` without temperature and truncations, which searches ignore."""
    return Sampler(1.0, pre_temperature=sampler.pre_temperature, combiner=sampler.combiner)


def emit_ranked(sequence: Sequence, texts: list[RankedText]) -> None:
    """Emit the first of `texts`, and leave them all for a request for several.

    Raises:
        ConstraintError: There is none.
    """
    if not texts:
        raise ConstraintError("the constraint allows none of the tokens that may come here")
    sequence.state[RANKED] = texts
    sequence.emit(texts[0].tokens, logprobs=texts[0].logprobs)
