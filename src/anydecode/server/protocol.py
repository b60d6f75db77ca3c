"""Request bodies. Fields of `SamplingParams` are taken as well, by their own names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Fields of OpenAI's API that say nothing about the text and are taken without effect.
WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention",
    }
)  # fmt: skip


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk that counts the tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Options(BaseModel):
    """What all ways of generating share.

    `decoder` is a key of the catalogue, with parameters as "key:name=value". `trace` asks for what
    was drafted and accepted, round by round; "html" for the same as a page. An adapter is chosen
    through `model`. Smaller `priority` goes first under schedules that look at it. Of `n` samples
    the `first_finish` that end first are the answer. `segment` is the most tokens this call says;
    `resume` goes on from what an earlier answer's `anydecode.resume` holds.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    decoder: str | None = None
    trace: bool | Literal["html"] = False
    priority: int = Field(default=0, ge=-1000, le=1000)
    first_finish: int | None = Field(default=None, ge=1)
    segment: int | None = Field(default=None, ge=1)
    resume: dict[str, Any] | None = None


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(BaseModel):
    """A function that the model may call; `parameters` is a JSON Schema of its arguments."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Options):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Options):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    response_format: dict[str, Any] | None = None


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ResponsesRequest(Options):
    """`POST /v1/responses`, for text. Nothing is stored between requests."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
