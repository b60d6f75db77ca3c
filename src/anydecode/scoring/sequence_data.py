"""The state of one generation: its tokens, its sampler, and its key-value caches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from anydecode.memory.pool import KVPool
from anydecode.memory.prefix import BLOCK
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import MAX_MODULES
from anydecode.sampling.noise import Noise
from anydecode.scoring.cost import DEFAULT_COSTS, CostModel
from anydecode.scoring.draft_policy import OWN_DRAFTS, DraftPolicy
from anydecode.scoring.draft_states import MAX_STATES, DraftStates
from anydecode.scoring.prediction import Prediction
from anydecode.scoring.state import SequenceState

if TYPE_CHECKING:
    from anydecode.sampling.sampler import Sampler

AnySequence = TypeVar("AnySequence", bound="SequenceData")

#: The names of the model runners that generate and draft, and those of the draft model's further
#: modules (`Transformer.further`).
TARGET = "target"
DRAFT = "draft"
FURTHER_DRAFTS = tuple(f"{DRAFT}+{number}" for number in range(1, MAX_MODULES))
#: Maximum number of cached positions that the target computes again for a drafter whose own cache
#: lacks them, as it does those of an answer's last rounds.
MAX_COMPUTED_AGAIN = 4 * BLOCK
_ids = count()


class StopChecker(Protocol):
    """Applies the stop rules to emitted tokens."""

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        """Append tokens. Returns how many were taken, and the finish reason if one of them ended
        the generation."""
        ...

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        ...

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that may end the generation, alone or by the text that they complete; None if
        any may."""
        ...

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        ...


@dataclass(eq=False)
class SequenceData:
    """The state of one generation.

    When it is preempted, its sequence caches and the decoder's generator are dropped; the decoder
    then starts again from this object.

    Attributes:
        prompt: Token ids of the prompt.
        tokens: Token ids generated so far.
        sampler: The sampler, advanced by all of `tokens`.
        noise: Random numbers of this sample.
        stop_checker: Stop rules and the text.
        open_kv_cache: Creates the sequence cache for (runner name, tokens).
        pool_of: Returns the cache memory of a runner by name.
        companion_prompts: Further prompts that are scored beside this one, for guidance.
        compute_logprobs: Computes the log-probabilities of a token from (logits, token,
            sampler), or None.
        logprobs: The log-probabilities of `tokens`, if `compute_logprobs` is set.
        state: What a decoder keeps across a restart (beams, a canvas), by `StateKey`. Everything
            else a decoder stores is lost on preemption. A fork starts with an empty one.
        finish_reason: Why the generation ended, or None while it runs.
        adapter: Index of the LoRA adapter, -1 for none.
        priority: Smaller numbers are scheduled first.
        mask_token: The tokenizer's mask token, for diffusion models.
        num_layers: Number of layers of the target model.
        namespace: Prefixes are shared only within a namespace.
        shares_prefix: Whether later requests may reuse this sequence's cache.
        num_passes: Number of target passes so far.
        num_rows: Number of rows that the target has computed.
        num_cached_tokens: Prompt tokens taken from the target's prefix cache.
        token_weight: What a token of it saves in the last multi-step pass with others, relative to
            their mean, at most 1 (`scoring.goodput.token_weights`).
        needs_weight: Whether the engine is to set `token_weight` in the next such pass, as it does
            where there are drafts.
        trace: One entry per decoding round if tracing is on, else None.
        tokenizers: Tokenizers by runner name.
        cost_model: Pass costs and the load of the engine.
        draft_policy: How much all requests of the engine together may draft.
        prediction: The caller's prediction of the answer, or None. Shared with branches.
        draft_states: What drafters read of the target's states, by model runner.
        optional_runners: The model runners, besides those that the decoder needs, that it can use.
        draft_runners: The model runners of all draft models, if the decoder uses every one.
        always_drafts: Whether drafters that read the target's states draft in every round, so that
            the target computes states again that their caches lack.
        repeats_drafts: Whether the text depends on what is drafted, so that drafters must read the
            same states whatever is cached.
        drafts_fit: Whether the memory holds the sequence with its drafts. The engine sets it to
            False when a sequence that runs alone has filled the memory, and starts it again.
        parent: The sequence that this is a branch of, or None.
        id: A number unique in the process.
    """

    prompt: list[int]
    sampler: Sampler
    noise: Noise
    stop_checker: StopChecker
    open_kv_cache: Callable[[str, list[int]], SequenceCache]
    pool_of: Callable[[str], KVPool]
    companion_prompts: list[list[int]] = field(default_factory=list)
    compute_logprobs: Callable[[np.ndarray, int, Sampler], Any] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    state: SequenceState = field(default_factory=SequenceState)
    finish_reason: str | None = None
    adapter: int = -1
    priority: int = 0
    mask_token: int | None = None
    num_layers: int = 1
    namespace: Hashable = None
    shares_prefix: bool = True
    num_passes: int = 0
    num_rows: int = 0
    num_cached_tokens: int = 0
    token_weight: float = 1.0
    needs_weight: bool = False
    trace: list[dict[str, Any]] | None = None
    tokenizers: dict[str, Any] = field(default_factory=dict)
    cost_model: CostModel = DEFAULT_COSTS
    draft_policy: DraftPolicy = OWN_DRAFTS
    prediction: Prediction | None = None
    draft_states: dict[str, DraftStates] = field(default_factory=dict)
    optional_runners: tuple[str, ...] = ()
    draft_runners: tuple[str, ...] = ()
    always_drafts: bool = False
    repeats_drafts: bool = False
    drafts_fit: bool = True
    parent: SequenceData | None = None
    id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        self._kv_caches: dict[str, list[SequenceCache]] = {}
        self._children: list[SequenceData] = []
        self._pending_logprobs: dict[tuple[int, int], Any] = {}

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    def model(self, runner: str = TARGET) -> Any:
        """The model of `runner`."""
        return self.pool(runner).model

    def pool(self, runner: str = TARGET) -> KVPool:
        """The memory of the key-value caches in the model of `runner`."""
        return self.pool_of(runner)

    def kv_cache(self, runner: str = TARGET) -> SequenceCache:
        """This sequence's key-value cache in the model of `runner`, created on first use. It may
        begin with a prefix that an earlier request computed. Only once the request runs:
        `Decoder.prepare` is called before, and what it opened would not be freed."""
        return self._open_kv_caches(runner)[0]

    def unscored(self, runner: str = TARGET) -> list[int]:
        """The tokens that are not in the cache of `runner` yet; never empty while generating."""
        return self._tokens_from(self.kv_cache(runner).length)

    def sample(self, sampler: Sampler, logits: np.ndarray, position: int, attempt: int = 0) -> int:
        """The token that `sampler` samples for `position`, with the random numbers of that
        position."""
        return sampler.sample(logits, self.noise, position, attempt)

    def record_logprobs(
        self, logits: np.ndarray, position: int, token: int, sampler: Sampler
    ) -> None:
        """Store the log-probabilities of a sampled token until it is emitted."""
        if self.compute_logprobs is not None:
            self._pending_logprobs[position, token] = self.compute_logprobs(logits, token, sampler)

    def stops_at(self, token: int) -> bool:
        """Whether `token` would end the generation."""
        return self.stop_checker.stops_at(token)

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """The tokens that may end the generation, if these are known and the backend can sample by
        itself (without log-probabilities); else None."""
        simple = self.samples_in_passes and self.compute_logprobs is None
        return self.stop_checker.end_tokens if simple else None

    @property
    def samples_in_passes(self) -> bool:
        """Whether the target's backend can sample what the sampler would: there is only a
        temperature, or truncations that it knows."""
        if self.sampler.truncation is None:
            return self.sampler.is_temperature_only
        executor = getattr(self.model(), "executor", None)
        return getattr(executor, "truncates", False)

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.stop_checker.remaining

    def emit(
        self, tokens: Seq[int], sampler: Sampler | None = None, logprobs: Seq[Any] | None = None
    ) -> int:
        """Append `tokens` to the text and apply the stop rules.

        Args:
            tokens: Token ids.
            sampler: A sampler that has already been advanced by all of `tokens` but the last; by
                default the sequence's own, which has been advanced by none of them.
            logprobs: The log-probabilities of the tokens, if not recorded by `record_logprobs`.

        Returns:
            How many tokens were taken before a stop rule applied.
        """
        if self.finished or not len(tokens):
            return 0
        first = self.length
        taken, self.finish_reason = self.stop_checker.push(list(tokens))
        emitted = list(tokens[:taken])
        self.tokens.extend(emitted)
        if self.compute_logprobs is not None:
            if logprobs is None:
                logprobs = [
                    self._pending_logprobs.get((first + i, token))
                    for i, token in enumerate(emitted)
                ]
            self.logprobs.extend(logprobs[:taken])
            self._pending_logprobs.clear()
        if sampler is None:
            for token in emitted:
                self.sampler.advance(token)
        else:
            self.sampler = sampler
            sampler.advance(tokens[-1])
        return taken

    def truncate(self, length: int, runner: str = TARGET) -> None:
        """Drop the cached positions from `length` on, in every sequence cache of `runner`."""
        kv_caches = self._open_kv_caches(runner)
        prompts = [self.prompt, *self.companion_prompts][: len(kv_caches)]
        for kv_cache, prompt in zip(kv_caches, prompts, strict=True):
            kv_cache.truncate(length - len(self.prompt) + len(prompt))

    def fork(self: AnySequence, number: int = 0) -> AnySequence:
        """Returns a branch of this sequence: the same tokens, cache and sampler state, and its own
        random numbers if `number` is not 0. The branch is released with this sequence."""
        branch = type(self)(
            prompt=self.prompt,
            sampler=self.sampler.fork(),
            noise=self.noise.forked(number) if number else self.noise,
            stop_checker=self.stop_checker,
            open_kv_cache=self.open_kv_cache,
            pool_of=self.pool_of,
            companion_prompts=self.companion_prompts,
            tokens=list(self.tokens),
            adapter=self.adapter,
            priority=self.priority,
            mask_token=self.mask_token,
            num_layers=self.num_layers,
            namespace=self.namespace,
            shares_prefix=self.shares_prefix,
            tokenizers=self.tokenizers,
            cost_model=self.cost_model,
            draft_policy=self.draft_policy,
            prediction=self.prediction,
            draft_states={name: one.fork() for name, one in self.draft_states.items()},
            optional_runners=self.optional_runners,
            draft_runners=self.draft_runners,
            always_drafts=self.always_drafts,
            repeats_drafts=self.repeats_drafts,
            parent=self,
        )
        for runner, kv_caches in self._kv_caches.items():
            branch._kv_caches[runner] = [kv_cache.fork() for kv_cache in kv_caches]
        self._children.append(branch)
        return branch

    def branch(self: AnySequence) -> AnySequence:
        """Returns a fork that has the same parent as this branch, or this sequence as its
        parent."""
        sibling = self.fork()
        if self.parent is not None:
            self._children.remove(sibling)
            sibling.parent = self.parent
            self.parent._children.append(sibling)
        return sibling

    def share_caches(self, other: SequenceData) -> None:
        """Replace the caches by those of `other`, a branch with the same tokens whose caches hold
        more of them. The slots are shared."""
        for kv_caches in self._kv_caches.values():
            for kv_cache in kv_caches:
                kv_cache.release()
        self._kv_caches = {
            runner: [kv_cache.fork() for kv_cache in kv_caches]
            for runner, kv_caches in other._kv_caches.items()
        }
        self.draft_states = {name: one.fork() for name, one in other.draft_states.items()}

    def append(self, token: int) -> None:
        """Append a token to a branch without emitting it."""
        self.tokens.append(token)
        self.sampler.advance(token)

    def release(self) -> None:
        """Free the cache of this sequence and of its branches."""
        for child in list(self._children):
            child.release()
        for kv_caches in self._kv_caches.values():
            for kv_cache in kv_caches:
                kv_cache.release()
        self._kv_caches.clear()
        for states in self.draft_states.values():
            states.reset()
        if self.parent is not None and self in self.parent._children:
            self.parent._children.remove(self)

    def kv_caches(self, runner: str | None = None) -> list[SequenceCache]:
        """Every open sequence cache (of `runner`), branches included."""
        own = [
            kv_cache
            for name, kv_caches in self._kv_caches.items()
            if runner in (None, name)
            for kv_cache in kv_caches
        ]
        return own + [kv_cache for child in self._children for kv_cache in child.kv_caches(runner)]

    def align(self, runner: str) -> None:
        """Drop cached positions of `runner` that are not tokens of this sequence (rejected drafts),
        and those of its last tokens, whose rows predict."""
        kv_cache, tokens = self.kv_cache(runner), self.all_tokens
        kv_cache.discard()
        cached = kv_cache.tokens
        if cached != tokens[: len(cached)]:
            num_common = next(
                i for i, token in enumerate(cached) if i >= len(tokens) or token != tokens[i]
            )
            kv_cache.truncate(num_common)
        states = self.draft_states.get(runner)
        num_read = max(0, len(tokens) - (1 if states is None else states.stride))
        if kv_cache.length > num_read:
            kv_cache.truncate(num_read)
        if states is not None:
            states.align(kv_cache)

    def can_draft(self) -> bool:
        """Whether there is memory for drafts, and the target's states are known that the drafters
        read, if they read some."""
        return self.root.drafts_fit and self.knows_draft_states

    @property
    def knows_draft_states(self) -> bool:
        """Whether the target's states are known that the drafters read first."""
        return all(states.can_draft(self.length) for states in self.draft_states.values())

    def is_open(self, runner: str) -> bool:
        return runner in self._kv_caches

    @property
    def root(self) -> SequenceData:
        """The sequence at the root of this tree of branches; itself if it is no branch."""
        return self if self.parent is None else self.parent.root

    def _open_kv_caches(self, runner: str) -> list[SequenceCache]:
        if runner not in self._kv_caches:
            prompts = [self.prompt]
            if runner == TARGET:
                prompts += self.companion_prompts
            opened = [self.open_kv_cache(runner, prompt + self.tokens) for prompt in prompts]
            num_usable = self._num_usable(runner, opened[0].length)
            if num_usable < opened[0].length:
                opened[0].truncate(num_usable)
            self._kv_caches[runner] = opened
        return self._kv_caches[runner]

    def _num_usable(self, runner: str, num_cached: int) -> int:
        """The number of the first cached positions that a new cache of `runner` uses. The target
        computes again what a drafter reads first behind the positions that its own cache has: where
        the text depends on the drafts, all of it, else up to `MAX_COMPUTED_AGAIN` positions. A
        drafter with more unread ones leaves them out (`DraftStates.skip`).

        Args:
            runner: The model runner.
            num_cached: The number of positions that its prefix cache has.
        """
        states = self.draft_states
        if not states or not (self.always_drafts or self.repeats_drafts):
            return num_cached
        if self.repeats_drafts and self.length > MAX_STATES and runner in (TARGET, *states):
            return 0  # without a cache, a drafter reads the states of the last positions alone
        if runner != TARGET:
            return num_cached
        num_read = min(num_cached, *(self.kv_cache(name).length for name in states))
        if num_cached - num_read > MAX_COMPUTED_AGAIN and not self.repeats_drafts:
            num_read = num_cached
        lag = max(one.lag for one in states.values())
        stride = max(one.stride for one in states.values())
        return max(0, min(num_read - lag, self.length - 1 - stride))  # so that it can draft at once

    def _tokens_from(self, position: int) -> list[int]:
        if position >= len(self.prompt):
            return self.tokens[position - len(self.prompt) :]
        return self.prompt[position:] + self.tokens
