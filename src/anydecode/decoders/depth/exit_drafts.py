"""Drafts of a trained early exit: the target's first layers, then a layer that is trained to
predict from their states (`models/early_exit.py`).

The target's layers run in its own cache, so that verification runs the remaining ones only. The
trained layer has a cache of its own, in the draft model's runner: its rows start behind the layers
that the draft model shares with the target, from the target's states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.self_speculation import DepthSession, Drafting, SelfSpeculative
from anydecode.decoders.framework.draft_candidates import draft_token
from anydecode.scoring.score import DecoderAction, ScoreRequest, Scores
from anydecode.scoring.sequence import DRAFT, Sequence

#: Rows of a prompt whose states are read at a time, and maximum number of states of rows without
#: drafts that are kept for the trained layer.
CHUNK = 256


class ExitSession(DepthSession):
    """Drafts for one sequence."""

    def __init__(self, sequence: Sequence, max_drafts: int) -> None:
        super().__init__(sequence)
        self.max_drafts = max_drafts
        self.exit = sequence.model(DRAFT).spec.num_layers - 1
        self.plain_layers = (self.exit,)
        self._unread = np.empty((0, 0), np.float32)  # states that the trained layer has not read

    @abstractmethod
    def continues(self, token_share: float, top_share: float) -> bool:
        """Whether another draft follows one, by the probabilities at temperature 1 of the drafted
        token and of the most probable one."""

    def size(self) -> int:
        return self.max_drafts

    def prefill(self, tokens: list[int]) -> Generator[DecoderAction, Any, None]:
        sequence = self.sequence
        self._unread = self._unread[:0]  # of a cache that is gone, after a restart
        self._align(sequence.kv_cache().length)
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            scores = yield sequence.score(part, rows="all", hidden=(self.exit,), logits=False)
            yield self._trained_layer(scores.hidden[self.exit].copy(), logits=False)

    def draft(self, token: int, size: int) -> Drafting:
        sequence = self.sequence
        sampler, position = sequence.sampler.fork(), sequence.length
        self._align(position - 1 - len(self._unread))
        drafts: list[int] = []
        while True:
            layers = (0, self.exit)
            scores = yield sequence.score([token], layers=layers, hidden=(self.exit,), logits=False)
            states = scores.hidden[self.exit]
            if len(self._unread):
                states = np.concatenate([self._unread, states])
                self._unread = states[:0]
            scores = yield self._trained_layer(states.copy())
            row = scores.row(-1)
            draft = draft_token(sequence, sampler, row, position + len(drafts))
            if draft is None:
                break
            token = draft
            self.take(sampler, row, token)
            drafts.append(token)
            weights = np.exp(row - row.max())
            shares = weights[[token, row.argmax()]] / weights.sum()
            if len(drafts) == size or sequence.stops_at(token) or not self.continues(*shares):
                break
        return drafts

    def verification(self, drafts: list[int]) -> ScoreRequest:
        return self.sequence.complete(drafts[-1:], hidden=(self.exit,))

    def observe(self, drafts: list[int], num_accepted: int, scores: Scores) -> None:
        sequence = self.sequence
        length, known = sequence.kv_cache(DRAFT).length, sequence.length + num_accepted
        self._unread = scores.hidden[self.exit][-1:].copy()[: max(0, known - length)]
        sequence.truncate(min(length, known), DRAFT)

    def observe_plain(self, scores: Scores) -> None:
        state = scores.hidden[self.exit].copy()
        known = np.concatenate([self._unread, state]) if len(self._unread) else state
        self._unread = known[-CHUNK:]

    def _trained_layer(self, states: np.ndarray, logits: bool = True) -> ScoreRequest:
        """The request that runs the trained layer over states of the target behind its exit."""
        return self.sequence.score(
            [0] * len(states),
            runner=DRAFT,
            embeddings=states,
            layers=(self.exit, self.exit + 1),
            logits=logits,
        )

    def _align(self, length: int) -> None:
        """Leave the trained layer's cache with the positions before `length`. Those whose states
        are not known, since the target has them from its prefix cache or from before a restart, are
        left out."""
        kv_cache = self.sequence.kv_cache(DRAFT)
        kv_cache.reusable = False  # its rows have stored nothing in the layers before the exit
        kv_cache.truncate(min(kv_cache.length, length))
        kv_cache.skip(self.sequence.all_tokens[kv_cache.length : length])


class ExitDrafting(SelfSpeculative):
    """A decoder that drafts with a trained early exit of the target."""

    requirements = Requirements(runners=(DRAFT,), drafts_exit=True)

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.check_exit(sequence, sequence.model(DRAFT).spec.num_layers - 1)
