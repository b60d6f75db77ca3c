"""Prefill layer group by layer group, between decode steps.

Lee et al., "From Tokens to Layers: Redefining Stall-Free Scheduling for LLM Serving with Layered
Prefill", arXiv:2510.08055.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import Schedule, ScheduledSpan, whole
from anydecode.engine.schedules.pacing import checked_stretch, is_prompt, rows_beside
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.span import ChainSpan, CompletionSpan, Span


def num_groups(rows: int, unit: int, max_groups: int) -> int:
    """The number of layer groups for a cohort of `rows` prompt tokens: the smallest power of two
    with at most `unit` rows times all layers per pass, at most `max_groups`."""
    groups = 1
    while groups < max_groups and rows > unit * groups:
        groups *= 2
    return min(groups, max_groups)


def boundaries(layers: int, groups: int) -> list[int]:
    """The ends of the layer groups, larger groups first: `boundaries(5, 2)` is [3, 5]."""
    size, larger = divmod(layers, groups)
    return [(i + 1) * size + min(i + 1, larger) for i in range(groups)]


@register(
    Card(
        "layered-prefill",
        "serving",
        paper="Lee et al. 2025, Layered Prefill, arXiv:2510.08055",
        exactness="token-exact",
        use="LLM(schedule='layered-prefill') or anydecode serve --schedule layered-prefill",
        summary="Prefills whole prompts one group of layers per pass, together with all decodes.",
        deviations=(
            "a prompt that needs hidden states or more than its last row is not divided by layers",
            "there are at most as many groups as the model has layers",
            "without a unit, the work of a pass follows from the measured pass costs on this"
            " machine, and a cohort is as much as runs in that many groups",
        ),
    )
)
class LayeredPrefill(Schedule):
    """Runs one cohort of prompts at a time, one group of layers per pass.

    Args:
        unit: Prefill work of a pass, in rows through all layers. By default it is chosen when a
            cohort begins, such that the time between tokens grows by the factor `stretch`, by
            the measured pass costs.
        groups: Maximum number of layer groups.
        cohort: Maximum number of rows of a cohort; longer prompts are divided into chunks of this
            size. By default as many rows as run in `groups` passes.
        short: Other requests of more rows count as prompts too.
        stretch: Allowed factor on the time between tokens, more than 1.
    """

    def __init__(
        self,
        unit: int | None = None,
        groups: int = 16,
        cohort: int | None = None,
        short: int = 64,
        stretch: float = 2.0,
    ) -> None:
        if min([groups, *(size for size in (unit, cohort) if size is not None)]) < 1:
            raise InvalidRequestError("unit, groups and cohort must be 1 or more")
        self.unit, self.groups, self.cohort, self.short = unit, groups, cohort, short
        self.stretch = checked_stretch(stretch)
        self._cohort: list[ScoreRequest] = []

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        current = set(waiting)
        self._cohort = [request for request in self._cohort if request in current]
        members = set(self._cohort)
        prompts, decodes = [], []
        for request in waiting:
            if request in members:
                continue
            if request.num_rows > self.short or is_prompt(request):
                prompts.append(request)
            else:
                decodes.append(request)
                yield from whole(request)
        if prompts and not self._cohort:
            self._gather(decodes, prompts)
        for request in self._cohort:
            yield from _stage(request)

    def _gather(self, decodes: list[ScoreRequest], prompts: list[ScoreRequest]) -> None:
        """Choose the next cohort and divide its prompts into layer groups."""
        unit = self.unit or rows_beside(decodes, prompts, self.stretch, whole=True)
        depth = prompts[0].groups[0][0].kv_cache.pool.model.spec.num_layers
        cohort = self.cohort or unit * min(self.groups, depth)
        rows = 0
        for request in prompts:
            if rows and rows + request.num_rows > cohort:
                break
            rows += request.num_rows
            self._cohort.append(request)
        for request in self._cohort:
            for spans in request.groups:
                if spans and _divisible(spans[0]):
                    layers = spans[0].stop
                    count = num_groups(min(rows, cohort), unit, min(self.groups, layers))
                    spans[:1] = _cut(spans[0], boundaries(layers, count), cohort)


def _cut(span: Span, stops: list[int], rows: int) -> list[Span]:
    """`span` divided into chunks of `rows` and these into spans of one layer group each."""
    result: list[Span] = []
    for first in range(0, len(span), rows):
        tokens = span.tokens[first : first + rows]
        inputs = None if span.inputs is None else span.inputs[first : first + rows]
        embedded = None if span.embedded is None else span.embedded[first : first + rows]
        num_after = len(span) - first - len(tokens)
        output_rows = [len(tokens) - 1] if not num_after and len(span.output_rows) else []
        groups: list[Span] = [
            ChainSpan(
                span.kv_cache, tokens, 0, stops[0], inputs=inputs, embedded=embedded, logits=False
            )
        ]
        for start, stop in zip(stops, stops[1:], strict=False):
            groups.append(
                CompletionSpan(span.kv_cache, [-1] * len(tokens), start, stop, logits=False)
            )
        groups[-1].output_rows, groups[-1].logits = output_rows, span.logits
        _divide_states(span, groups, span.num_states - num_after)
        result += groups
    return result


def _divide_states(span: Span, groups: list[Span], num_states: int) -> None:
    """Let each of `groups`, which run the same rows of `span`, return what drafters read of the
    last `num_states` rows in its layers."""
    states: dict[int, np.ndarray] = {}
    for part in groups:
        part.state_layers = tuple(
            layer
            for layer in span.state_layers
            if part.start < layer <= part.stop or layer == part.start == 0
        )
        part.num_states, part.other_states = max(0, min(len(part), num_states)), states


def _divisible(span: Span) -> bool:
    """Whether `span` may be divided into layer groups: a chain through all layers that returns at
    most its last row and no hidden states, of a model that can start a pass at a later layer."""
    spec = span.kv_cache.pool.model.spec
    return (
        isinstance(span, ChainSpan)
        and not spec.starts_at_first_layer
        and (span.start, span.stop, span.done) == (0, spec.num_layers, 0)
        and not span.capture_layers
        and span.variant is None
        and not span.kv_cache.partials
        and list(span.output_rows) in ([], [len(span) - 1])
    )


def _stage(request: ScoreRequest) -> Iterator[ScheduledSpan]:
    """The next layer group of each sequence cache of a prompt."""
    for spans in request.groups:
        for span in spans:
            if span.remaining:
                if isinstance(span, CompletionSpan) and span.partial is None:
                    span.partial = span.kv_cache.partials[-1]
                    span.inputs = span.partial.hidden
                yield request, span, span.remaining
                break
