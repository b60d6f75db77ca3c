"""Branches of a sequence on which decoders run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from anydecode.decoders.decoder import Decoder
from anydecode.errors import UnsupportedCombinationError
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.sequence_data import StopChecker


class TextStopChecker(StopChecker, Protocol):
    """A stop checker that collects the text."""

    @property
    def text(self) -> str:
        """The text so far."""
        ...

    def fork(self) -> TextStopChecker:
        """A copy that can be pushed to on its own."""
        ...

    def end(self, reason: str) -> None:
        """End the generation for `reason`."""
        ...


def check_one_text(inner: Decoder, what: str) -> None:
    """Raise `UnsupportedCombinationError` if the decoder `inner` cannot run on a branch whose text
    is checked for `what`."""
    if inner.requirements.forks_text:
        raise UnsupportedCombinationError(
            f"{what} checked while a decoder runs, which does not work with a decoder that samples"
            " several texts; use autoregressive"
        )


def restarted_branch(
    sequence: Sequence,
    old: Sequence | None,
    runners: Seq[str],
    tokens: list[int],
    logprobs: list[Any],
) -> Sequence:
    """Returns a branch of `sequence` with the given tokens, on which a decoder can start.

    Noise, sampler and stop checker are those of the sequence or of `old`; the caller sets them.

    Args:
        sequence: The sequence.
        old: The branch of `sequence` that the new one replaces, or None. It is released, and its
            cache is reused.
        runners: The model runners of the decoder, besides the target.
        tokens: The tokens of the branch: the first tokens of `old`. Not copied.
        logprobs: Their log-probabilities. Not copied.
    """
    if old is None:
        sequence.kv_cache()
        branch = sequence.fork()
    else:
        branch = old.branch()
        old.release()
    branch.compute_logprobs, branch.trace = sequence.compute_logprobs, sequence.trace
    branch.tokens, branch.logprobs = tokens, logprobs
    branch.finish_reason = None
    if branch.is_open(TARGET) and branch.kv_cache().length >= branch.length:
        branch.truncate(branch.length - 1)
    for runner in runners:
        if branch.is_open(runner):
            branch.align(runner)
    return branch


def emit_from(branch: Sequence, sequence: Sequence, scores: Scores | None = None) -> Decoding:
    """Generate the text of `sequence` behind the prompt of `branch`, another one.

    Args:
        branch: A branch of `sequence` with the same tokens.
        sequence: The sequence.
        scores: The scores of the last position of `branch`, if they are known.
    """
    while not sequence.finished:
        branch.sampler = sequence.sampler
        if scores is None:
            scores = yield branch.score()
        row, position = scores.row(-1), branch.length
        scores.show_hidden(sequence.sampler, -1)
        token = branch.sample(sequence.sampler, row, position)
        sequence.record_logprobs(row, sequence.length, token, sequence.sampler)
        branch.tokens.append(token)
        sequence.emit([token])
        scores = None
