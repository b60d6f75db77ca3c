"""The ASGI application: routes, error handlers, and the admission middleware around them."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route

from anydecode.api.llm import LLM
from anydecode.errors import AnydecodeError
from anydecode.server import metrics
from anydecode.server.adapters import load_adapter, unload_adapter
from anydecode.server.admission import AdmissionMiddleware
from anydecode.server.anthropic.routes import add_anthropic_api
from anydecode.server.batches.routes import add_files_api
from anydecode.server.bodies import JsonRoute
from anydecode.server.chat import chat
from anydecode.server.completions import complete, fill_in
from anydecode.server.embeddings import embed
from anydecode.server.errors import ApiError, api_error, stopped_message
from anydecode.server.field_errors import invalid_body
from anydecode.server.large import MAX_VALUES, json_response
from anydecode.server.logs import log
from anydecode.server.models import ReleaseMiddleware, ServedModels, as_served
from anydecode.server.ollama.routes import add_ollama_api
from anydecode.server.options import unknown_model
from anydecode.server.protocol import (
    MAX_COUNT,
    ChatRequest,
    CompletionRequest,
    ConstraintRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    FillInRequest,
    LoadAdapterRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from anydecode.server.rerank import rerank, score
from anydecode.server.responses.endpoint import ResponsesApi
from anydecode.server.run import Disconnected
from anydecode.server.service import Service
from anydecode.server.settings import Settings
from anydecode.server.telemetry import Telemetry
from anydecode.server.tokens import detokenize, tokenize, tokenizer_info
from anydecode.server.validation import validate
from anydecode.version import __version__

#: The files of the page that are served, by suffix.
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:;"
    " frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
#: The load of a model that is not loaded.
_NO_LOAD = {
    "running": 0,
    "waiting": 0,
    "preemptions": 0,
    "num_tokens": 0,
    "runners": {},
    "fleet": None,
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is invalid; the message gives the reason.",
        401: "The API key is missing or wrong.",
        403: "The host in the Host header is not allowed.",
        404: "The model or the stored response does not exist.",
        413: "The body is too large.",
        429: "Too many requests are running; retry after the seconds in Retry-After.",
        500: "Internal server error.",
        503: "The server is shutting down, or its engine has stopped.",
    }.items()
}
#: Of operations that can stream.
_STREAM_ERRORS = {**_ERRORS, 200: {"content": {"text/event-stream": {}}}}


def create_app(
    models: LLM | ServedModels,
    settings: Settings | None = None,
    telemetry: Telemetry | None = None,
) -> AdmissionMiddleware:
    """Build the ASGI application that serves one model or several.

    Args:
        models: The model and its engine, or several models. The caller closes them.
        settings: Limits, API keys and names of a single model; None for the defaults. Several
            models have theirs.
        telemetry: Records one OpenTelemetry span per request, if given.

    Returns:
        The application, wrapped in the admission middleware.
    """
    models = as_served(models, settings)
    app = FastAPI(title="anydecode", version=__version__, openapi_url=None)
    app.router.route_class = JsonRoute
    app.add_middleware(ReleaseMiddleware)
    app.state.models = models
    app.state.responses = ResponsesApi(models)
    _add_generation(app, models)
    _add_texts(app, models)
    _add_model_list(app, models)
    _add_responses(app, app.state.responses)
    app.state.batches = add_files_api(
        app, models, app.state.responses.database, lambda: admission.check_capacity(), _ERRORS
    )
    add_anthropic_api(app, models, _ERRORS)
    add_ollama_api(app, models, _ERRORS)
    _add_metrics(app, models)
    _add_page(app)
    _add_errors(app)
    _describe(app)
    background = (app.state.responses.background, app.state.batches)
    admission = AdmissionMiddleware(
        app, lambda: models.error, models.settings, models.metrics, telemetry, background
    )

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Whether the server accepts requests; if not, the reason."""
        if (error := models.error) is not None:
            return JSONResponse({"status": "stopped", "reason": stopped_message(error)}, 503)
        status = "draining" if admission.draining else "ok"
        return JSONResponse({"status": status}, 503 if admission.draining else 200)

    return admission


def _add_generation(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/chat/completions", responses=_STREAM_ERRORS)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Generate the next message of a conversation."""
        return await chat(await _service(models, body.model, http), body, http)

    @app.post("/v1/completions", responses=_STREAM_ERRORS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Generate the continuation of one prompt or several."""
        return await complete(await _service(models, body.model, http), body, http)

    @app.post("/v1/fim/completions", responses=_STREAM_ERRORS)
    async def fim_completions(body: FillInRequest, http: Request) -> Response:
        """Generate the text between a prompt and a suffix."""
        return await fill_in(await _service(models, body.model, http), body, http)

    @app.post("/v1/constraints/validate", responses=_ERRORS)
    async def validate_constraint(body: ConstraintRequest, http: Request) -> Response:
        """Whether a constraint can be compiled, and the reason if not."""
        return await validate(await _service(models, body.model, http), body, http)


def _add_texts(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/embeddings", responses=_ERRORS)
    async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
        """Compute one embedding per input."""
        return await embed(await _service(models, body.model, http), body, http)

    @app.post("/rerank", responses=_ERRORS)
    @app.post("/v1/rerank", responses=_ERRORS)
    @app.post("/v2/rerank", responses=_ERRORS)
    async def rerank_documents(body: RerankRequest, http: Request) -> Response:
        """Order documents by their relevance to a query."""
        return await rerank(await _service(models, body.model, http), body, http)

    @app.post("/score", responses=_ERRORS)
    @app.post("/v1/score", responses=_ERRORS)
    async def score_pairs(body: ScoreRequest, http: Request) -> Response:
        """Compute the relevance of pairs of texts."""
        return await score(await _service(models, body.model, http), body, http)

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize_text(body: TokenizeRequest, http: Request) -> Response:
        """The tokens of a prompt, or of a conversation."""
        return await tokenize(await _service(models, body.model, http), body, http)

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize_tokens(body: DetokenizeRequest, http: Request) -> Response:
        """The text of tokens."""
        return await detokenize(await _service(models, body.model, http), body, http)

    @app.get("/tokenizer_info", responses=_ERRORS)
    async def describe_tokenizer(http: Request, model: str | None = None) -> Response:
        """The special tokens and the chat template of a model; without `model`, of the first."""
        return tokenizer_info(await _service(models, model, http))


def _add_model_list(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def list_models() -> Response:
        """List the models and their adapters."""
        entries = _model_list(models)
        return JSONResponse(
            {
                "object": "list",
                "data": entries,
                # Anthropic's fields.
                "first_id": entries[0]["id"],
                "last_id": entries[-1]["id"],
                "has_more": False,
            }
        )

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> Response:
        """Describe a model or an adapter."""
        for entry in _model_list(models):
            if entry["id"] == name:
                return JSONResponse(entry)
        raise unknown_model(name, models.available)

    @app.post("/v1/load_lora_adapter", responses=_ERRORS)
    async def load_lora_adapter(body: LoadAdapterRequest, http: Request) -> Response:
        """Load an adapter from the server's folder of adapters."""
        service = await _service(models, body.model, http)
        return await load_adapter(service, body, models.available)

    @app.post("/v1/unload_lora_adapter", responses=_ERRORS)
    async def unload_lora_adapter(body: UnloadAdapterRequest, http: Request) -> Response:
        """Unload an adapter."""
        is_known = body.lora_name in models.available
        service = await _service(models, body.lora_name if is_known else None, http)
        return await unload_adapter(service, body)


async def _service(models: ServedModels, name: str | None, http: Request) -> Service:
    """The service of the model that a request names, for as long as the request runs."""
    return await models.use(name, http.scope["state"])


def _add_responses(app: FastAPI, api: ResponsesApi) -> None:
    path = "/v1/responses/{response_id}"

    @app.post("/v1/responses", responses=_STREAM_ERRORS)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        """Generate a response to an input."""
        return await api.create(body, http)

    @app.post("/v1/responses/input_tokens", responses=_ERRORS)
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        """Count the tokens of an input."""
        return await api.count_input(body, http)

    @app.get(path, responses=_STREAM_ERRORS)
    async def response(
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=MAX_COUNT)] = None,
    ) -> Response:
        """Return a stored response, or the events of its stream."""
        return await api.retrieve(response_id, http, stream, starting_after)

    @app.delete(path, responses=_ERRORS)
    async def delete_response(response_id: str, http: Request) -> Response:
        """Delete a stored response."""
        return await api.delete(response_id, http)

    @app.post(f"{path}/cancel", responses=_ERRORS)
    async def cancel_response(response_id: str, http: Request) -> Response:
        """Cancel a response that is generated in the background."""
        return await api.cancel(response_id, http)

    @app.get(f"{path}/input_items", responses=_ERRORS)
    async def input_items(
        response_id: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the input items of a stored response."""
        return await api.input_items(response_id, http, limit, order, after)


def _model_list(models: ServedModels) -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "object": "model",
            "created": models.created,
            "owned_by": "anydecode",
            # Anthropic's fields.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(models.created, timezone.utc).isoformat(),
            "max_model_len": None if served.service is None else served.service.llm.max_length,
            "parent": parent,
            "status": {"value": served.status},
        }
        for name, parent, served in models.entries()
    ]


def _add_metrics(app: FastAPI, models: ServedModels) -> None:
    @app.get("/metrics", responses={401: _ERRORS[401]}, response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics in the Prometheus text format."""
        return Response(models.metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    @app.get("/live", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def live(model: str | None = None) -> Response:
        """The current load of a model, for the web page; without `model`, of the first one."""
        served = models.find(model)
        service = served.service
        load = _NO_LOAD if service is None else await asyncio.to_thread(_load, service.llm)
        return JSONResponse({"model": served.model.name, "status": served.status, **load})

    @app.get("/decoders", responses={404: _ERRORS[404], 503: _ERRORS[503]})
    async def list_decoders(http: Request, model: str | None = None) -> Response:
        """The cards of the decoders, those that can run with a model apart from the others, and
        whether it has a chat template, for the web page; without `model`, of the first one."""
        service = await _service(models, model, http)
        content = await asyncio.to_thread(lambda: service.decoder_list)
        return Response(content, media_type="application/json")


def _load(llm: LLM) -> dict[str, Any]:
    """The current load of an engine, and of the workers that compute for it, if any."""
    engine = llm.engine
    runners = {
        name: {
            "capacity": runner.pool.num_slots,
            "used": runner.pool.num_used,
            "shared": runner.prefixes.num_slots,
            "passes": runner.num_passes,
            "rows": runner.num_rows,
        }
        for name, runner in list(engine.runners.items())
    }
    return {
        "running": llm.driver.num_running,
        "waiting": llm.driver.num_waiting,
        "preemptions": engine.num_preemptions,
        "num_tokens": engine.num_tokens,
        "runners": runners,
        "fleet": llm.driver.status(),
    }


def _add_page(app: FastAPI) -> None:
    folder = files("anydecode.server") / "page"
    pages = {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if PurePath(file.name).suffix in _PAGE_TYPES
    }

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # HEAD: Ollama's command
    async def index() -> Response:
        return _page_file(pages, "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        return _page_file(pages, name)


def _page_file(pages: dict[str, bytes], name: str) -> Response:
    if name not in pages:
        raise ApiError(404, f"there is no page {name!r}")
    media_type = _PAGE_TYPES[PurePath(name).suffix]
    return Response(pages[name], media_type=media_type, headers=_PAGE_HEADERS)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(AnydecodeError)
    @app.exception_handler(UnicodeEncodeError)
    @app.exception_handler(RuntimeError)
    async def handle_api_error(http: Request, error: Exception) -> Response:
        api_failure = api_error(error)
        if api_failure.status == 500:
            log.error("a request failed", exc_info=error)
        return _error_response(http, api_failure)

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_parameter(http: Request, error: RequestValidationError) -> Response:
        # Of a parameter in the address, behind its place ("query"); `JsonRoute` reads bodies.
        errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
        return _error_response(http, invalid_body(errors))

    @app.exception_handler(HTTPException)
    async def handle_http_exception(http: Request, error: HTTPException) -> Response:
        headers, message = dict(error.headers or {}), str(error.detail)
        operation = f"{http.method} {http.scope['path']}"
        if error.status_code == 404:
            message = f"there is no endpoint {operation}; GET /openapi.json lists all"
        if error.status_code == 405:  # of all routes, while the exception has those of the first
            headers["Allow"] = ", ".join(_allowed_methods(app, http))
            message = f"there is no endpoint {operation}; the path allows {headers['Allow']}"
        api_failure = ApiError(error.status_code, message, headers=headers)
        return _error_response(http, api_failure)

    @app.exception_handler(Disconnected)
    async def handle_disconnect(http: Request, error: Disconnected) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def handle_unexpected(http: Request, error: Exception) -> Response:
        return _error_response(http, api_error(error))


def _describe(app: FastAPI) -> None:
    """Take the status 422 out of the OpenAPI schema, where FastAPI adds it: such requests are
    answered with 400. The schema is built at the first request for it, on another thread."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        document = describe()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = described  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return await json_response(MAX_VALUES + 1, app.openapi)


def _allowed_methods(app: FastAPI, http: Request) -> list[str]:
    """The methods of the first template that has the path of a request."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    path = next(route.path for route in routes if route.matches(http.scope)[0] is not Match.NONE)
    same = (route.methods or () for route in routes if route.path == path)
    return sorted({method for methods in same for method in methods})


def _error_response(http: Request, error: ApiError) -> Response:
    content = error.to_json(http.scope["path"])
    return Response(content, error.status, headers=error.headers, media_type="application/json")
