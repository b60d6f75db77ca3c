"""What the handlers share: the engine, the settings, and how a request becomes a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from anydecode.constraints.constraint import Constraint
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.engine.generation import Generation
from anydecode.engine.llm import LLM
from anydecode.engine.request import Request
from anydecode.engine.text import Detokenizer
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.server.metrics import Metrics
from anydecode.server.options import check_choices, check_prompt, ignored
from anydecode.server.parsers import Parser, reasoning_tags, tool_format
from anydecode.server.protocol import Options
from anydecode.server.run import ServerRun
from anydecode.server.settings import Settings

#: Prompts of more characters are tokenised on a thread, so that others' streams go on.
LONG_TEXT = 16384


class Service:
    """One model, served."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        assert llm.tokenizer is not None
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self.settings = settings
        self.metrics = Metrics(llm)
        self.created = int(time.time())
        template = self.tokenizer.chat_template
        self.tool_format = tool_format(settings.tool_parser, template)
        self._reasoning = reasoning_tags(settings.reasoning_parser, template)
        #: Whether the model may open its reasoning itself, as far as is known.
        self._reasons = self._reasoning is not None and (
            settings.reasoning_parser != "auto" or self._reasoning[1] in (template or "")
        )

    async def run(
        self,
        prompts: list[Any],
        options: dict[str, Any],
        state: dict[str, Any],
        *,
        constrain: Callable[[], Any] | None = None,
        streamed: bool | None = False,
    ) -> ServerRun:
        """A run of `prompts` (text or tokens), not started. `constrain` makes the constraint."""
        resumed = options.get("resume")
        samples = options.get("n", 1) if resumed is None else resumed.get("samples")
        if isinstance(samples, list):
            samples = len(samples)
        elif not isinstance(samples, int):
            samples = 1  # refused where the request is made
        check_choices(len(prompts) * samples, self.settings)
        if resumed is not None and len(prompts) > 1:
            raise InvalidRequestError("resume goes on with one prompt")

        def make() -> list[Request]:
            if constrain is not None:
                options["constraint"] = constrain()
            tokens = [self.llm.encode(prompt) for prompt in prompts]
            for prompt in tokens:
                check_prompt(prompt, self.settings)
            return [self.llm.request(prompt, **options) for prompt in tokens]

        long = sum(len(prompt) for prompt in prompts) > LONG_TEXT
        if constrain is not None or long:
            requests = await asyncio.to_thread(make)
        else:
            requests = make()
        return self.joined(requests, state, bool(streamed))

    def joined(
        self, requests: list[Request], state: dict[str, Any], streamed: bool = False
    ) -> ServerRun:
        """One run of several requests to the engine."""
        return ServerRun(self.llm, requests, lambda run: self._ended(run, state), streamed)

    def parser(self, prompt_end: str, tools: bool) -> Parser:
        """The parser of an answer to a conversation whose rendering ends with `prompt_end`."""
        tags = self._reasoning
        thinking = tags is not None and prompt_end.rstrip().endswith(tags[0])
        return Parser(tags, self.tool_format if tools else None, thinking)

    def after_reasoning(self, constraint: Constraint, prompt_end: str) -> Constraint:
        """`constraint` for what follows the reasoning, where the answer to a conversation whose
        rendering ends with `prompt_end` begins with one, or may do so."""
        if self._reasoning is None:
            return constraint
        opening, closing = self._reasoning
        opened = prompt_end.rstrip().endswith(opening)
        may_open = self._reasons and not prompt_end.rstrip().endswith(closing)
        if opened or may_open:
            return AfterReasoning(constraint, opening, closing, opened)
        return constraint

    def head(self, kind: str, prefix: str) -> dict[str, Any]:
        """How every answer begins."""
        return {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.settings.name,
        }

    def _ended(self, run: ServerRun, state: dict[str, Any]) -> None:
        """Count a run that is over, for better or worse."""
        facts: dict[str, Any] = {"decoder": run.requests[0].name}
        state["facts"] = facts
        if not run.done:
            self.metrics.cancelled.inc()
            facts["finish"] = "disconnected"
            return
        state["count"] = lambda: self._count(run, facts)

    def _count(self, run: ServerRun, facts: dict[str, Any]) -> None:
        """What a run came to, for the metrics and the log; the gate calls it behind the answer, for
        which nobody needs it."""
        try:
            generations = run.generations()
        except Exception as error:
            kind = type(error).__name__
            facts["error"] = str(error) if isinstance(error, AnydecodeError) else kind
            return
        self.metrics.record(generations)
        facts["prompt_tokens"] = sum(len(request.prompt) for request in run.requests)
        facts["completion_tokens"] = sum(len(one.tokens) for one in generations)
        facts["passes"] = sum(one.stats.passes for one in generations)
        facts["ttft_ms"] = round(1e3 * min(g.stats.time_to_first_token for g in generations), 2)
        facts["finish"] = generations[0].finish_reason


def usage(run: ServerRun, parser: Callable[[], Parser] | None = None) -> dict[str, Any]:
    """OpenAI's count of tokens: every prompt once, and what all samples generated, also those that
    are not part of the answer. `parser` makes what finds the reasoning in a sample, to count it."""
    prompt = generated = cached = reasoning = 0
    for request in run.requests:
        prompt += len(request.prompt)
        cached += min(job.sequence.num_cached_tokens for job in request.jobs)
        for number, job in enumerate(request.jobs):
            generated += len(job.sequence.tokens)
            if parser is not None:
                reasoning += _reasoning_tokens(request, number, parser)
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if parser is not None:
        counted["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counted


def _reasoning_tokens(request: Request, number: int, parser: Callable[[], Parser]) -> int:
    """How many tokens of a sample stand before the tag that ends its reasoning."""
    if all(kind != "reasoning" for kind, _ in parser().push(request.text(number), final=True)):
        return 0
    reader, detokenizer = parser(), Detokenizer(request.llm.tokenizer)
    count = held = 0  # tokens whose text may yet become a tag belong with what comes next
    tokens = request.jobs[number].sequence.tokens
    for position, token in enumerate(tokens, 1):
        held += 1
        events = list(reader.push(detokenizer.push(token), final=position == len(tokens)))
        if events:
            count += held if events[0][0] == "reasoning" else 0
            held = 0
    return count


def extension(generations: list[Generation], tokenizer: Any, body: Options) -> dict[str, Any]:
    """What we tell beyond OpenAI's fields: the seed that gives the same text again, how the decoder
    fared, and what of `body` had no effect. Samples of one request come in the order of their
    index."""
    first = generations[0]
    passes = sum(generation.stats.passes for generation in generations)
    tokens = sum(generation.stats.num_tokens for generation in generations)
    told: dict[str, Any] = {
        "seed": first.seed,
        "decoder": first.decoder,
        "passes": passes,
        "tokens_per_pass": tokens / passes if passes else 0.0,
        "seconds": max(generation.stats.seconds for generation in generations),
        "time_to_first_token": first.stats.time_to_first_token,
    }
    if first.constraint is not None:
        told["constraint"] = first.constraint
    if first.resume is not None:
        told["resume"] = first.resume
    if names := ignored(body, tokenizer.chat_template):
        told["ignored"] = names
    if body.trace == "html":
        from anydecode.evaluation.trace_html import page

        told["trace_html"] = [page(one) for one in generations]
    elif first.trace is not None:
        told["trace"] = [rounds(one.trace or [], tokenizer) for one in generations]
    return told


def canvas(
    trace: list[dict[str, Any]] | None, seen: int, tokenizer: Any
) -> tuple[list[str | None] | None, int]:
    """The canvas as the last pass of `trace` left it, place by place: a token's text, or None for a
    mask; None altogether where no pass has come behind the first `seen`, or none has a canvas. And
    how many passes there are now."""
    count = len(trace or ())
    if trace is None or count <= seen or "canvas" not in trace[count - 1]:
        return None, count
    positions = trace[count - 1]["canvas"]
    return [None if token < 0 else tokenizer.decode([token]) for token in positions], count


def rounds(trace: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """A trace as plain JSON, with the text of its tokens."""
    from anydecode.cli.output import to_plain

    told = []
    for entry in trace:
        plain = to_plain(entry)
        for name in ("drafted", "tokens"):
            if isinstance(plain.get(name), list):
                plain[f"{name}_text"] = [tokenizer.decode([token]) for token in plain[name]]
        told.append(plain)
    return told
