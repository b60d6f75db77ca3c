"""The loop of methods that draft with the first layers of the model and verify with the others.

Drafted positions keep the states behind their last layer, and the keys and values of the layers
they have run. Verification runs the remaining layers over them, so no layer runs twice for a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing
from time import perf_counter
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import logit_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import carried, draft_share, verify_tree
from anydecode.decoders.framework.variants import check_late_start
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.draft_policy import DraftShare
from anydecode.scoring.score import DecoderAction, Decoding, ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import TokenTree

#: A generator that may yield score requests and returns the drafted tokens.
Drafting = Generator[DecoderAction, Any, list[int]]


class DepthSession(ABC):
    """How one sequence is drafted for."""

    #: The distributions of the present round's drafts, float64 `[vocab_size]` each, if the
    #: acceptance rule compares drafts with them.
    distributions: list[np.ndarray] | None = None

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def sample(self, sampler: Sampler, row: np.ndarray, position: int) -> int:
        """A draft for `position` from logits, float32 `[vocab_size]`, with the target's noise.
        `sampler` is advanced by it."""
        token = self.sequence.sample(sampler, row, position)
        self.take(sampler, row, token)
        return token

    def take(self, sampler: Sampler, row: np.ndarray, token: int) -> None:
        """Record the distribution of a draft, and advance `sampler` by it."""
        if self.distributions is not None:
            self.distributions.append(sampler.distribution(row).dense(len(row)))
        sampler.advance(token)

    def size(self) -> int:
        """Maximum number of drafts in the next round; 0 means plain decoding."""
        raise NotImplementedError

    def prefill(self, tokens: list[int]) -> Generator[DecoderAction, Any, None]:
        """Score tokens before the last one of the text through all layers."""
        yield self.sequence.score(tokens)

    @abstractmethod
    def draft(self, token: int, size: int) -> Drafting:
        """Draft up to `size` tokens behind `token`, the last one of the text. It and all drafts but
        the last run through some of the first layers."""

    def verification(self, drafts: list[int]) -> ScoreRequest:
        """The request that runs the remaining layers, and all of them for the last draft."""
        return self.sequence.complete(drafts[-1:])

    def observe(self, drafts: list[int], num_accepted: int, scores: Scores) -> None:
        """Called after each round that has drafted, before its tokens are emitted."""

    #: Layers whose states `observe_plain` reads.
    plain_layers: tuple[int, ...] = ()

    def observe_plain(self, scores: Scores) -> None:
        """Called after a round without drafts, if there are `plain_layers`."""

    def facts(self) -> dict[str, Any]:
        """What the trace records of the round."""
        return {}


#: The session of a sequence, see `carried`.
_STATE: StateKey[DepthSession] = StateKey("self-speculation", "state")


class SelfSpeculative(Decoder):
    """A speculative decoder whose drafts come from the target's first layers. A draft ends at a
    token that would end the text, and does not exceed the limit of tokens.

    Args:
        acceptance: The name of an acceptance rule that reads no hidden states, or the rule.
    """

    def __init__(self, acceptance: str | Acceptance = "token-exact") -> None:
        self.acceptance = logit_rule(acceptance, self.card.key)

    @abstractmethod
    def open(self, sequence: Sequence) -> DepthSession:
        """Start drafting for `sequence`."""

    def prepare(self, sequence: Sequence) -> None:
        if sequence.num_layers < 2:
            raise InvalidRequestError(f"{self.card.key} needs a model of at least two layers")
        check_late_start(sequence.model())
        if sequence.companion_prompts:
            raise InvalidRequestError(
                f"{self.card.key} does not work with guidance, which needs a second prompt"
            )

    def check_exit(self, sequence: Sequence, layers: int) -> None:
        """Check that drafts may leave the model behind the first `layers` layers.

        Raises:
            InvalidRequestError: No layer is left.
            UnsupportedCombinationError: The sampler reads one of these layers.
        """
        num_layers = sequence.num_layers
        if not 1 <= layers < num_layers:
            raise InvalidRequestError(
                f"layers={layers} leaves none to verify with: the model has {num_layers}, so"
                f" layers must be from 1 to {num_layers - 1}"
            )
        if any(layer < layers for layer in sequence.sampler.capture_layers):
            raise UnsupportedCombinationError(
                f"{self.card.key} leaves the model behind {layers} layers, and the sampler reads"
                " earlier ones (DoLa) of tokens that it verifies"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        session = carried(sequence, _STATE, self.acceptance, lambda: self.open(sequence))
        with closing(draft_share(sequence, self, self.acceptance)) as share:
            while not sequence.finished:
                yield from self._round(sequence, session, share)
        sequence.state.discard(_STATE)

    def _round(self, sequence: Sequence, session: DepthSession, share: DraftShare) -> Decoding:
        unscored = sequence.unscored()
        if len(unscored) > 1:
            yield from session.prefill(unscored[:-1])
        size = min(share.size(session.size()), sequence.remaining - 1)  # and one token more
        if size < 1:
            layers = session.plain_layers
            plain = yield from verify_tree(sequence, TokenTree(), self.acceptance, hidden=layers)
            if layers:
                session.observe_plain(plain.scores)
            share.observe(plain.tree, [], 0.0)
            return
        position, start = sequence.length, perf_counter()
        session.distributions = distribution_list(self.acceptance)
        drafts = yield from session.draft(unscored[-1], size)
        seconds = (perf_counter() - start) / (sequence.cost_model.num_others() + 1)
        tree = sampled_chain(drafts, session.distributions)
        scores = yield session.verification(drafts)
        result = self.acceptance.walk(tree, scores)
        row = len(result.path)
        sequence.truncate(position + row)
        sequence.record(tree, result.path, result.tokens, **session.facts())
        session.observe(drafts, row, scores)
        share.observe(tree, result.path, seconds)
        sequence.emit(
            result.tokens, scores.sampler_after(row) if sequence.sampler.is_stateful else None
        )
