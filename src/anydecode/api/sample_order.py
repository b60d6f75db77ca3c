"""How the samples of a request depend on each other: side by side, in turn, as the texts of one
search, or as copies of one text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum, auto

from anydecode.decoders.decoder import Requirements
from anydecode.engine.engine import Engine, Job
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.params import SamplingParams
from anydecode.scoring.ranked import RANKED
from anydecode.scoring.sequence import Sequence


class SampleOrder(Enum):
    """When the jobs of a request run."""

    SIDE_BY_SIDE = auto()
    #: Each job starts at the end of the one before it.
    IN_TURN = auto()
    #: The first job searches, and its texts become those of all jobs, best first.
    RANKED = auto()
    #: The first job generates the text of all jobs.
    COPIES = auto()

    @staticmethod
    def of(needs: Requirements, params: SamplingParams, count: int, limit: int) -> SampleOrder:
        """The order of `count` samples of at most `limit` tokens, of a decoder with these
        requirements."""
        if limit == 0:  # nothing is searched
            return SampleOrder.COPIES
        if needs.max_texts is not None and count > 1:
            return SampleOrder.RANKED
        if params.temperature == 0:
            return SampleOrder.COPIES
        return SampleOrder.IN_TURN if needs.samples_in_turn else SampleOrder.SIDE_BY_SIDE

    def first(self, jobs: Seq[Job]) -> Seq[Job]:
        """The jobs to submit at the start."""
        return jobs if self is SampleOrder.SIDE_BY_SIDE else jobs[:1]

    def proceed(self, jobs: Seq[Job], number: int, engine: Engine) -> None:
        """Called at the end of job `number`, on the engine's thread: submits or ends those that
        depend on it."""
        job, following = jobs[number], jobs[number + 1 :]
        if self is SampleOrder.SIDE_BY_SIDE or not following:
            return
        if job.error is not None or job.sequence.finish_reason == "cancelled":
            engine.cancel(following[0])
        elif self is SampleOrder.IN_TURN:
            engine.submit(following[0])
        elif number == 0 and self is SampleOrder.COPIES:
            for other in following:
                _copy(job.sequence, other.sequence)
                engine.cancel(other)
        elif number == 0:
            for other, text in zip(following, job.sequence.state[RANKED][1:], strict=False):
                other.sequence.num_cached_tokens = job.sequence.num_cached_tokens
                other.sequence.emit(text.tokens, logprobs=text.logprobs)
                if other.sequence.finish_reason is None:  # as of a decoder that ends by itself
                    other.sequence.finish_reason = "stop"
            for other in following:
                engine.cancel(other)


def _copy(source: Sequence, target: Sequence) -> None:
    """Emit the text of a finished sequence in one that has none, or its beginning."""
    logprobs = source.logprobs if source.compute_logprobs is not None else None
    start = len(target.tokens)
    target.num_cached_tokens = source.num_cached_tokens
    target.emit(source.tokens[start:], logprobs=None if logprobs is None else logprobs[start:])
    target.finish_reason = source.finish_reason
    target.trace = source.trace


def num_ranked(jobs: Seq[Job]) -> int:
    """The number of jobs that have a text of a finished search, at least 1."""
    return max(1, sum(job.sequence.finish_reason != "cancelled" for job in jobs))


def check_samples(
    name: str, needs: Requirements, params: SamplingParams, is_first_finish: bool
) -> None:
    """Check that the decoder `name` with these requirements can give `params.n` texts.

    Raises:
        InvalidRequestError: It cannot.
    """
    n, limit = params.n, needs.max_texts
    if n == 1:
        return
    if limit is None:
        if is_first_finish and params.temperature == 0:
            raise UnsupportedCombinationError(
                "first_finish does not work at temperature 0: all samples are the same"
            )
    elif n > limit:
        found = "always generates the same text" if limit == 1 else f"keeps {limit} texts"
        raise InvalidRequestError(f"n is {n}, but decoder {name!r} {found}")
    elif is_first_finish:
        raise UnsupportedCombinationError(
            f"first_finish does not work with decoder {name!r}: its texts finish together"
        )
