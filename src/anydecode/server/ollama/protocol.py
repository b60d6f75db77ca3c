"""Pydantic models of the bodies of Ollama's API. As there, unknown fields have no effect; answers
name them in `anydecode.ignored`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from anydecode.server.protocol import (
    MAX_COUNT,
    MAX_ITEMS,
    Alternatives,
    Body,
    Name,
    Options,
    Positive,
    Texts,
    Tokens,
    Tool,
)


class ModelOptions(Options):
    """The `options` of a request: Ollama's by their names there, and those of the engine."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_COUNT)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None


class OllamaBody(Body):
    """Fields of all requests that name a model."""

    model_config = ConfigDict(extra="allow")
    model: Name | None = None
    options: ModelOptions | None = None


class GeneratingBody(OllamaBody):
    """Fields of the requests that generate text."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | Name | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class CalledFunction(Body):
    """A function that the model has called."""

    model_config = ConfigDict(extra="allow")
    name: Name
    arguments: dict[str, Any] | None = None


class Call(Body):
    """A call of a tool in an earlier message."""

    model_config = ConfigDict(extra="allow")
    function: CalledFunction
    id: Name | None = None


class OllamaMessage(Body):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    tool_call_id: Name | None = None
    tool_name: Name | None = None


class OllamaChatRequest(GeneratingBody):
    """`POST /api/chat`. Without messages, nothing is generated."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = (
        None
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None


class GenerateRequest(GeneratingBody):
    """`POST /api/generate`. Without a prompt, nothing is generated."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: Tokens | None = None
    images: Texts | None = None

    @property
    def is_rendered(self) -> bool:
        """Whether the prompt is rendered with the chat template."""
        return not (self.raw or self.suffix)


class EmbedRequest(OllamaBody):
    """`POST /api/embed`."""

    input: str | Texts
    truncate: bool | None = None
    dimensions: Positive | None = None


class EmbeddingsRequest(OllamaBody):
    """`POST /api/embeddings`, the older form for one text."""

    prompt: str


class ShowRequest(OllamaBody):
    """`POST /api/show`. `name` is the older name of `model`."""

    name: Name | None = None
