"""Branches of a sequence on which decoders run."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from anydecode.decoders.decoder import Decoder
from anydecode.errors import UnsupportedCombinationError
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding, Scores
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


def share_prefixes(
    branches: Seq[Sequence], runner: str = TARGET
) -> Generator[DecoderAction, ActionResult, None]:
    """Compute what the texts of several branches have in common once, so that their caches share
    it: after a restart they need no more memory than before. Last tokens remain unscored.

    Args:
        branches: Branches of one sequence, whose prompt is in their caches.
        runner: The model whose caches are filled.
    """
    groups = [list(branches)]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        texts = [branch.all_tokens[:-1] for branch in group]
        first, last = min(texts), max(texts)  # what these have in common, all have
        pairs = enumerate(zip(first, last, strict=False))
        length = next((i for i, (a, b) in pairs if a != b), len(first))
        lacking = [branch for branch in group if branch.kv_cache(runner).length < length]
        if lacking:
            trunk = max(group, key=lambda branch: branch.kv_cache(runner).length).branch()
            trunk.tokens = texts[0][len(trunk.prompt) : length]
            if trunk.kv_cache(runner).length > length:
                trunk.truncate(length, runner)
            elif trunk.kv_cache(runner).length < length:
                yield trunk.score(runner=runner, samples=False)
            for branch in lacking:
                branch.share_caches(trunk)
            trunk.release()
        following: dict[int, list[Sequence]] = {}
        for branch, text in zip(group, texts, strict=True):
            if len(text) > length:
                following.setdefault(text[length], []).append(branch)
        groups += following.values()


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
