"""What a request gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """`seconds` is from submission to the last token; `time_to_first_token` from submission too.
    `rows` is how many rows the target has computed for this answer, `num_cached_tokens` how many of
    the prompt's tokens it took from the prefix cache instead."""

    passes: int
    num_tokens: int
    num_prompt_tokens: int
    seconds: float
    time_to_first_token: float
    rows: int = 0
    num_cached_tokens: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per pass of the target, the prompt's first pass included."""
        return self.num_tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """`num_tokens` / `seconds`: the time to the first token counts."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain JSON."""
        return {
            **asdict(self),
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(eq=False)
class Generation:
    """One answer. `finish_reason` is "stop" (end of text, or a stop rule), "length" or "cancelled".
    `samples` holds all answers where `n` was more than 1, this one first. `constraint` says how the
    request's constraint was enforced (`constraints.constraint.Report`), whether the answer is
    `complete` under it, and how many `tries` and `discarded` tokens the checks cost. `resume` goes
    on with the samples that a segment cut off. `prompt_logprobs` holds one `TokenLogprobs` per
    token of the prompt, None for the first, where the request asked for them."""

    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    stats: Stats
    decoder: str
    logprobs: list[Any] | None = None
    trace: list[dict[str, Any]] | None = None
    constraint: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None
    samples: list[Generation] = field(default_factory=list, repr=False)
    token_text: Callable[[int], str] | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        """The answer in a notebook; with its passes, if it was made with `trace=True`."""
        from anydecode.evaluation.trace_html import fragment

        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain JSON."""
        stats = self.stats.to_dict()
        return {
            "text": self.text,
            "tokens": self.tokens,
            "num_tokens": self.stats.num_tokens,
            "passes": self.stats.passes,
            "seconds": self.stats.seconds,
            "time_to_first_token": self.stats.time_to_first_token,
            "tokens_per_second": self.stats.tokens_per_second,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "decoder": self.decoder,
            "stats": stats,
            **({} if self.constraint is None else {"constraint": self.constraint}),
            **({} if self.resume is None else {"resume": self.resume}),
        }


@dataclass(eq=False)
class StreamChunk:
    """A stretch of streamed text. The last one carries the whole `generation`."""

    text: str
    generation: Generation | None = None

    def __str__(self) -> str:
        return self.text
