"""`anydecode bench depth`: layers, agreement and seconds of methods that run fewer layers for some
tokens, or draft with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.api.llm import LLM
from anydecode.catalogue import lookup
from anydecode.certification.agreement import teacher_forced
from anydecode.decoders.depth.del_ import head_cost
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import OutputSpec, Rows, SkippedParts
from anydecode.kernels.routes import Route
from anydecode.machine import cpu_name, usable_cores
from anydecode.models.transformer import Transformer
from anydecode.report import split_methods, table_console
from anydecode.scoring.sequence import DRAFT
from anydecode.tasks.prompts import spread

METHODS = "multi-step,layerskip,del,specbound,swift,ffn-skip,skipdecode"
PLAIN = "autoregressive"


@dataclass(frozen=True)
class DepthResult:
    """Results of one method.

    Attributes:
        method: Key and parameters.
        layers: Layers per token, as products of their matrices: of all rows behind the prompt,
            drafts and rejected drafts included.
        heads: Rows of the head per token.
        draft: The layers and the head of the draft model per token, as layers of the model.
        drafted: The share of rounds behind the prompt that verify drafts; None if no round does.
        accepted: Accepted drafts over all drafts; None if there are none.
        cost: All of it together, as a multiple of plain decoding's.
        agreement: The share of the full model's text whose tokens are the method's most probable
            ones behind the text before them, with the method's own keys and values; of an exact
            method, `free`; None if the method takes no constraints (CEED). Draft trees are then
            right: their paths may leave elsewhere than in free-running text.
        perplexity: Of the full model's text under the method, as `agreement`: the exponential of
            the mean negative logarithm of the tokens' probabilities.
        free: The share of positions where the text that the method generates has the token of the
            full model's text.
        first: The mean number of tokens before the first other one, of the generated text.
        milliseconds: Per token, the median over prompts and repeats, without the tokens that came
            first and the time before them; with both if all tokens came at once.
        speed: Plain decoding's time over the method's.
    """

    method: str
    layers: float
    heads: float
    draft: float
    drafted: float | None
    accepted: float | None
    cost: float
    agreement: float | None
    perplexity: float | None
    free: float
    first: float
    milliseconds: float
    speed: float


class _Work:
    """Layers and rows of the head that a model runs."""

    def __init__(self, model: Transformer, num_prompt: int) -> None:
        self.model, self.num_prompt = model, num_prompt
        layers = model.network.weights.layers
        sizes = [sum(w.out_features * w.in_features for w in one.matrices) for one in layers]
        linears = [(one.query, one.key, one.value, one.output) for one in layers]
        mixers = [
            sum(w.weight.out_features * w.weight.in_features for w in one if w is not None)
            for one in linears
        ]
        self.mean = mean = sum(sizes) / len(sizes)
        self.sizes = np.array(sizes) / mean
        self.mixers = np.array(mixers) / mean
        self.layers = self.heads = 0.0
        self.head = head_cost(model)

    def add(self, rows: Rows, output_spec: OutputSpec) -> None:
        """Count the rows of a pass that are not of the prompt."""
        for row in range(len(rows)):
            start, stop = int(rows.start[row]), int(rows.stop[row])
            if rows.positions[row] < self.num_prompt:
                continue
            number = -1 if rows.variant is None else int(rows.variant[row])
            variant = rows.variants[number] if number >= 0 else None
            if isinstance(variant, Route):
                assert rows.guides is not None
                guide, depth = rows.guides[row], len(self.sizes)
                mlps = (self.sizes - self.mixers).sum() * guide.num_mlps
                self.layers += (self.mixers.sum() * guide.num_mixers + mlps) / depth
                continue
            self.layers += self.sizes[start:stop].sum()
            if isinstance(variant, SkippedParts):
                self.layers -= self.mixers[list(variant.mixers)].sum()
                self.layers -= (self.sizes - self.mixers)[list(variant.mlps)].sum()
        is_route = [isinstance(one, Route) for one in rows.variants]
        for row in output_spec.logits.tolist():
            number = -1 if rows.variant is None else int(rows.variant[row])
            if rows.positions[row] >= self.num_prompt:  # routes call the head themselves
                self.heads += number < 0 or not is_route[number]

    @property
    def total(self) -> float:
        """Layers and rows of the head, in layers."""
        return self.layers + self.head * self.heads


@contextmanager
def counted(model: Any, num_prompt: int) -> Iterator[_Work]:
    """The work of the model within it, but for the first `num_prompt` positions."""
    work, run, head = _Work(model, num_prompt), model.run, model.head
    is_inside = False  # a pass with variants is run in parts, which are passes too

    def counting_run(rows: Rows, cache: Any, output_spec: OutputSpec) -> Any:
        nonlocal is_inside
        if is_inside:
            return run(rows, cache, output_spec)
        is_inside = True
        try:
            output = run(rows, cache, output_spec)
        finally:
            is_inside = False
        work.add(rows, output_spec)
        work.layers += (output.num_passes - 1) * work.sizes.sum()  # of a multi-step pass
        work.heads += output.num_passes - 1
        return output

    def counting_head(hidden: Any) -> Any:
        work.heads += len(hidden)
        return head(hidden)

    model.run, model.head = counting_run, counting_head
    try:
        yield work
    finally:
        del model.run, model.head


def measure(
    llm: LLM,
    methods: Sequence[str],
    prompts: Sequence[str | list[int]],
    tokens: int,
    repeats: int,
) -> Iterator[DepthResult]:
    """Yield the results of plain decoding, then those of each method.

    Args:
        llm: The model, a transformer.
        methods: Keys with parameters.
        prompts: Texts or tokens to answer.
        tokens: Tokens of each answer.
        repeats: How often each answer is timed.

    Raises:
        InvalidRequestError: The model is no transformer.
    """
    if not isinstance(llm.model, Transformer):
        raise InvalidRequestError("bench depth counts the layers of transformers only")
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    texts = [llm.generate(prompt, decoder=PLAIN, **options).tokens for prompt in prompts]
    drafter, plain = _draft_model(llm), None
    exact_nats: float | None = None  # of the texts under the full model
    for method in (PLAIN, *methods):
        entry = lookup(method.partition(":")[0])
        is_exact = entry is not None and entry.card.exactness != "lossy"
        can_force = entry is None or "constraints" in entry.card.works_with
        layers = heads = drafts = cost = equal = nats = free = first = 0.0
        num_rounds = num_drafting = num_drafts = num_accepted = 0
        times: list[float] = []
        for prompt, text in zip(prompts, texts, strict=True):
            num_prompt = len(llm.encode(prompt) if isinstance(prompt, str) else prompt)
            with ExitStack() as stack:
                work = stack.enter_context(counted(llm.model, num_prompt))
                by_draft = None
                if drafter is not None:
                    by_draft = stack.enter_context(counted(drafter, num_prompt))
                generation = llm.generate(prompt, decoder=method, trace=True, **options)
            found = generation.tokens
            # The first round is that of the prompt.
            rounds = [one for one in generation.trace or () if one["tokens"]][1:]
            for one in rounds:
                num_drafting += bool(one.get("drafted"))
                num_drafts += len(one.get("drafted", ()))
                num_accepted += len(one.get("accepted", ()))
            num_rounds += len(rounds)
            is_same = [a == b for a, b in zip(found, text, strict=True)]
            free, first = free + sum(is_same), first + (*is_same, False).index(False)
            if is_exact:
                equal += sum(is_same)
            if not is_exact and can_force or exact_nats is None:
                forced = teacher_forced(llm, method, prompt, text)
                nats += forced.nats
                equal += 0 if is_exact else forced.num_equal
            layers, heads = layers + work.layers, heads + work.heads
            cost += work.total
            if by_draft is not None:
                drafts += by_draft.total * by_draft.mean / work.mean
            for _ in range(repeats):
                stats = llm.generate(prompt, decoder=method, **options).stats
                num_timed, spent = stats.num_later_tokens, stats.seconds - stats.time_to_first_token
                if num_timed < 1:
                    num_timed, spent = tokens, stats.seconds
                times.append(1000 * spent / num_timed)
        num_tokens = len(prompts) * tokens
        total = num_tokens - len(prompts)  # the first one is that of the prompt
        cost = (cost + drafts) / total
        plain = plain or (cost, median(times))
        exact_nats = nats if exact_nats is None else exact_nats
        nats = exact_nats if is_exact else nats
        yield DepthResult(
            method,
            layers / total,
            heads / total,
            drafts / total,
            num_drafting / num_rounds if num_drafting else None,
            num_accepted / num_drafts if num_drafts else None,
            cost / plain[0],
            equal / num_tokens if is_exact or can_force else None,
            math.exp(nats / num_tokens) if is_exact or can_force else None,
            free / num_tokens,
            first / len(prompts),
            median(times),
            plain[1] / median(times),
        )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _draft_model(llm: LLM) -> Any:
    """The draft model; None if there is none.

    Raises:
        InvalidRequestError: Its layers cannot be counted.
    """
    runner = llm.engine.runners.get(DRAFT)
    if runner is None:
        return None
    if not isinstance(runner.pool.model, Transformer):
        raise InvalidRequestError("bench depth counts the layers of draft models with layers only")
    return runner.pool.model


def bench_depth(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder or .gguf file.")
    ] = "smollm2-135m-instruct",
    methods: Annotated[
        str, typer.Option("--methods", help="Methods with parameters, separated by ; or ,.")
    ] = METHODS,
    draft: Annotated[
        str,
        typer.Option(
            "--draft", help="A draft model or drafter, for methods that need one; none: no one."
        ),
    ] = "none",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")] = 128,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of prompts.")] = 4,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=0, help="First tokens of each prompt, of large models; 0: all."
        ),
    ] = 0,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How often each answer is timed.")
    ] = 3,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Layers per token, agreement with the full model, and time of methods that run fewer layers.
    "drafted" is the share of rounds with drafts, "accepted" that of drafts that are accepted;
    "agreement" and "perplexity" are those of the full model's text, "free" the agreement of the
    generated text, and "first" the tokens of it before another one.

    Example: anydecode bench depth --methods "layerskip:layers=8;ffn-skip" --limit 2
    """
    texts = [one.text for one in spread(limit)]
    with LLM(model, draft=draft, threads=threads or None, prefix_cache=False) as llm:
        prompts = [llm.encode(text)[: prompt_tokens or None] for text in texts]
        results = list(measure(llm, split_methods(methods), prompts, tokens, repeats))
        head, num_layers, name = head_cost(llm.model), llm.model.spec.num_layers, llm.model.name
    if as_json:
        print(json.dumps([asdict(one) for one in results]))
        return
    from rich.table import Column, Table

    console = table_console()
    console.print(
        f"{name}, {num_layers} layers, a row of the head costs {head:.1f} layers; {cpu_name()},"
        f" {usable_cores()} cores"
    )
    names = ["layers", "heads", "draft", "drafted", "accepted", "cost", "agreement", "perplexity"]
    names += ["free", "first", "ms/token", "speed"]
    shown = Table(Column("method", overflow="fold"), *names, box=None)
    for one in results:
        shown.add_row(
            one.method,
            f"{one.layers:.1f}",
            f"{one.heads:.2f}",
            f"{one.draft:.1f}",
            _share(one.drafted),
            _share(one.accepted),
            f"{one.cost:.2f}x",
            _share(one.agreement),
            "-" if one.perplexity is None else f"{one.perplexity:.3f}",
            f"{one.free:.1%}",
            f"{one.first:.0f}",
            f"{one.milliseconds:.1f}",
            f"{one.speed:.2f}x",
        )
    console.print(shown)
