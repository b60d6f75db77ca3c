"""Sampling parameters of a request: validation, and the sampler that they describe."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.models.tokenizer import is_unicode
from anydecode.sampling.autodeco import AutoDeco, Heads
from anydecode.sampling.banned_words import BannedWords, BannedWordTable
from anydecode.sampling.bias import LogitBias, MinimumLength, NoRepeatNgram
from anydecode.sampling.constrained import Constrained, ConstraintState
from anydecode.sampling.contrast import Plausible
from anydecode.sampling.dola import DoLa, candidate_layers
from anydecode.sampling.dry import Dry
from anydecode.sampling.eta import Eta
from anydecode.sampling.guidance import Guidance
from anydecode.sampling.logprobs import MAX_ALTERNATIVES
from anydecode.sampling.min_p import MinP
from anydecode.sampling.mirostat import Mirostat, MirostatZipf
from anydecode.sampling.momentum import Momentum
from anydecode.sampling.penalties import CountPenalty, RepetitionPenalty
from anydecode.sampling.processor import LogitsCombiner, LogitsProcessor
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.top_n_sigma import TopNSigma
from anydecode.sampling.top_w import Geometry, TopW
from anydecode.sampling.truncation import Epsilon, TopK, TopP
from anydecode.sampling.typical import Typical
from anydecode.sampling.xtc import ExcludeTopChoices

#: Maximum number of samples per prompt; the sample index has 16 bits in the noise stream.
MAX_SAMPLES = 1 << 16

_BIG = 1 << 31

#: Largest absolute value of a logit bias: a sum of several must be finite in float32.
MAX_BIAS = 1e9

#: Below this temperature, logit / T in float32 is less precise than the noise needs.
MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class SamplingParams:
    """All sampling options of a request. The defaults change nothing.

    The rules apply in this order: guidance or DoLa; repetition penalty, presence and frequency
    penalty, DRY, logit bias, no-repeat n-gram, banned words, minimum length, `logits_processors`,
    constraint, momentum; temperature; top-n-sigma, top-k, top-p, min-p, typical, epsilon, eta,
    top-w, XTC, mirostat, autodeco.

    Args:
        temperature: 0 for greedy decoding.
        top_k: Keep the k most probable tokens; 0 is off.
        top_p: Keep the most probable tokens up to this mass (nucleus sampling); 1 is off.
        min_p: Keep tokens at least this probable relative to the best one; 0 is off.
        typical_p: Locally typical sampling, mass to keep; 1 is off.
        epsilon: Keep tokens of at least this probability; 0 is off.
        eta: Eta sampling; 0 is off.
        top_n_sigma: Keep tokens within n standard deviations of the best logit; 0 is off.
        xtc_probability: Probability of excluding top choices (XTC); 0 is off.
        xtc_threshold: Tokens of at least this probability are top choices.
        top_w: Whether to truncate by embedding distances (Top-W).
        top_w_entropy: Weight of the entropy in Top-W.
        top_w_mass: Weight of the log mass in Top-W.
        mirostat: Version of mirostat, 1 or 2; 0 is off.
        mirostat_tau: Target surprise in bits per token.
        mirostat_eta: Learning rate of mirostat.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or
            output; 1 is off.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        dry_multiplier: Scale of the DRY penalty on repetitions; 0 is off.
        dry_base: Growth of the DRY penalty per repeated token.
        dry_allowed: Minimum length of a penalised repetition.
        dry_breakers: Token ids that end a repetition.
        momentum_alpha: Weight of the resistance of momentum decoding; 0 is off.
        momentum_k: Number of tokens that momentum decoding considers.
        logit_bias: Added to the logits, by token id; -inf forbids a token.
        banned_words: Token id sequences that must not be generated; kept as a `BannedWordTable`.
        banned_strings: Strings that the text must not contain. When the text completes one, the
            generation rewinds to the token that began it and goes on without that token there.
        banned_strings_ignore_case: Whether `banned_strings` match in upper and lower case.
        no_repeat_ngram: Forbid repeated n-grams of this size; 0 is off.
        guidance_scale: Scale of classifier-free guidance; 1 is off.
        dola_layers: Early layers to contrast with (DoLa), or "low" or "high" for every second
            layer of that half; empty is off.
        autodeco: Heads that predict temperature and top-p, or None.
        logits_processors: Processors of your own. Each sample starts with a `fork` of them.
        min_tokens: Minimum number of tokens before the generation may end.
        max_tokens: Maximum number of tokens; 0 to score only the prompt; None for the default.
        stop: Strings that end the generation.
        stop_tokens: Token ids that end the generation.
        ignore_eos: Whether end-of-text tokens do not end the generation.
        include_stop: Whether the text includes the stop string or token.
        thinking_token_budget: Number of reasoning tokens after which the closing reasoning tag is
            forced; None for no limit.
        n: Number of samples.
        seed: Seed of the random numbers, 64 bits; None for a random one.
        logprobs: Number of alternatives per token to return with log-probabilities, under
            unmodified logits unless `processed_logprobs`; None for no log-probabilities.
        processed_logprobs: Whether `logprobs` are those of the distribution sampled from.
        prompt_logprobs: The same as `logprobs` for the prompt's tokens, always under unmodified
            logits.

    Raises:
        InvalidRequestError: If a value is out of range, or two contradict each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon: float = 0.0
    eta: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_w: bool = False
    top_w_entropy: float = 2.2
    top_w_mass: float = 2.8
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed: int = 2
    dry_breakers: Sequence[int] = ()
    momentum_alpha: float = 0.0
    momentum_k: int = 5
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_words: Sequence[Sequence[int]] = ()
    banned_strings: Sequence[str] = ()
    banned_strings_ignore_case: bool = False
    no_repeat_ngram: int = 0
    guidance_scale: float = 1.0
    dola_layers: Sequence[int] | str = ()
    autodeco: Heads | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    thinking_token_budget: int | None = None
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    processed_logprobs: bool = False
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        number: Any
        for name, low, high, allowed in RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            number, kind = (Integral, "an integer") if name in INTEGERS else (Real, "a number")
            is_usual = type(value) is int or (type(value) is float and number is Real)
            if not is_usual and (isinstance(value, bool) or not isinstance(value, number)):
                raise InvalidRequestError(f"{name} must be {kind}, not {value!r}")
            if not low <= value <= high:
                raise InvalidRequestError(f"{name} must be {allowed}, not {value}")
        for message in chain(self._type_errors(), self._contradictions()):
            raise InvalidRequestError(message)
        if len(self.banned_words) and not isinstance(self.banned_words, BannedWordTable):
            object.__setattr__(self, "banned_words", BannedWordTable(self.banned_words))

    def sampler(
        self,
        prompt: Sequence[int],
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        *,
        constraint: ConstraintState | None = None,
        geometry: Geometry | None = None,
        num_layers: int = _BIG,
        hidden_size: int | None = None,
    ) -> Sampler:
        """The sampler at the start of a generation.

        Args:
            prompt: Token ids of the prompt.
            vocab_size: Vocabulary size of the model.
            eos_ids: End-of-text tokens.
            constraint: State of the constraint, if any.
            geometry: The model's embeddings; needed by top-w only.
            num_layers: Number of layers of the model.
            hidden_size: Size of the model's hidden states.

        Raises:
            InvalidRequestError: If a token, a layer or the autodeco heads do not fit the model.
        """
        self._check_ids(vocab_size)
        if self.autodeco is not None and hidden_size is not None:
            self.autodeco.check(hidden_size)
        pre_temperature = list(self._pre_temperature(prompt, eos_ids, constraint))
        post_temperature = [] if self.temperature == 0 else list(self._post_temperature(geometry))
        combiner = self._combiner(num_layers)
        return Sampler(self.temperature, pre_temperature, post_temperature, combiner)

    @property
    def needs_geometry(self) -> bool:
        """Whether `sampler` needs the model's embeddings."""
        return self.top_w and self.temperature > 0

    def _pre_temperature(
        self, prompt: Sequence[int], eos_ids: Iterable[int], constraint: ConstraintState | None
    ) -> Iterator[LogitsProcessor]:
        if self.repetition_penalty != 1:
            yield RepetitionPenalty(self.repetition_penalty, prompt)
        if self.presence_penalty or self.frequency_penalty:
            yield CountPenalty(self.presence_penalty, self.frequency_penalty)
        if self.dry_multiplier:
            yield Dry(
                self.dry_multiplier, self.dry_base, self.dry_allowed, self.dry_breakers, prompt
            )
        if self.logit_bias:
            yield LogitBias(self.logit_bias)
        if self.no_repeat_ngram:
            yield NoRepeatNgram(self.no_repeat_ngram, prompt)
        if self.banned_words:
            yield BannedWords(self.banned_words, prompt)
        if self.min_tokens:
            yield MinimumLength(self.min_tokens, {*eos_ids, *self.stop_tokens})
        for processor in self.logits_processors:
            yield processor.fork()
        if constraint is not None:
            yield Constrained(constraint)
        if self.dola_layers:
            yield Plausible()
        if self.momentum_alpha:
            yield Momentum(self.momentum_alpha, self.momentum_k, prompt=prompt)

    def _post_temperature(self, geometry: Geometry | None) -> Iterator[LogitsProcessor]:
        if self.top_n_sigma:
            yield TopNSigma(self.top_n_sigma)
        if self.top_k:
            yield TopK(self.top_k)
        if self.top_p < 1:
            yield TopP(self.top_p)
        if self.min_p:
            yield MinP(self.min_p)
        if self.typical_p < 1:
            yield Typical(self.typical_p)
        if self.epsilon:
            yield Epsilon(self.epsilon)
        if self.eta:
            yield Eta(self.eta)
        if self.top_w:
            if geometry is None:
                raise InvalidRequestError("top_w needs a model whose embeddings can be read")
            yield TopW(geometry, self.top_w_entropy, self.top_w_mass)
        if self.xtc_probability:
            yield ExcludeTopChoices(self.xtc_probability, self.xtc_threshold)
        if self.mirostat:
            kind = MirostatZipf if self.mirostat == 1 else Mirostat
            yield kind(self.mirostat_tau, self.mirostat_eta)
        if self.autodeco is not None:
            yield AutoDeco(self.autodeco)

    def _combiner(self, num_layers: int) -> LogitsCombiner | None:
        if self.guidance_scale != 1:
            return Guidance(self.guidance_scale)
        return DoLa(candidate_layers(self.dola_layers, num_layers)) if self.dola_layers else None

    def _type_errors(self) -> Iterator[str]:
        """Messages about fields with values of a wrong type."""
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                yield f"{name} must be true or false, not {value!r}"
        for name in ("stop_tokens", "dry_breakers"):
            if not _are_ids(value := getattr(self, name)):
                yield f"{name} must be a list of token ids, not {value!r}"
        if not isinstance(self.dola_layers, str) and not _are_ids(self.dola_layers):
            yield f"dola_layers must be low, high or layers, not {self.dola_layers!r}"
        processors = self.logits_processors
        if not _is_list(processors) or not all(isinstance(p, LogitsProcessor) for p in processors):
            yield f"logits_processors must be a list of LogitsProcessor objects, not {processors!r}"
        words = self.banned_words
        is_table = isinstance(words, BannedWordTable)
        if not is_table and not (_is_list(words) and all(_are_ids(word) for word in words)):
            yield f"banned_words must be a list of lists of token ids, not {words!r}"
        for name in ("stop", "banned_strings"):
            texts = getattr(self, name)
            if not _is_list(texts) or not all(isinstance(text, str) for text in texts):
                yield f"{name} must be a list of strings that are not empty, not {texts!r}"
        biases = self.logit_bias
        if not isinstance(biases, Mapping):
            yield f"logit_bias must map token ids to numbers, not {biases!r}"
            return
        for token, value in biases.items():
            if not _are_ids([token]):
                yield f"logit_bias has the key {token!r}; its keys must be token ids (integers)"
            if not isinstance(value, Real) or isinstance(value, bool):
                yield f"logit_bias of token {token} is {value!r}; it must be a number"

    def _contradictions(self) -> Iterator[str]:
        """Messages about values that are invalid or contradict each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})"
        greedy = self.temperature == 0
        if 0 < self.temperature < MIN_TEMPERATURE:
            yield f"temperature must be 0 or at least {MIN_TEMPERATURE}, not {self.temperature}"
        if self.momentum_alpha and self.n > 1:
            yield f"n is {self.n}, but momentum always generates the same text"
        for name in ("mirostat", "xtc_probability", "top_w", "autodeco"):
            if greedy and getattr(self, name):
                yield f"{name} needs a temperature above 0"
        if self.autodeco is not None and not isinstance(self.autodeco, Heads):
            yield f"autodeco must be heads (`Heads.load`), not {type(self.autodeco).__name__}"
        for rule in ("mirostat", "autodeco"):
            if not getattr(self, rule):
                continue
            for name, off in TRUNCATIONS.items():
                if getattr(self, name) != off:
                    yield f"{rule} and {name} exclude each other: {rule} sets its own limit"
        if self.autodeco and self.mirostat:
            yield "autodeco and mirostat exclude each other: each sets its own limit"
        if self.autodeco and self.temperature != 1:
            yield "autodeco sets the temperature itself: leave it at 1"
        if self.guidance_scale != 1 and self.dola_layers:
            yield "guidance_scale and dola_layers cannot be combined"
        for name in ("stop", "banned_strings"):
            texts = getattr(self, name)
            if not all(texts):
                yield f"{name} must be a list of strings that are not empty"
            if not all(map(is_unicode, texts)):
                yield f"{name} contains half of a surrogate pair and is not valid Unicode"
        if self.banned_strings_ignore_case and not self.banned_strings:
            yield "banned_strings_ignore_case is set, but banned_strings is not"
        for token, value in self.logit_bias.items():
            if not (abs(value) <= MAX_BIAS or value == -math.inf):
                yield (
                    f"logit_bias of token {token} must be between -{MAX_BIAS:.0f} and"
                    f" {MAX_BIAS:.0f}, or -inf, not {value}"
                )
        if self.processed_logprobs and self.logprobs is None:
            yield "processed_logprobs is set, but logprobs is not"

    def _check_ids(self, vocab_size: int) -> None:
        groups: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "stop_tokens": self.stop_tokens,
            "dry_breakers": self.dry_breakers,
            "banned_words": getattr(self.banned_words, "ids", ()),
        }
        for name, ids in groups.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"{name} contains token {token}, but the vocabulary has {vocab_size} tokens"
                    )


def _is_list(value: object) -> bool:
    return isinstance(value, Collection | np.ndarray) and not isinstance(value, str | Mapping)


def _are_ids(value: Any) -> bool:
    return _is_list(value) and all(
        type(one) is int or (isinstance(one, Integral) and not isinstance(one, bool))
        for one in value
    )


_FLAGS = (
    "top_w", "banned_strings_ignore_case", "ignore_eos", "include_stop", "processed_logprobs",
)  # fmt: skip
_INF = math.inf
SMALLEST = 5e-324  # the smallest number above 0
BELOW_ONE = math.nextafter(1.0, 0.0)

#: Name, minimum and maximum, and the allowed values in words.
RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0, 100, "between 0 and 100"),
    ("top_k", 0, _BIG, "0 (off) or more"),
    ("top_p", SMALLEST, 1, "above 0 and at most 1"),
    ("min_p", 0, 1, "between 0 and 1"),
    ("typical_p", SMALLEST, 1, "above 0 and at most 1"),
    ("epsilon", 0, BELOW_ONE, "at least 0 and below 1"),
    ("eta", 0, BELOW_ONE, "at least 0 and below 1"),
    ("top_n_sigma", 0, 1e6, "between 0 (off) and 1000000"),
    ("xtc_probability", 0, 1, "between 0 and 1"),
    ("xtc_threshold", SMALLEST, 1, "above 0 and at most 1"),
    ("top_w_entropy", 0, 1e6, "between 0 and 1000000"),
    ("top_w_mass", 0, 1e6, "between 0 and 1000000"),
    ("mirostat", 0, 2, "0 (off), 1 or 2"),
    ("mirostat_tau", SMALLEST, 100, "above 0 and at most 100 bits"),
    ("mirostat_eta", SMALLEST, 100, "above 0 and at most 100"),
    ("repetition_penalty", SMALLEST, 100, "above 0 and at most 100"),
    ("presence_penalty", -100, 100, "between -100 and 100"),
    ("frequency_penalty", -100, 100, "between -100 and 100"),
    ("dry_multiplier", 0, 100, "between 0 and 100"),
    ("dry_base", 1, 10, "between 1 and 10"),
    ("dry_allowed", 1, 64, "between 1 and 64"),
    ("momentum_alpha", 0, 100, "between 0 and 100"),
    ("momentum_k", 1, _BIG, "1 or more"),
    ("no_repeat_ngram", 0, _BIG, "0 (off) or more"),
    ("guidance_scale", 0, 100, "between 0 and 100"),
    ("min_tokens", 0, _BIG, "0 or more"),
    ("max_tokens", 0, _BIG, "0 or more"),
    ("thinking_token_budget", 0, _BIG, "0 or more"),
    ("n", 1, MAX_SAMPLES, f"between 1 and {MAX_SAMPLES}"),
    ("seed", -(1 << 63), (1 << 64) - 1, "an integer of 64 bits"),
    ("logprobs", 0, MAX_ALTERNATIVES, f"between 0 and {MAX_ALTERNATIVES}"),
    ("prompt_logprobs", 0, MAX_ALTERNATIVES, f"between 0 and {MAX_ALTERNATIVES}"),
)
_OPTIONAL = frozenset(
    {"max_tokens", "thinking_token_budget", "seed", "logprobs", "prompt_logprobs"}
)
INTEGERS = _OPTIONAL | {
    "top_k", "mirostat", "dry_allowed", "momentum_k", "no_repeat_ngram", "min_tokens", "n",
}  # fmt: skip
#: The options that truncate distributions, with the values that leave them as they are.
TRUNCATIONS: dict[str, float | bool] = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "epsilon": 0,
    "eta": 0,
    "top_n_sigma": 0,
    "xtc_probability": 0,
    "top_w": False,
}
