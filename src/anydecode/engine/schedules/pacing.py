"""How much of the prompts goes beside the decodes, where nobody said a number: as much as lets the
time between tokens grow by a given factor, by what passes cost on this machine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.errors import InvalidRequestError
from anydecode.scoring.cost import default_table
from anydecode.scoring.score import ScoreRequest

#: Prompt rows of a pass in which nobody speaks.
MOST = 512

_GUESS = default_table()


def checked_stretch(stretch: float) -> float:
    """`stretch`, unless it leaves no time for prompts."""
    if not stretch > 1:
        raise InvalidRequestError(f"stretch must be more than 1, not {stretch:g}")
    return stretch


def rows_beside(
    decodes: Seq[ScoreRequest], prompts: Seq[ScoreRequest], stretch: float, *, whole: bool = False
) -> int:
    """The most rows of `prompts` with which a pass takes no longer than `stretch` times what the
    `decodes` take by themselves; at least one, `MOST` where nobody decodes. With `whole` the rows
    are chosen for all passes until the prompts are through: behind where they end, and as if one
    sequence at least were decoding."""
    rows, held = sum(score.num_rows for score in decodes), _behind(decodes)
    if not (rows or whole):
        return MOST
    behind = _behind(prompts[:1]) + (prompts[0].num_rows if whole else 0)
    if not rows:
        rows, held = 1, behind
    cost_model = prompts[0].sequence.cost_model or _GUESS
    limit = stretch * cost_model.seconds(rows, held)
    low, high = 1, MOST
    while low < high:
        more = (low + high + 1) // 2
        seen = (rows * held + more * behind) // (rows + more)
        if cost_model.seconds(rows + more, seen) <= limit:
            low = more
        else:
            high = more - 1
    return low


def is_prompt(score: ScoreRequest) -> bool:
    """Whether a score is the start of a sequence that has said nothing yet, and may be cut into
    chunks. However short: beside one decode, sixty rows are a stall too."""
    return (
        score.num_rows > 1
        and not score.sequence.root.tokens
        and all(span.divisible for spans in score.groups for span in spans)
    )


def _behind(scores: Seq[ScoreRequest]) -> int:
    """The positions that rows of `scores` see, on average."""
    contexts = [spans[-1].context for score in scores for spans in score.groups]
    return sum(context.length for context in contexts) // max(1, len(contexts))
