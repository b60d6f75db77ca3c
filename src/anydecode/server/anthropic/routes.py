"""The routes of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from anydecode.server.anthropic.messages import PATH, count_tokens, message
from anydecode.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from anydecode.server.models import ServedModels


def add_anthropic_api(app: FastAPI, models: ServedModels, errors: dict[int | str, Any]) -> None:
    """Add the endpoints; `errors` describes their error responses."""

    @app.post(PATH, responses={**errors, 200: {"content": {"text/event-stream": {}}}})
    async def messages(body: MessagesRequest, http: Request) -> Response:
        """Generate the next message of a conversation."""
        return await message(await models.use(body.model, http.scope["state"]), body, http)

    @app.post(f"{PATH}/count_tokens", responses=errors)
    async def messages_count_tokens(body: CountTokensRequest, http: Request) -> Response:
        """Count the tokens of a conversation."""
        service = await models.use(body.model, http.scope["state"])
        return await count_tokens(service, body, http)
