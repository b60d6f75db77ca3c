"""The keywords of `SamplingParams`, as functions that pass them on declare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from anydecode.sampling.autodeco import Heads
from anydecode.sampling.processor import LogitsProcessor


class SamplingOptions(TypedDict, total=False):
    """The sampling options of a request: those of `SamplingParams`, where they and their defaults
    are described. `stop` may also be one text, and `banned_words` may contain texts."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon: float
    eta: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    top_w: bool
    top_w_entropy: float
    top_w_mass: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed: int
    dry_breakers: Sequence[int]
    momentum_alpha: float
    momentum_k: int
    logit_bias: Mapping[int, float]
    banned_words: Sequence[str | Sequence[int]]
    banned_strings: Sequence[str]
    banned_strings_ignore_case: bool
    no_repeat_ngram: int
    guidance_scale: float
    dola_layers: Sequence[int] | str
    autodeco: Heads | None
    logits_processors: Sequence[LogitsProcessor]
    min_tokens: int
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    thinking_token_budget: int | None
    n: int
    seed: int | None
    logprobs: int | None
    processed_logprobs: bool
    prompt_logprobs: int | None
