"""Requests as plain data: what a worker needs to give the text that any engine would give.

A message contains everything that the tokens depend on, the seed included, and nothing of the
process that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydecode.api.request import Request
from anydecode.cluster.media import read_media
from anydecode.constraints.constraint import Constraint
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.languages import Choice, Grammar, Regex
from anydecode.constraints.reasoning import AfterReasoning
from anydecode.constraints.tools.families import TOOL_FORMATS
from anydecode.constraints.tools.tool_calls import ToolCalls
from anydecode.decoders.decoder import Decoder
from anydecode.errors import UnsupportedCombinationError
from anydecode.sampling.banned_words import BannedWordTable
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.scoring.media import Media

#: The options of requests that a fleet does not serve.
REFUSED = ("first_finish", "prompt_logprobs", "segment", "resume", "adapter")


def to_message(request: Request, options: Mapping[str, Any]) -> dict[str, Any]:
    """A request as JSON.

    Args:
        request: The request, whose options have been checked.
        options: The options of `LLM.request` that it was made with, with `Media` in place of
            embeddings.

    Raises:
        UnsupportedCombinationError: An option cannot be sent to another process.
    """
    message: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name in REFUSED:
            raise UnsupportedCombinationError(f"a fleet of workers does not support {name}")
        if name == "namespace" and not isinstance(value, str | int):
            raise UnsupportedCombinationError(
                f"namespace is {value!r}; a fleet of workers needs a text or a number"
            )
        if name == "prompt_embeds":
            message[name] = [one.to_plain() for one in value]
        elif name == "constraint":
            message[name] = _plain_constraint(value)
        else:
            message[name] = _plain(name, value)
    message["seed"] = request.seed
    return message


def from_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `LLM.request` that a message stands for."""
    options = dict(message)
    if isinstance(options.get("constraint"), dict):
        options["constraint"] = _constraint(options["constraint"])
    if "prompt_embeds" in options:
        options["prompt_embeds"] = media_of(message)
    if "logit_bias" in options:
        bias = options["logit_bias"]
        options["logit_bias"] = {int(token): value for token, value in bias.items()}
    return options


def media_of(message: Mapping[str, Any]) -> list[Media]:
    """The images of the prompt of a message."""
    return [read_media(one) for one in message.get("prompt_embeds", ())]


def can_resume(request: Request, decoder: Decoder) -> bool:
    """Whether an answer can go on from its tokens in another process. If not, it starts again, and
    gives the same tokens again."""
    return (
        decoder.exactness == "token-exact"
        and request.constraint is None
        and not request.params.banned_strings
        and not any(
            job.sequence.sampler.learns_from_logits or job.sequence.trace is not None
            for job in request.jobs
        )
    )


def plain_logprobs(logprobs: list[TokenLogprobs | None]) -> list[Any]:
    """Log-probabilities as JSON; floats are exact."""
    return [
        None if one is None else [one.token, one.logprob, [list(pair) for pair in one.top]]
        for one in logprobs
    ]


def read_logprobs(plain: list[Any]) -> list[TokenLogprobs | None]:
    """The log-probabilities that `plain_logprobs` has written."""
    return [
        None if one is None else TokenLogprobs(one[0], one[1], tuple(map(tuple, one[2])))
        for one in plain
    ]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset | np.ndarray | BannedWordTable):
        return [_plain(name, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedCombinationError(
        f"{name} is a {type(value).__name__}, which cannot be sent to the workers of a fleet;"
        " name a method by its key"
    )


def _plain_constraint(constraint: Any) -> Any:
    kind = type(constraint)
    if isinstance(constraint, str):
        return constraint
    fields: dict[str, Any]
    if kind is JsonSchema:
        names: tuple[str, ...] = (
            "whitespace",
            "max_string",
            "extra_properties",
            "finish",
            "tries",
            "close",
            "engine",
        )
        fields = {name: getattr(constraint, name) for name in names}
        fields |= {"schema": constraint.text, "resources": constraint.resources}
    elif kind is Regex:
        fields = {"pattern": constraint.pattern, "engine": constraint.engine}
    elif kind is Grammar:
        fields = {name: getattr(constraint, name) for name in ("text", "syntax", "engine")}
    elif kind is Choice:
        fields = {"options": list(constraint.options), "engine": constraint.engine}
    elif kind is AfterReasoning:
        names = ("opening", "closing", "opened", "header")
        fields = {name: getattr(constraint, name) for name in names}
        fields["constraint"] = _plain_constraint(constraint.constraint)
    elif kind is ToolCalls and (formats := _format_names(constraint)):
        names = ("is_required", "is_parallel", "finish", "tries")
        fields = {name: getattr(constraint, name) for name in names}
        schemas = constraint.schemas.items()
        fields["schemas"] = {name: _plain_constraint(schema) for name, schema in schemas}
        fields["answer"] = constraint.answer and _plain_constraint(constraint.answer)
        fields["call_format"] = formats[0]
    else:
        raise UnsupportedCombinationError(
            f"a constraint that is a {kind.__name__} cannot be sent to the workers of a fleet"
        )
    return {"kind": kind.__name__, **fields}


def _format_names(constraint: ToolCalls) -> list[str]:
    return [name for name, one in TOOL_FORMATS.items() if one == constraint.call_format]


def _constraint(plain: Mapping[str, Any]) -> Constraint:
    fields = dict(plain)
    kind = fields.pop("kind")
    if kind == "JsonSchema":
        return JsonSchema(fields.pop("schema"), **fields)
    if kind == "AfterReasoning":
        return AfterReasoning(_constraint(fields.pop("constraint")), **fields)
    if kind == "ToolCalls":
        schemas: dict[str, Any] = {
            name: _constraint(one) for name, one in fields.pop("schemas").items()
        }
        plain_answer = fields.pop("answer")
        answer: Any = None if plain_answer is None else _constraint(plain_answer)
        call_format = TOOL_FORMATS[fields.pop("call_format")]
        return ToolCalls(schemas, call_format, answer=answer, **fields)
    simple: dict[str, Any] = {"Regex": Regex, "Grammar": Grammar, "Choice": Choice}
    made: Constraint = simple[kind](**fields)
    return made
