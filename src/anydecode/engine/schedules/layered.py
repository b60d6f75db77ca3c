"""Prefill layer group by layer group, between decode steps.

Lee et al., "From Tokens to Layers: Redefining Stall-Free Scheduling for LLM Serving with Layered
Prefill", arXiv:2510.08055.
"""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import Schedule, ScheduledSpan, whole
from anydecode.engine.schedules.pacing import checked_stretch, is_prompt, rows_beside
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.span import ChainSpan, CompletionSpan, Span


def num_groups(rows: int, unit: int, most: int) -> int:
    """How many layer groups a cohort of `rows` prompt tokens is cut into: the power of two that
    leaves at most `unit` rows times all layers per pass, no more than `most`."""
    groups = 1
    while groups < most and rows > unit * groups:
        groups *= 2
    return min(groups, most)


def boundaries(layers: int, groups: int) -> list[int]:
    """Where groups of layers end, the larger groups first: `boundaries(5, 2)` is [3, 5]."""
    size, larger = divmod(layers, groups)
    return [(i + 1) * size + min(i + 1, larger) for i in range(groups)]


@register(
    Card(
        "layered-prefill",
        "serving",
        paper="Lee et al. 2025, Layered Prefill, arXiv:2510.08055",
        exactness="token-exact",
        summary="A prompt goes through a group of layers per pass, whole, beside every decode.",
        deviations=(
            "a prompt that wants hidden states or more than its last row is not cut into layers",
            "layers are cut into at most as many groups as the model has layers",
            "without a unit, the work of a pass follows from what passes cost on this machine, and"
            " a cohort is as much as goes through in that many groups",
        ),
    )
)
class LayeredPrefill(Schedule):
    """One cohort of prompts at a time, of at most `cohort` rows, a group of layers per pass.

    `unit` rows through all layers is the work of a pass; `groups` is the largest number of groups.
    Prompts longer than `cohort` are cut into chunks of that many rows, one after the other; where
    nothing is said, it is what goes through in so many groups. Without a `unit`, that is what
    stretches the time between tokens to `stretch` times what it is without prompts, by what passes
    cost on this machine, when a cohort begins; and every prompt is one, however short.
    """

    def __init__(
        self,
        unit: int | None = None,
        groups: int = 16,
        cohort: int | None = None,
        short: int = 64,
        stretch: float = 2.0,
    ) -> None:
        if min([groups, *(given for given in (unit, cohort) if given is not None)]) < 1:
            raise InvalidRequestError("unit, groups and cohort must be 1 or more")
        self.unit, self.groups, self.cohort, self.short = unit, groups, cohort, short
        self.stretch = checked_stretch(stretch)
        self._cohort: list[ScoreRequest] = []

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        here = set(waiting)
        self._cohort = [score for score in self._cohort if score in here]
        members = set(self._cohort)
        prompts, decodes = [], []
        for score in waiting:
            if score in members:
                continue
            if score.num_rows > self.short or (self.unit is None and is_prompt(score)):
                prompts.append(score)
            else:
                decodes.append(score)
                yield from whole(score)
        if prompts and not self._cohort:
            self._gather(decodes, prompts)
        for score in self._cohort:
            yield from _stage(score)

    def _gather(self, decodes: list[ScoreRequest], prompts: list[ScoreRequest]) -> None:
        """Choose the next cohort and cut its prompts into layer groups."""
        unit = self.unit or rows_beside(decodes, prompts, self.stretch, whole=True)
        depth = prompts[0].groups[0][0].context.pool.model.spec.num_layers
        cohort = self.cohort or unit * min(self.groups, depth)
        rows = 0
        for score in prompts:
            if rows and rows + score.num_rows > cohort:
                break
            rows += score.num_rows
            self._cohort.append(score)
        for score in self._cohort:
            for spans in score.groups:
                if spans and _divisible(spans[0]):
                    layers = spans[0].stop
                    count = num_groups(min(rows, cohort), unit, min(self.groups, layers))
                    spans[:1] = _cut(spans[0], boundaries(layers, count), cohort)


def _cut(span: Span, stops: list[int], rows: int) -> list[Span]:
    """`span` as spans of one layer group each, in chunks of `rows`."""
    result: list[Span] = []
    for first in range(0, len(span), rows):
        tokens = span.tokens[first : first + rows]
        inputs = None if span.inputs is None else span.inputs[first : first + rows]
        last = first + len(tokens) == len(span)
        answers = [len(tokens) - 1] if last and len(span.output_rows) else []
        result.append(ChainSpan(span.context, tokens, 0, stops[0], inputs=inputs, logits=False))
        for start, stop in zip(stops, stops[1:], strict=False):
            result.append(
                CompletionSpan(span.context, [-1] * len(tokens), start, stop, logits=False)
            )
        result[-1].output_rows, result[-1].logits = answers, span.logits
    return result


def _divisible(span: Span) -> bool:
    """Whether `span` may be cut into layer groups: a chain through all layers, of which at most the
    last row is asked for, and not in hidden states."""
    depth = span.context.pool.model.spec.num_layers
    return (
        isinstance(span, ChainSpan)
        and (span.start, span.stop, span.done) == (0, depth, 0)
        and not span.capture_layers
        and not span.context.partials
        and list(span.output_rows) in ([], [len(span) - 1])
    )


def _stage(score: ScoreRequest) -> Iterator[ScheduledSpan]:
    """The next layer group of each of a prompt's contexts."""
    for spans in score.groups:
        for span in spans:
            if span.remaining:
                if isinstance(span, CompletionSpan) and span.partial is None:
                    span.partial = span.context.partials[-1]
                    span.inputs = span.partial.hidden
                yield score, span, span.remaining
                break
