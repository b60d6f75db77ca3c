"""What a request may contain: the prompt and the options, and their checks by name and kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

import numpy as np

from anydecode.api.first_finish import FirstFinish
from anydecode.api.segment_rollout import Segment
from anydecode.arguments import check_kinds, is_list
from anydecode.constraints.constraint import Constraint
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, quoted
from anydecode.sampling.constrained import ConstraintState
from anydecode.sampling.options import SamplingOptions
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.preset import SamplerPreset
from anydecode.scoring.media import Media
from anydecode.scoring.prompt_embeds import PromptEmbeds

#: A text or a list of token ids.
Prompt = str | Seq[int]
#: Dicts with `role` and `content`.
Messages = Seq[Mapping[str, Any]]

#: Default of `temperature`. A sampler that needs a temperature above 0 sets it to 1.
DEFAULT_TEMPERATURE = 0.0

Method = TypeVar("Method", bound=Callable[..., Any])


class GenerateOptions(SamplingOptions, total=False):
    """The options of `LLM.generate`, `stream`, `chat` and their asynchronous forms.

    The sampling options (`max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `n`, `logprobs`,
    ...) are described by `SamplingParams`. The temperature is 0 by default (greedy decoding), or 1
    with a sampler that needs it.

    Attributes:
        decoder: A catalogue key, "key:name=value", or a `Decoder`. Default: `LLM.default_decoder`.
        sampler: One or several sampling presets, named in the same way.
        constraint: A constraint on the text: `JsonSchema`, `Regex`, `Grammar`, `Choice`,
            `Predicate`, a catalogue key, or a constraint state, which is forked.
        adapter: Name of a LoRA adapter (`LLM.add_adapter`), or None.
        trace: Whether to record every decoding round in `Generation.trace`.
        priority: For schedules that use it; smaller numbers come first. Default: 0.
        namespace: Cached prefixes and learned drafts are shared only within a namespace.
        negative_prompt: The second prompt of classifier-free guidance.
        first_finish: Of `n` samples, keep this many that finish first and cancel the others.
        segment: Generate at most this many tokens in this call.
        resume: `Generation.resume` of an earlier call with `segment`, to continue it.
        prompt_embeds: Embeddings that replace some of the prompt's tokens: one block of them or
            several; for a fleet of workers `Media`, which it encodes. The decoder is then
            "autoregressive" by default.
        prediction: The expected answer, as a text or token ids. Decoders that copy drafts from text
            copy them from it too, which takes fewer passes where it is right. The answer is the
            same without it. Other decoders ignore it (`Generation.ignored`).
    """

    decoder: str | Decoder | SamplerPreset | Constraint | None
    sampler: str | SamplerPreset | Seq[str | SamplerPreset]
    constraint: str | Constraint | ConstraintState | None
    adapter: str | None
    trace: bool
    priority: int
    namespace: Hashable
    negative_prompt: Prompt | None
    first_finish: int | FirstFinish | None
    segment: int | Segment | None
    resume: Mapping[str, Any] | None
    prompt_embeds: PromptEmbeds | Seq[PromptEmbeds | Media] | None
    prediction: Prompt | None


#: How options are given, for those who know another engine.
_BY_NAME = "give every option by name, such as generate(prompt, max_tokens=64, temperature=0.8)"


def check_positional(others: Seq[object]) -> None:
    """Raise `InvalidRequestError` if there are arguments behind the prompt, such as the
    `SamplingParams` that vLLM's `generate` takes."""
    if others:
        raise InvalidRequestError(
            f"a {type(others[0]).__name__} stands behind the prompt: {_BY_NAME}"
        )


def check_known(
    names: Iterable[str],
    known: Collection[str],
    others: Collection[str] = (),
    otherwise: str | None = None,
) -> None:
    """Raise `InvalidRequestError` unless all names of options are `known`. It names a similar one
    of these or of `others`; where there is none, it says `otherwise`, or what is known."""
    for name in names:
        if name not in known:
            close = get_close_matches(name, sorted({*known, *others}), 1)
            hint = otherwise or f"known: {', '.join(sorted(known))}"
            if close:
                hint = f"did you mean {close[0]}?"
            raise InvalidRequestError(f"no option is called {name}; {hint}")


def check_names(sampling: Collection[str]) -> None:
    """Raise `InvalidRequestError` unless all names are sampling options."""
    if "sampling_params" in sampling:
        raise InvalidRequestError(f"no option is called sampling_params: {_BY_NAME}")
    check_known(
        sampling,
        SamplingOptions.__optional_keys__,
        GenerateOptions.__optional_keys__,
        "the fields of `SamplingParams` are options, such as temperature=0.8",
    )


def check_options(options: Mapping[str, Any], known: Any) -> None:
    """Raise `InvalidRequestError` unless all options are those of the `TypedDict` `known`, and of
    their kinds."""
    check_known(options, known.__optional_keys__)
    check_kinds(options, known)


def split_prompts(prompt: Prompt | Seq[Prompt]) -> tuple[list[Any], bool]:
    """The prompts in `prompt`, and whether it is a list of prompts rather than one.

    Raises:
        InvalidRequestError: If it is neither of them.
    """
    if isinstance(prompt, str):
        return [prompt], False
    check_prompt("the prompt", prompt)
    tokens = [part for part in prompt if isinstance(part, int | np.integer)]
    others: list[Any] = [part for part in prompt if not isinstance(part, int | np.integer)]
    if tokens and others:
        raise InvalidRequestError(
            f"the prompt contains the token id {tokens[0]} and {others[0]!r}; pass a text, a list"
            " of token ids, or a list of prompts"
        )
    return (others, True) if others else ([prompt], False)


def check_prompt(name: str, value: object) -> None:
    """Raise `InvalidRequestError` unless the prompt called `name` is a text or a list."""
    if not isinstance(value, str) and not is_list(value):
        raise InvalidRequestError(
            f"{name} is {quoted(value)}; it must be a text or a list of token ids"
        )


def sampling_parameters() -> list[inspect.Parameter]:
    """The sampling options as keyword parameters, with their defaults in a request."""
    hints = get_type_hints(SamplingOptions)
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(SamplingParams)
    }
    defaults["temperature"] = DEFAULT_TEMPERATURE
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]
        )
        for name, default in defaults.items()
    ]


def with_parameters(method: Method, keywords: Iterable[inspect.Parameter]) -> Method:
    """Give `method` a signature that lists `keywords` in place of its `**options`, without the
    arguments that it refuses, for `help` and for completion in notebooks."""
    signature = inspect.signature(method)
    own = [
        one
        for one in signature.parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    shown: Any = method
    shown.__signature__ = signature.replace(parameters=[*own, *keywords])
    return method
