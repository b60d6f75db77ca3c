"""`anydecode bench depth`: layers, agreement and seconds of methods that run fewer layers for some
tokens, or draft with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        cost: Both together, as a multiple of plain decoding's.
        agreement: The share of the full model's text whose tokens are the method's most probable
            ones, or, of an exact method, that it generates.
        milliseconds: Per token, the median over prompts and repeats, the prompt apart.
        speed: Plain decoding's time over the method's.
    """

    method: str
    layers: float
    heads: float
    cost: float
    agreement: float
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
        mean = sum(sizes) / len(sizes)
        self.sizes = np.array(sizes) / mean
        self.mixers = np.array(mixers) / mean
        self.layers = self.heads = 0.0

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
    llm: LLM, methods: Sequence[str], prompts: Sequence[str], tokens: int, repeats: int
) -> Iterator[DepthResult]:
    """Yield the results of plain decoding, then those of each method.

    Args:
        llm: The model, a transformer.
        methods: Keys with parameters.
        prompts: Texts to answer.
        tokens: Tokens of each answer.
        repeats: How often each answer is timed.

    Raises:
        InvalidRequestError: The model is no transformer.
    """
    if not isinstance(llm.model, Transformer):
        raise InvalidRequestError("bench depth counts the layers of transformers only")
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    texts = [llm.generate(prompt, decoder=PLAIN, **options).tokens for prompt in prompts]
    head, plain = head_cost(llm.model), None
    for method in (PLAIN, *methods):
        entry = lookup(method.partition(":")[0])
        is_exact = entry is not None and entry.card.exactness != "lossy"
        layers = heads = equal = 0.0
        times: list[float] = []
        for prompt, text in zip(prompts, texts, strict=True):
            with counted(llm.model, len(llm.encode(prompt))) as work:
                if is_exact:
                    found = llm.generate(prompt, decoder=method, **options).tokens
                    equal += sum(a == b for a, b in zip(found, text, strict=True))
                else:
                    equal += teacher_forced(llm, method, prompt, text).num_equal
            layers, heads = layers + work.layers, heads + work.heads
            for _ in range(repeats):
                stats = llm.generate(prompt, decoder=method, **options).stats
                spent = stats.seconds - stats.time_to_first_token
                times.append(1000 * spent / max(1, tokens - 1))
        num_tokens = len(prompts) * tokens
        total = num_tokens - len(prompts)  # the first one is that of the prompt
        cost = (layers + head * heads) / total
        plain = plain or (cost, median(times))
        yield DepthResult(
            method,
            layers / total,
            heads / total,
            cost / plain[0],
            equal / num_tokens,
            median(times),
            plain[1] / median(times),
        )


def bench_depth(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder or .gguf file.")
    ] = "smollm2-135m-instruct",
    methods: Annotated[
        str, typer.Option("--methods", help="Methods with parameters, separated by ; or ,.")
    ] = METHODS,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")] = 128,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of prompts.")] = 4,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How often each answer is timed.")
    ] = 3,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Number of threads; 0: all cores.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Layers per token, agreement with the full model, and time of methods that run fewer layers.

    Example: anydecode bench depth --methods "layerskip:layers=8;ffn-skip" --limit 2
    """
    prompts = [one.text for one in spread(limit)]
    with LLM(model, draft="none", threads=threads or None, prefix_cache=False) as llm:
        results = list(measure(llm, split_methods(methods), prompts, tokens, repeats))
        head, num_layers, name = head_cost(llm.model), llm.model.spec.num_layers, llm.model.name
    if as_json:
        print(json.dumps([asdict(one) for one in results]))
        return
    from rich.table import Table

    console = table_console()
    console.print(
        f"{name}, {num_layers} layers, a row of the head costs {head:.1f} layers; {cpu_name()},"
        f" {usable_cores()} cores"
    )
    shown = Table("method", "layers", "heads", "cost", "agreement", "ms/token", "speed", box=None)
    for one in results:
        shown.add_row(
            one.method,
            f"{one.layers:.1f}",
            f"{one.heads:.2f}",
            f"{one.cost:.2f}x",
            f"{one.agreement:.1%}",
            f"{one.milliseconds:.1f}",
            f"{one.speed:.2f}x",
        )
    console.print(shown)
