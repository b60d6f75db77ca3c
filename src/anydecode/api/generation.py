"""The result of a request: generated text, tokens and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from anydecode.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Stats:
    """Statistics of one generation.

    Attributes:
        passes: Number of target forward passes with rows of this sequence. Where several texts come
            from one search, or are the same greedy text, all passes and rows count with the first.
        num_tokens: Number of generated tokens.
        num_prompt_tokens: Number of prompt tokens.
        seconds: Time from submission to the last token.
        time_to_first_token: Time from submission to the first token, in seconds.
        rows: Number of rows that the target computed for this sequence.
        num_cached_tokens: Prompt tokens taken from the prefix cache instead.
        num_accepted_predictions: Tokens drafted from `prediction` that were accepted.
        num_rejected_predictions: Tokens drafted from `prediction` that were rejected.
        num_first_tokens: Number of tokens that came at `time_to_first_token`, the first one
            included.
    """

    passes: int
    num_tokens: int
    num_prompt_tokens: int
    seconds: float
    time_to_first_token: float
    rows: int = 0
    num_cached_tokens: int = 0
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0
    num_first_tokens: int = 1

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per target pass, the passes of the prompt included."""
        return self.num_tokens / self.passes if self.passes else 0.0

    @property
    def num_later_tokens(self) -> int:
        """Tokens that were generated between `time_to_first_token` and `seconds`."""
        return self.num_tokens - self.num_first_tokens

    @property
    def tokens_per_second(self) -> float:
        """`num_tokens` / `seconds`, the time to the first token included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All statistics as JSON-compatible values."""
        return {
            **asdict(self),
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(eq=False)
class Generation:
    """The result of a request.

    Attributes:
        text: The generated text.
        tokens: The generated token ids.
        finish_reason: "stop" (end of text, stop token or stop string), "length", "cancelled" or
            "content_filter" (the text cannot go on without a banned string).
        seed: The seed that reproduces this result.
        stats: Timing and counters.
        decoder: Name of the decoder.
        draft_models: Names of the draft models that the decoder could draft with: that of `draft=`,
            or the drafter that comes with anydecode ("... (shipped)"); empty without one.
        logprobs: One `TokenLogprobs` per generated token, if requested; None for a token of an
            earlier segment, and where the decoder computes none.
        trace: One entry per decoding round, if requested.
        constraint: How the constraint was enforced (`constraints.constraint.Report`), whether the
            text is `complete` under it, and how many `tries` and `discarded` tokens validation
            cost. None without a constraint.
        resume: The value of `resume` that continues samples cut off by `segment`, or None.
        prompt_logprobs: One `TokenLogprobs` per prompt token, None for the first, if requested.
        samples: All samples, this one first.
        ignored: Options that had no effect with this decoder.
        token_text: Returns the text of a single token id.
        score: The score by which a search (beam) has ranked the text; None with other decoders.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    stats: Stats
    decoder: str
    logprobs: list[TokenLogprobs | None] | None = None
    trace: list[dict[str, Any]] | None = None
    constraint: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    samples: list[Generation] = field(default_factory=list, repr=False)
    token_text: Callable[[int], str] | None = field(default=None, repr=False)
    ignored: list[str] = field(default_factory=list)
    score: float | None = None
    draft_models: list[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """The result in a notebook; with its decoding rounds if `trace=True` was set."""
        from anydecode.trace.html import fragment

        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
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
            "draft_models": self.draft_models,
            "stats": stats,
            **({} if self.score is None else {"score": self.score}),
            **({} if self.constraint is None else {"constraint": self.constraint}),
            **({} if self.resume is None else {"resume": self.resume}),
        }


@dataclass(eq=False)
class StreamChunk:
    """A chunk of streamed text. The last chunk carries the whole `generation`."""

    text: str
    generation: Generation | None = None

    def __str__(self) -> str:
        return self.text
