"""The handlers of the endpoints under `/v1/responses`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any, Literal

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.server.chat_run import render_tokens, start_chat
from anydecode.server.database import Database
from anydecode.server.errors import ApiError
from anydecode.server.events import EventStream
from anydecode.server.large import json_response
from anydecode.server.logprob_budget import max_logprobs
from anydecode.server.models import ServedModels
from anydecode.server.protocol import ResponsesRequest
from anydecode.server.responses.background import BackgroundRuns
from anydecode.server.responses.items import complete_items, is_reference
from anydecode.server.responses.request import (
    chat_request,
    echo,
    num_logprobs,
    renamed,
    truncate,
)
from anydecode.server.responses.run import ResponseRun, Storage, last_event
from anydecode.server.responses.store import RUNNING, Item, ResponseStore

_NONE = "this server stores no responses (--store none)"


class ResponsesApi:
    """The endpoints under `/v1/responses`, with the stored responses and those that are generated
    in the background.

    Raises:
        InvalidRequestError: The file of the store cannot be used.
    """

    def __init__(self, models: ServedModels) -> None:
        settings = models.settings
        self.models = models
        self.settings = settings
        self.background = BackgroundRuns(settings.max_background)
        #: The database of the store; None if nothing is stored.
        self.database: Database | None = None
        self.store: ResponseStore | None = None
        if settings.store != "none":
            self.database = Database(settings.store)
            self.store = ResponseStore(self.database, settings.store_bytes, settings.store_seconds)

    async def drain(self, seconds: float | None = None) -> None:
        """Wait for the responses in the background; those that still run after `seconds`, by
        default the `drain_seconds` of the settings, fail."""
        await self.background.drain(self.settings.drain_seconds if seconds is None else seconds)

    async def close(self) -> None:
        """End what still runs in the background, and close the database."""
        await self.background.drain(0)
        if self.database is not None:
            await asyncio.to_thread(self.database.close)

    async def create(self, body: ResponsesRequest, http: HttpRequest) -> Response:
        """Generate a response to an input: as one object, as a stream, or in the background."""
        state = http.scope["state"]
        if body.background:
            # The run is recorded when it ends, not with this request.
            state = {**state, "release": state.setdefault("release", [])}
            self._check_background(body)
        try:
            run = await self._prepare(body, state)
        except ApiError as error:
            raise renamed(error) from None
        if body.background:
            return await self._run_in_background(run, state)
        server_run = run.chat_run.run
        if body.stream:
            return EventStream(server_run, run.events(), self.settings.stall_seconds)
        async with server_run:
            [generation] = await server_run.wait_for_generations(http.receive)
            response = await run.response(generation)
            return await json_response(server_run.num_values, lambda: response)

    async def retrieve(
        self, identity: str, http: HttpRequest, stream: bool, starting_after: int | None
    ) -> Response:
        """A stored response; or the events of its stream after number `starting_after`."""
        tenant = http.scope["state"]["namespace"]
        run = self.background.get(tenant, identity)
        if not stream:
            if run is not None:
                return JSONResponse(run.response())
            return JSONResponse(await self._stored(tenant, identity))
        start = 0 if starting_after is None else starting_after + 1
        if run is not None:
            events = run.follow(start)
        else:
            response = await self._stored(tenant, identity)
            if not response["background"]:
                message = "only responses created with background: true can be streamed again"
                raise ApiError(400, message, param="stream")
            assert self.store is not None
            kept = await self.store.events(tenant, identity)
            # Of a response whose process was killed, only the result is known.
            events = _replay(kept[start:] if kept else [last_event(response, start)])
        return EventStream(nullcontext(), events, self.settings.stall_seconds)

    async def delete(self, identity: str, http: HttpRequest) -> Response:
        """Remove a stored response; one that is being generated is cancelled."""
        tenant = http.scope["state"]["namespace"]
        if (run := self.background.get(tenant, identity)) is not None:
            await run.stop()
        if self.store is None or not await self.store.delete(tenant, identity):
            raise _not_found(identity)
        return JSONResponse({"id": identity, "object": "response", "deleted": True})

    async def cancel(self, identity: str, http: HttpRequest) -> Response:
        """Cancel a response that is generated in the background; one that has ended stays."""
        tenant = http.scope["state"]["namespace"]
        if (run := self.background.get(tenant, identity)) is not None:
            await run.stop()
        response = await self._stored(tenant, identity)
        if not response["background"]:
            message = "only responses created with background: true can be cancelled"
            raise ApiError(400, f"{message}; close the connection of others")
        return JSONResponse(response)

    async def input_items(
        self,
        identity: str,
        http: HttpRequest,
        limit: int,
        order: Literal["asc", "desc"],
        after: str | None,
    ) -> Response:
        """The items that a response answers, also those of earlier responses, in pages."""
        tenant = http.scope["state"]["namespace"]
        items = None
        if self.store is not None:
            items = await self.store.input_items(tenant, identity)
        if items is None:
            raise _not_found(identity)
        if order == "desc":
            items = items[::-1]
        start = 0
        if after is not None:
            found = [place for place, item in enumerate(items) if item["id"] == after]
            if not found:
                message = f"after is {after!r}, which is not an input item of this response"
                raise ApiError(400, message, param="after")
            start = found[0] + 1
        page = items[start : start + limit]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": start + limit < len(items),
            }
        )

    async def count_input(self, body: ResponsesRequest, http: HttpRequest) -> Response:
        """The number of tokens of the prompt that a request would have."""
        state = http.scope["state"]
        try:
            chat = chat_request(body, await self._items(body, state["namespace"]))
            service = await self.models.use(body.model, state)
            tokens = await render_tokens(service, chat, state)
        except ApiError as error:
            raise renamed(error) from None
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})

    def _check_background(self, body: ResponsesRequest) -> None:
        """Raise `ApiError` unless a response may be generated in the background."""
        if self.store is None:
            message = f"a response in the background has to be stored; {_NONE}"
            raise ApiError(400, message, code="unsupported_parameter", param="background")
        if body.store is False:
            message = "a response in the background has to be stored; leave store out"
            raise ApiError(400, message, param="store")
        self.background.check_capacity()

    async def _prepare(self, body: ResponsesRequest, state: dict[str, Any]) -> ResponseRun:
        tenant = state["namespace"]
        items = await self._items(body, tenant)
        chat = chat_request(body, items)
        service = await self.models.use(body.model, state)
        if body.truncation == "auto":
            await truncate(service, chat, state)
        chat_run = await start_chat(
            service,
            chat,
            state,
            num_logprobs=num_logprobs(body),
            streamed=bool(body.stream or body.background),
        )
        store = None if body.store is False else self.store
        return ResponseRun(
            service, body, chat_run, echo(body, service.llm), Storage(store, tenant, items)
        )

    async def _items(self, body: ResponsesRequest, tenant: str | None) -> list[Item]:
        """The input items of a request, after the conversation that it continues."""
        earlier: list[Item] = []
        if (identity := body.previous_response_id) is not None:
            if self.store is None:
                message = f"previous_response_id: {_NONE}; send the whole conversation"
                raise ApiError(
                    400, message, code="unsupported_parameter", param="previous_response_id"
                )
            found = await self.store.conversation(tenant, identity)
            if found is None:
                raise _not_found(identity, "previous_response_id")
            response, earlier = found
            if response["status"] in RUNNING:
                message = f"the response {identity!r} has not ended yet; wait for it or cancel it"
                raise ApiError(400, message, param="previous_response_id")
            earlier += response["output"]
        items = complete_items(body.input or [])
        references = [item["id"] for item in items if is_reference(item)]
        if references:
            known = {} if self.store is None else await self.store.items(tenant, references)
            if missing := [identity for identity in references if identity not in known]:
                message = f"there is no stored item {missing[0]!r}; send the item itself"
                raise ApiError(404, message, code="item_not_found", param="input")
            items = [known[item["id"]] if is_reference(item) else item for item in items]
        if not earlier and not items:
            raise ApiError(400, "the input is empty; give a text or a list of items", param="input")
        return [*earlier, *items]

    async def _run_in_background(self, run: ResponseRun, state: dict[str, Any]) -> Response:
        queued = run.snapshot("queued")
        one = self.background.start(run, state)
        count = max_logprobs(run.chat_run.run.requests)
        held = self.models.hold(run.service), run.service.logprob_budget.hold(count)
        one.task.add_done_callback(lambda _: [release() for release in held])
        # The store keeps the order: nothing of the run itself is stored before this.
        try:
            if not await run.storage.put(queued):
                raise ApiError(
                    400,
                    "the request cannot be stored: it is larger than the store; send it with"
                    " background: false",
                    param="background",
                )
        except ApiError:
            run.storage.store = None  # nothing of it is to be stored later
            await one.stop()
            raise
        if run.body.stream:
            stall_seconds = self.settings.stall_seconds
            return EventStream(nullcontext(), one.follow(0), stall_seconds)
        return JSONResponse(queued)

    async def _stored(self, tenant: str | None, identity: str) -> dict[str, Any]:
        response = None
        if self.store is not None:
            response = await self.store.response(tenant, identity)
        if response is None:
            raise _not_found(identity)
        return response


async def _replay(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


def _not_found(identity: str, param: str | None = None) -> ApiError:
    code = "previous_response_not_found" if param else "response_not_found"
    return ApiError(404, f"there is no stored response {identity!r}", code=code, param=param)
