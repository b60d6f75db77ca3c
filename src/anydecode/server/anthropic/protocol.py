"""Pydantic models of the bodies of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from anydecode.server.protocol import (
    MAX_ITEMS,
    Body,
    Count,
    FunctionName,
    Name,
    Objects,
    Options,
    Strings,
)


class Closed(Body):
    """Base of objects without other fields. An error names one of them, however many there are."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        names = {field.alias or name for name, field in cls.model_fields.items()}
        for name in value if isinstance(value, dict) else ():
            if name not in names:
                raise ValueError(f"unknown field {name}; it has {', '.join(sorted(names))}")
        return value


class MessagesMessage(Closed):
    """One turn: a text or content blocks, whose types `anthropic.prompts` checks."""

    role: Literal["system", "user", "assistant"]
    content: str | Objects


class MessagesTool(Body):
    """A tool of the client's. `anthropic.prompts` checks the other fields."""

    model_config = ConfigDict(extra="allow")
    name: FunctionName
    type: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Closed):
    """Whether tools are called: as the model likes, at least one, this one, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Closed):
    """Whether the model reasons before it answers. `display`: whether the reasoning is returned."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Closed):
    """The JSON Schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Closed):
    """The reasoning effort, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Options):
    """`POST /v1/messages/count_tokens`."""

    IGNORED = {
        "cache_control": (),
        "context_management": ({},),
        "diagnostics": ({},),
        "inference_geo": (),
        "logprobs": (),
        "metadata": ({},),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": (),
    }
    REFUSED = {
        "container": ((), "nothing is run here; leave it out"),
        "mcp_servers": (([],), "the server connects to no other; send tools"),
        "thread": ((), "no conversation is kept; send all of its messages"),
    }
    messages: Annotated[
        list[MessagesMessage], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)
    ]
    system: str | Objects | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Strings | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Count
