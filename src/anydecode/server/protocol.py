"""Pydantic models of the request bodies. Fields of `SamplingParams` are accepted too, by name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Fields of OpenAI's API that have no effect at any endpoint that generates, with their neutral
#: values. A field with another value is listed in the response's `anydecode.ignored`.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options.include_obfuscation": (False,),
    "user": (),
}
_MODERATION = "this server does not moderate; call a moderation service yourself"


class StreamOptions(BaseModel):
    """Stream options. `include_usage` adds a last chunk with the token counts."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Options(BaseModel):
    """Fields that all generating endpoints share.

    Attributes:
        model: The served model, or one of its adapters.
        decoder: A key of the catalogue, with parameters as "key:name=value".
        trace: Whether to return the drafted and accepted tokens of every round; "html" returns
            them as a page.
        priority: Smaller values run first, under schedules that use priorities.
        first_finish: Of `n` samples, return this many that finish first.
        segment: Most tokens that this call generates.
        resume: Continue from `anydecode.resume` of an earlier response.
        IGNORED: Fields of OpenAI's API that have no effect, with their neutral values.
        REFUSED: Unsupported fields of OpenAI's API that would change the answer, with their neutral
            values and advice on what to do instead.
    """

    IGNORED: ClassVar[dict[str, tuple[Any, ...]]] = _IGNORED
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: str | None = None
    stream: bool | None = None
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
    trace: bool | Literal["html"] | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)
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
    """A tool. Functions are the only supported type."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Options):
    """`POST /v1/chat/completions`."""

    IGNORED = {**_IGNORED, "prediction": (), "verbosity": ("medium",), "web_search_options": ()}
    REFUSED = {
        "audio": ((), "answers are text"),
        "modalities": ((["text"], []), 'answers are text; leave it out or send ["text"]'),
        "functions": (([],), "send them as tools"),
        "function_call": (("none", "auto"), "use tools and tool_choice"),
        "moderation": ((), _MODERATION),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Options):
    """`POST /v1/completions`. Of `best_of` samples per prompt, the `n` with the highest mean token
    log-probability are returned."""

    REFUSED = {"suffix": (("",), "a completion continues its prompt; leave it out")}
    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Reasoning(BaseModel):
    """Reasoning options. Only `effort` has an effect."""

    model_config = ConfigDict(extra="forbid")
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(Options):
    """`POST /v1/responses`, for text. Nothing is stored between requests."""

    IGNORED = {
        **_IGNORED,
        "access_programs": ({},),
        "context_management": ([],),
        "image": ({},),
        "include": ([],),
        "max_tool_calls": (),
        "parallel_tool_calls": (True, False),  # there are no tools
        "reasoning.context": ("auto",),
        "reasoning.generate_summary": (),
        "reasoning.mode": ("standard",),
        "reasoning.summary": (),
        "text.verbosity": ("medium",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    REFUSED = {
        "previous_response_id": ((), "responses are not stored; send the whole conversation"),
        "background": ((False,), "nothing is stored; wait for the answer, or stream it"),
        "conversation": ((), "conversations are not stored; send the whole of it"),
        "moderation": ((), _MODERATION),
        "prompt": ((), "prompts are not stored; send the text as input"),
        "tools": (([],), "/v1/chat/completions takes tools"),
        "tool_choice": (("none", "auto"), "/v1/chat/completions takes tools"),
    }
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
