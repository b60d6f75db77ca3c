"""The endpoints `/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.errors import InvalidRequestError
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.server.chat_run import render
from anydecode.server.errors import ApiError
from anydecode.server.large import json_response
from anydecode.server.options import adapter_of
from anydecode.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from anydecode.server.service import Service


async def tokenize(service: Service, body: TokenizeRequest, http: HttpRequest) -> Response:
    """The tokens of a prompt, or of a conversation."""
    adapter_of(body.model, service.llm, service.settings)  # refuses other models
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    state = http.scope["state"]
    special = body.add_special_tokens
    if body.prompt is not None:
        text, special = body.prompt, special is not False
    else:
        assert body.messages is not None
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        text = await render(service, chat, state)
    tokens = await service.preparation.encode(state, text, special=bool(special))

    def answer() -> dict[str, Any]:
        names = None
        if body.return_token_strs:
            names = [service.tokenizer.token_text(token) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": service.llm.max_length,
            "tokens": tokens,
            "token_strs": names,
        }

    return await json_response(len(tokens), answer)


async def detokenize(service: Service, body: DetokenizeRequest, http: HttpRequest) -> Response:
    """The text of tokens, special tokens included."""
    adapter_of(body.model, service.llm, service.settings)
    size = service.tokenizer.vocab_size
    if body.tokens and max(body.tokens) >= size:
        raise InvalidRequestError(f"token {max(body.tokens)} is not one of the model's {size}")
    return await json_response(
        len(body.tokens),
        lambda: {"prompt": service.tokenizer.decode(body.tokens, skip_special=False)},
    )


def tokenizer_info(service: Service) -> Response:
    """The tokenizer's class, its special tokens with a role, the context length and the chat
    template."""
    tokenizer = service.tokenizer
    texts = {}
    if tokenizer.bos_id is not None:
        texts["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    if tokenizer.eos_ids:
        texts["eos_token"] = tokenizer.token_text(min(tokenizer.eos_ids))
    if isinstance(tokenizer, HFTokenizer | RwkvTokenizer):
        texts |= tokenizer.special_texts
    if tokenizer.chat_template is not None:
        texts["chat_template"] = tokenizer.chat_template
    return JSONResponse(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": service.llm.max_length,
            **texts,
        }
    )
