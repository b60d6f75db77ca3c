"""anydecode's decoders in `generate` of `transformers`.

from anydecode.integrations.transformers import generate
model.generate(**inputs, custom_generate=generate, decoder="prompt-lookup")
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.decoders.decoder import Decoder
from anydecode.engine.engine import Job
from anydecode.integrations.transformers_engine import engine_of, refuse
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor

#: Arguments for the model's forward pass that do not change its result, or that `_prompts` checks.
_FORWARD = frozenset(
    {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
)
#: The names of caches that `transformers` prepares.
_CACHES = frozenset({"past_key_values", "cache_params"})
#: Logits processors with a state of their own, which drafted tokens would corrupt.
_STATEFUL = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config of SynthID",
}


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    *,
    decoder: str | Decoder = "auto",
    seed: int | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for `model.generate(..., custom_generate=generate)`.

    `transformers` prepares the prompts, the logits processors and the stopping criteria, and
    anydecode applies them row by row. Greedy decoding with a token-exact decoder gives the text of
    `model.generate(do_sample=False)`, up to rounding in the model. With `do_sample`, the tokens are
    drawn with anydecode's random numbers: one seed gives the same text with every token-exact
    decoder and in every batch.

    Logits processors and stopping criteria must depend on nothing but their row, with its padding,
    and its index: they get a batch of copies of it. `model.generate(streamer=...)` needs a single
    row. `model.generate(assistant_model=...)` is the draft model of the decoder.

    Args:
        model: A causal model of `transformers`, in evaluation mode.
        input_ids: int64 `[batch, length]`, padded on the left.
        logits_processor: As `transformers` prepares it, also with temperature, top-k and the like.
        stopping_criteria: As `transformers` prepares it.
        generation_config: The complete configuration.
        decoder: A catalogue key, "key:name=value", or a `Decoder`.
        seed: Seed of the random numbers, 64 bits. By default torch's generator draws one for each
            prompt, so that `transformers.set_seed` applies.
        streamer: A streamer that has been given the prompt.
        **model_kwargs: Further arguments of the forward pass.

    Returns:
        int64 `[batch, length + new tokens]`, with the padding token after the end of a row; or a
        `GenerateDecoderOnlyOutput` with it, for `return_dict_in_generate`.

    Raises:
        ValueError: An option or argument cannot be applied.
    """
    named = _arguments_of_generate()
    streamer = streamer or named.get("streamer")
    assistant = named.get("assistant_model")
    _check_model(model, model_kwargs, named.get("kwargs", {}))
    _check_options(generation_config)
    _check_processors(logits_processor)
    if streamer is not None and len(input_ids) > 1:
        refuse(f"a streamer follows one row, and the batch has {len(input_ids)}")
    prompts = _prompts(input_ids, model_kwargs)
    with engine_of(model, assistant) as llm:
        _check_decoder(llm, decoder, assistant)
        stop = _StopRules.of(stopping_criteria, llm.model.spec.vocab_size)
        requests = _requests(
            llm,
            prompts,
            input_ids,
            logits_processor,
            decoder=decoder,
            max_tokens=_token_limit(llm, stop, prompts, input_ids.shape[1]),
            temperature=1.0 if generation_config.do_sample else 0.0,
            stop_tokens=sorted(stop.tokens),
            n=generation_config.num_return_sequences or 1,
            seed=seed,
        )
        jobs = [job for request in requests for job in request.jobs]
        rows = [
            _Row(job, input_ids, index, stop.criteria, streamer) for index, job in enumerate(jobs)
        ]
        _run(llm, requests, rows)
    if streamer is not None:
        streamer.end()
    sequences = _padded(input_ids, [row.tokens for row in rows], generation_config, stop.tokens)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


class RowProcessors(LogitsProcessor):
    """Logits processors of `transformers` on one row of a batch.

    A processor may have parameters of its own for each row. It is called with a batch of copies of
    the row, unless it is known to treat all rows alike.

    Args:
        processors: The processors in their order.
        prompts: int64 `[batch, length]`, with their padding.
        index: The row.
        tokens: The tokens generated so far.
    """

    is_stateful = True

    def __init__(
        self,
        processors: LogitsProcessorList,
        prompts: torch.Tensor,
        index: int,
        tokens: list[int] | None = None,
    ) -> None:
        self.processors = processors
        self.prompts = prompts
        self.index = index
        self.tokens = tokens or []

    def apply(self, candidates: Candidates) -> Candidates:
        row = self.prompts[self.index]
        ids = torch.cat((row, row.new_tensor(self.tokens)))[None]
        scores = torch.from_numpy(candidates.scores.copy()).to(ids.device)[None]
        for processor in self.processors:
            if len(self.prompts) == 1 or _treats_rows_alike(processor):
                scores = processor(ids, scores)
            else:
                copies = (len(self.prompts), 1)
                scores = processor(ids.repeat(copies), scores.repeat(copies))
                scores = scores[self.index : self.index + 1]
        result: np.ndarray = scores[0].float().cpu().numpy()
        return Candidates(candidates.tokens, result, owned=True)

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    def fork(self) -> RowProcessors:
        return RowProcessors(self.processors, self.prompts, self.index, list(self.tokens))


def _treats_rows_alike(processor: Any) -> bool:
    is_known = type(processor).__module__ == LogitsProcessorList.__module__
    return is_known and not isinstance(
        processor, RepetitionPenaltyLogitsProcessor | PrefixConstrainedLogitsProcessor
    )


@dataclass(frozen=True)
class _StopRules:
    """Stopping criteria: the maximum length, the end-of-text tokens, and all others."""

    max_length: int
    tokens: frozenset[int]
    criteria: StoppingCriteriaList

    @classmethod
    def of(cls, stopping_criteria: StoppingCriteriaList, vocab_size: int) -> _StopRules:
        lengths: list[int] = []
        tokens: set[int] = set()
        others = StoppingCriteriaList()
        for criterion in stopping_criteria:
            if type(criterion) is MaxLengthCriteria:
                lengths.append(criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                tokens.update(criterion.eos_token_id.tolist())
            else:
                others.append(criterion)
        known = frozenset(token for token in tokens if 0 <= token < vocab_size)
        return cls(min(lengths), known, others)


class _Row:
    """Follows one row: its new tokens go to the streamer, then to the stopping criteria, which get
    a batch of copies of the row."""

    def __init__(
        self,
        job: Job,
        prompts: torch.Tensor,
        index: int,
        criteria: StoppingCriteriaList,
        streamer: Any,
    ) -> None:
        self.job = job
        self.prompts = prompts
        self.index = index
        self.criteria = criteria
        self.streamer = streamer
        self.tokens: list[int] = []
        self.is_stopped = False

    def follow(self) -> None:
        """Take the tokens that have been generated since the last call, up to the first at which a
        criterion stops."""
        for token in self.job.sequence.tokens[len(self.tokens) :]:
            if self.is_stopped:
                return
            self.tokens.append(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.criteria:
                row = self.prompts[self.index]
                ids = torch.cat((row, row.new_tensor(self.tokens))).repeat(len(self.prompts), 1)
                self.is_stopped = bool(self.criteria(ids, None)[self.index])


def _token_limit(llm: LLM, stop: _StopRules, prompts: list[list[int]], width: int) -> int:
    """Maximum number of new tokens for prompts that are padded to `width` tokens."""
    limit = stop.max_length - width
    longest = max(map(len, prompts)) + limit
    if longest > llm.max_length:
        refuse(
            f"prompt and new tokens come to {longest}, and the model's context has"
            f" {llm.max_length}: lower max_new_tokens"
        )
    if stop.criteria and not stop.tokens and len(prompts) > 1:
        refuse("stopping criteria of a batch need an eos_token_id")
    return limit


def _requests(
    llm: LLM,
    prompts: list[list[int]],
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    *,
    n: int,
    seed: int | None,
    **options: Any,
) -> list[Request]:
    """One request for each `n` rows, which have the same prompt."""
    requests = []
    for first in range(0, len(prompts), n):
        request = llm.request(
            prompts[first],
            logits_processors=[RowProcessors(processors, input_ids, first)] if processors else [],
            ignore_eos=True,  # the end-of-text tokens are among the stop tokens
            n=n,
            seed=int(torch.randint(1 << 62, ())) if seed is None else seed,
            **options,
        )
        for index, job in enumerate(request.jobs):
            for processor in job.sequence.sampler.pre_temperature:
                if isinstance(processor, RowProcessors):
                    processor.index = first + index
        requests.append(request)
    return requests


def _run(llm: LLM, requests: list[Request], rows: list[_Row]) -> None:
    """Run the requests to their ends."""

    def is_done() -> bool:
        for row in rows:
            row.follow()
            if row.is_stopped:
                llm.driver.cancel(row.job)
        return all(row.job.done for row in rows)

    for request in requests:
        llm.start(request, background=False)
    try:
        llm.driver.advance(is_done)
    except BaseException:
        for request in requests:
            llm.abandon(request)
        raise
    for request in requests:
        request.generation()  # raises the error that ended the request, if any


def _padded(
    input_ids: torch.Tensor, rows: list[list[int]], config: Any, stop_tokens: frozenset[int]
) -> torch.Tensor:
    """The prompts with their new tokens, padded on the right."""
    width = max(map(len, rows))
    padding = config.pad_token_id
    if padding is None:  # as in transformers: the first end-of-text token
        eos = config.eos_token_id
        padding = eos[0] if isinstance(eos, list) else min(stop_tokens, default=0)
    new = [[*tokens, *[padding] * (width - len(tokens))] for tokens in rows]
    return torch.cat((input_ids, input_ids.new_tensor(new).reshape(len(rows), width)), dim=1)


def _prompts(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each row without the padding on its left."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape:
        refuse(f"attention_mask has the shape {list(mask.shape)}, not that of input_ids")
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        refuse("attention_mask masks tokens after the first: pad on the left")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = mask.cumsum(1) - 1
        is_usual = positions.shape[-1] == mask.shape[1] and positions.ndim == 2
        if not is_usual or bool(((positions.to(mask.device) != expected) & (mask > 0)).any()):
            refuse("position_ids do not count the tokens of each row from 0: leave them out")
    return [ids[kept > 0].tolist() for ids, kept in zip(input_ids, mask, strict=True)]


def _check_model(model: Any, model_kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that the model is supported, and that it gets no input but tokens; `given` are the
    caller's arguments."""
    if model.config.is_encoder_decoder:
        refuse(f"{type(model).__name__} is an encoder-decoder model; decoders need a causal one")
    if model.training:
        refuse("the model is in training mode, where its results are random: call model.eval()")
    for name, value in model_kwargs.items():
        if name not in _FORWARD | _CACHES and value is not None and value is not False:
            refuse(f"the argument {name} cannot be passed to the model")
    for name in _CACHES:
        if given.get(name) is not None:
            refuse(f"{name} would not be used or filled, as anydecode has its own: leave it out")


def _check_options(config: Any) -> None:
    """Check that the generation mode and the outputs are supported."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        refuse(
            f"the options ask for {mode.value.replace('_', ' ')} by transformers: leave them out,"
            " and name a decoder (decoder='beam:width=4', say)"
        )
    if config.cache_implementation == "quantized":
        refuse("cache_implementation='quantized' cannot be applied: leave it out")
    if config.return_dict_in_generate:
        names = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        for name in names:
            if getattr(config, name, False):
                refuse(f"{name} is not available: leave it out")


def _check_decoder(llm: LLM, decoder: str | Decoder, assistant: Any) -> None:
    """Check that the method is a decoder, and that it uses the assistant model if there is one."""
    method = llm.methods.find(decoder)
    if not isinstance(method, Decoder):
        refuse(
            f"{decoder!r} is no decoder: samplers are options of transformers, and constraints need"
            " LLM(model, tokenizer=...)"
        )
    needs_draft = "draft" in method.requirements.runners
    if needs_draft and assistant is None:
        refuse(f"decoder {decoder!r} needs an assistant_model")
    if assistant is not None and not needs_draft:
        refuse(f"decoder {decoder!r} uses no assistant_model")


def _check_processors(processors: LogitsProcessorList) -> None:
    """Check that no logits processor keeps a state."""
    for processor in processors:
        option = _STATEFUL.get(type(processor))
        if option is not None:
            refuse(f"{option} cannot be applied: its logits processor keeps a state")


def _arguments_of_generate() -> Mapping[str, Any]:
    """The local variables of the `GenerationMixin.generate` that called.

    It passes a callable neither the streamer (which it has given the prompt) nor the assistant
    model.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals
