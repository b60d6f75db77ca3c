"""State and helpers that the handlers share: the engine, the settings, and the conversion of an
HTTP request into engine requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from anydecode import catalogue
from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.api.text import Detokenizer
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.constraints.tools.stream import Steps, TextStream
from anydecode.errors import InvalidRequestError
from anydecode.server.decoder_cards import decoder_cards
from anydecode.server.events import compact
from anydecode.server.images import ConversationImages
from anydecode.server.logprob_budget import LogprobBudget, max_logprobs
from anydecode.server.metrics import Metrics
from anydecode.server.options import check_choices, check_prompt, ignored_fields
from anydecode.server.parsers import Parser, reasoning_tags, tool_format
from anydecode.server.preparation import LONG_TEXT, Preparation, text_length
from anydecode.server.prompts import template_of
from anydecode.server.protocol import Options, StreamOptions
from anydecode.server.run import ServerRun
from anydecode.server.settings import Settings


class Service:
    """One served model: its engine, settings, metrics and parsers.

    Args:
        llm: The model and its engine.
        settings: The server's settings, with the model's name.
        metrics: The server's metrics.
        can_be_unloaded: Whether the server can unload the model and load it again.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        metrics: Metrics,
        can_be_unloaded: bool = False,
    ) -> None:
        assert llm.tokenizer is not None
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self.settings = settings
        self.can_be_unloaded = can_be_unloaded
        self.metrics = metrics
        self.preparation = Preparation(llm, settings)
        self.logprob_budget = LogprobBudget(settings.max_logprobs)
        self.created = int(time.time())
        self.active: set[ServerRun] = set()  # runs that have started and not ended
        #: Held while a request loads or unloads an adapter, so that none exceeds the limit.
        self.adapter_lock = asyncio.Lock()
        template = self.tokenizer.chat_template
        tool_template = template_of(self.tokenizer, has_tools=True)
        self.tool_format = tool_format(settings.tool_parser, tool_template)
        self._reasoning_tags = reasoning_tags(settings.reasoning_parser, template)
        #: Whether the model may generate the opening reasoning tag itself, as far as the template
        #: shows.
        self.may_open_reasoning = self._reasoning_tags is not None and (
            settings.reasoning_parser != "auto" or self._reasoning_tags[1] in (template or "")
        )

    def warm(self) -> None:
        """Do what the first requests of a kind would wait for: start the processes that prepare
        requests, prepare the tokenizer for constraints, and import all methods."""
        self.preparation.warm()
        catalogue.entries()

    @cached_property
    def decoder_list(self) -> bytes:
        """The answer of `/decoders`, as JSON: the cards of the decoders, and whether the model has
        a chat template."""
        cards = decoder_cards(self.llm)
        return compact({**cards, "chat": self.tokenizer.chat_template is not None}).encode()

    async def run(
        self,
        prompts: list[Any],
        options: dict[str, Any],
        state: dict[str, Any],
        *,
        streamed: bool | None = False,
    ) -> ServerRun:
        """Build a run of `prompts`, not started.

        Args:
            prompts: Texts or token ids.
            options: Options for `LLM.request`; a constraint is one of `Preparation.constraint`.
            state: The `state` of the ASGI scope.
            streamed: Whether the run reports progress after every token.

        Raises:
            InvalidRequestError: If there are too many choices, or several prompts to resume.
            ApiError: If a prompt is longer than the server allows, or takes too long to tokenise;
                or if there are too many log-probabilities.
        """
        resumed = options.get("resume")
        samples = options.get("n", 1) if resumed is None else len(resumed["samples"])
        check_choices(len(prompts) * samples, self.settings)
        if resumed is not None and len(prompts) > 1:
            raise InvalidRequestError("resume needs exactly one prompt")

        prompts = [
            await self.preparation.encode(state, prompt, special=True)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

        for name in ("negative_prompt", "prediction"):
            if (text := options.get(name)) is not None:
                special = name == "negative_prompt"
                tokens = await self.preparation.encode(state, text, special=special)
                options = {**options, name: tokens}
        if options.get("negative_prompt") is not None:
            check_prompt(options["negative_prompt"], self.settings)

        if words := options.get("banned_words"):
            options = {**options, "banned_words": await self.preparation.word_table(state, words)}

        def make_requests() -> list[Request]:
            tokens = [self.llm.encode(prompt) for prompt in prompts]
            for prompt in tokens:
                check_prompt(prompt, self.settings)
            return [self.llm.request(prompt, **options) for prompt in tokens]

        is_long = sum(map(len, prompts)) + text_length(options) > LONG_TEXT
        if options.keys() & {"constraint", "thinking_token_budget"} or is_long:
            requests = await asyncio.to_thread(make_requests)
        else:
            requests = make_requests()
        count = max_logprobs(requests)
        self.logprob_budget.check(count)
        state.setdefault("release", []).append(self.logprob_budget.hold(count))
        return self.build_run(requests, state, bool(streamed))

    def conversation_images(self) -> ConversationImages | None:
        """For the images of a conversation; None if it may have none."""
        encoder = self.llm.image_encoder
        if encoder is None or not self.settings.accepts_images:
            return None
        return ConversationImages(encoder)

    def build_run(
        self, requests: list[Request], state: dict[str, Any], streamed: bool = False
    ) -> ServerRun:
        """Build one run of several engine requests, not started."""
        on_end = partial(self._on_end, state)
        return ServerRun(self.llm, requests, self.active, on_end, streamed)

    def parser(
        self, prompt_end: str, parse: Callable[[TextStream], Steps[None]] | None = None
    ) -> Parser:
        """A parser for the answer to a rendered conversation that ends with `prompt_end`. `parse`:
        parses the tool calls in it."""
        tags = self._reasoning_tags
        call_format = self.tool_format
        if (
            parse is None
            and call_format is not None
            and (call_format.reasoning_opening or call_format.answer_tags)
        ):
            parse = call_format.parse_text
        is_open = tags is not None and prompt_end.rstrip().endswith(tags[0])
        return Parser(tags, parse, is_open)

    def end_of_partial(self, partial_answer: str) -> str | None:
        """The `prompt_end` for the answer that goes on with a non-empty text: whether it goes on
        with reasoning depends on all of that text. None for an empty one."""
        if not partial_answer.strip() or self._reasoning_tags is None:
            return None
        opening, closing = self._reasoning_tags
        is_open = partial_answer.rfind(opening) > partial_answer.rfind(closing)
        return opening if is_open else closing

    def after_reasoning(
        self, constraint: Constraint, prompt_end: str, *, has_tools: bool = False
    ) -> Constraint:
        """`constraint`, applied after the reasoning if the answer to a rendered conversation that
        ends with `prompt_end` starts with reasoning or may do so. `has_tools`: whether it is one of
        tool calls."""
        if self._reasoning_tags is None:
            return constraint
        opening, closing = self._reasoning_tags
        prompt_end = prompt_end.rstrip()
        call_format = self.tool_format
        if call_format is not None and call_format.reasoning_opening:
            final, header = call_format.answer_opening
            if has_tools or prompt_end.endswith((closing, header)):  # tool calls have channels
                return constraint
            return AfterReasoning(constraint, call_format.reasoning_opening, final, False, header)
        is_open = prompt_end.endswith(opening)
        may_open = self.may_open_reasoning and not prompt_end.endswith(closing)
        if is_open or may_open:
            return AfterReasoning(constraint, opening, closing, is_open)
        return constraint

    def head(self, kind: str, prefix: str, model: str | None) -> dict[str, Any]:
        """The fields that every response object starts with; `model` is that of the request."""
        return {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model or self.settings.name,
        }

    def _on_end(self, state: dict[str, Any], run: ServerRun) -> None:
        """Record how a run ended. Counting finished runs is deferred to `state["count"]`."""
        # Without the decoder's parameters, which may be texts of the caller.
        facts: dict[str, Any] = {"decoder": run.requests[0].name.partition(":")[0]}
        state["facts"] = facts
        if not run.done:
            self.metrics.cancelled.inc()
            facts["finish"] = "disconnected"
            self._count_tokens(run, facts, is_complete=False)
            return
        state["count"] = lambda: self._count(run, facts)

    def _count(self, run: ServerRun, facts: dict[str, Any]) -> None:
        """Record a finished run in the metrics and the log. The admission middleware calls it after
        the response has been sent, so that it adds no latency."""
        try:
            generations = run.generations()
        except Exception as error:
            facts["error"] = type(error).__name__  # its text may quote the request
            self._count_tokens(run, facts, is_complete=False)
            return
        self.metrics.record(generations)
        self._count_tokens(run, facts, is_complete=True)
        facts["passes"] = sum(one.stats.passes for one in generations)
        facts["ttft_ms"] = round(1e3 * min(g.stats.time_to_first_token for g in generations), 2)
        facts["finish"] = generations[0].finish_reason

    def _count_tokens(self, run: ServerRun, facts: dict[str, Any], *, is_complete: bool) -> None:
        """Record the tokens of a run in the metrics and the log, counted as in `usage`. Prompts of
        an incomplete run count if a token has been generated: others may not have been computed."""
        num_prompt_tokens = num_tokens = 0
        for request in run.requests:
            generated = sum(len(job.sequence.tokens) for job in request.jobs)
            num_tokens += generated
            num_prompt_tokens += len(request.prompt) if is_complete or generated else 0
        self.metrics.prompt_tokens.inc(num_prompt_tokens)
        self.metrics.generated.inc(num_tokens)
        facts["prompt_tokens"], facts["completion_tokens"] = num_prompt_tokens, num_tokens


def usage(run: ServerRun, parser: Callable[[], Parser] | None = None) -> dict[str, Any]:
    """The `usage` object: counts each prompt once, and the generated tokens of all samples,
    including those that are not part of the answer. With `parser`, which makes a new parser, the
    reasoning tokens are counted too."""
    prompt = generated = cached = reasoning = 0
    for request in run.requests:
        prompt += len(request.prompt)
        cached += min(job.sequence.num_cached_tokens for job in request.jobs)
        for number, job in enumerate(request.jobs):
            generated += len(job.sequence.tokens)
            if parser is not None:
                reasoning += _reasoning_tokens(request, number, parser)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if parser is not None:
        details = {"reasoning_tokens": reasoning}
        if predictions := run.predictions:
            details["accepted_prediction_tokens"] = sum(one.num_accepted for one in predictions)
            details["rejected_prediction_tokens"] = sum(one.num_rejected for one in predictions)
        counts["completion_tokens_details"] = details
    return counts


def chunk_usage(run: ServerRun, options: StreamOptions | None) -> dict[str, Any]:
    """The `usage` of a chunk that is not the last one, as the stream options ask for it: the counts
    so far, null, or no such field."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage(run)}
    return {"usage": None} if options is not None and options.include_usage else {}


def _reasoning_tokens(request: Request, number: int, parser: Callable[[], Parser]) -> int:
    """The number of tokens of a sample up to the end of its reasoning."""
    if all(kind != "reasoning" for kind, _ in parser().push(request.text(number), final=True)):
        return 0
    sample_parser, detokenizer = parser(), Detokenizer(request.resources.tokenizer)
    count = num_pending = 0  # pending: their text may be the start of a tag
    tokens = request.jobs[number].sequence.tokens
    for position, token in enumerate(tokens, 1):
        num_pending += 1
        events = list(sample_parser.push(detokenizer.push(token), final=position == len(tokens)))
        if events:
            count += num_pending if events[0][0] == "reasoning" else 0
            num_pending = 0
    return count


def extension(generations: list[Generation], tokenizer: Any, body: Options) -> dict[str, Any]:
    """The `anydecode` object of a response, beyond OpenAI's fields: the seed that reproduces the
    text, the decoder and its draft models, statistics, and the fields of `body` without effect.
    `generations` are the samples of one request in the order of their index."""
    first = generations[0]
    passes = sum(generation.stats.passes for generation in generations)
    tokens = sum(generation.stats.num_tokens for generation in generations)
    fields: dict[str, Any] = {
        "seed": first.seed,
        "decoder": first.decoder,
        "draft_models": first.draft_models,
        "passes": passes,
        "tokens_per_pass": tokens / passes if passes else 0.0,
        "seconds": max(generation.stats.seconds for generation in generations),
        "time_to_first_token": first.stats.time_to_first_token,
    }
    if first.score is not None:
        fields["scores"] = [generation.score for generation in generations]
    if first.constraint is not None:
        fields["constraint"] = first.constraint
    if first.resume is not None:
        fields["resume"] = first.resume
    if ignored := {*ignored_fields(body, tokenizer.chat_template), *first.ignored}:
        fields["ignored"] = sorted(ignored)
    if body.trace == "html":
        from anydecode.trace.html import page

        fields["trace_html"] = [page(one) for one in generations]
    elif first.trace is not None:
        fields["trace"] = [plain_trace(one.trace or [], tokenizer) for one in generations]
    return fields


def canvas(
    trace: list[dict[str, Any]] | None, num_seen: int, tokenizer: Any
) -> tuple[list[str | None] | None, int]:
    """The canvas after the last pass of `trace`: per position the text of its token, or None for a
    mask. None instead of the list if there are no passes beyond the first `num_seen`, or the last
    has no canvas. Also returns the number of passes."""
    count = len(trace or ())
    if trace is None or count <= num_seen or "canvas" not in trace[count - 1]:
        return None, count
    positions = trace[count - 1]["canvas"]
    return [None if token < 0 else tokenizer.decode([token]) for token in positions], count


def plain_trace(trace: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """A trace as JSON-compatible values, with the text of its tokens added."""
    from anydecode.serialization import to_plain

    entries = []
    for entry in trace:
        plain = to_plain(entry)
        for name in ("drafted", "tokens"):
            if isinstance(plain.get(name), list):
                plain[f"{name}_text"] = [tokenizer.decode([token]) for token in plain[name]]
        entries.append(plain)
    return entries
