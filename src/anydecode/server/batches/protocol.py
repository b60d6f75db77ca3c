"""The body of `POST /v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from anydecode.server.protocol import COMPLETION_WINDOW, Body, MetadataKey, MetadataValue, Name


class ExpiresAfter(Body):
    """When a file is removed: so many seconds after it was created."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class BatchRequest(Body):
    """`POST /v1/batches`. The completion window is a number with a unit: s, m, h or d."""

    model_config = ConfigDict(extra="forbid")
    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=COMPLETION_WINDOW)]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
