"""Log-probabilities in the formats of OpenAI's chat and completion APIs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from anydecode.api.request import RESUMED
from anydecode.api.text import Detokenizer
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.logprobs import TokenLogprobs
from anydecode.scoring.sequence import Sequence
from anydecode.server.errors import ApiError
from anydecode.server.protocol import ChatRequest, CompletionRequest

#: Replaces minus infinity, which JSON cannot represent.
FLOOR = -9999.0


def generated(
    sequence: Sequence, start: int = 0, *, with_stop: bool = False
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that this call generated, which may resume earlier ones, from
    index `start` on; without a stop token at the end unless `with_stop` is set."""
    entries = require_all(sequence.logprobs[sequence.state.get(RESUMED, 0) + start :])
    if entries and not with_stop and sequence.finished and sequence.stops_at(entries[-1].token):
        entries.pop()
    return entries


def require_all(entries: list[TokenLogprobs | None]) -> list[TokenLogprobs]:
    """`entries`; raises `UnsupportedCombinationError` if one is None."""
    result = [entry for entry in entries if entry is not None]
    if len(result) < len(entries):
        raise UnsupportedCombinationError(
            "this decoder does not return log-probabilities; use another decoder or omit logprobs"
        )
    return result


def chat_entries(entries: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The chat format: one entry per token with its text, bytes and most probable alternatives."""
    return [
        {
            **_entry(entry.token, entry.logprob, tokenizer),
            "top_logprobs": [_entry(token, value, tokenizer) for token, value in entry.top],
        }
        for entry in entries
    ]


def check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    """Raises `ApiError` if `prompt_logprobs` is to be streamed: no chunk has a field for it."""
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs cannot be streamed; leave out stream"
        raise ApiError(400, message, param="prompt_logprobs")


def prompt_entries(
    entries: list[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """vLLM's format of the prompt's log-probabilities: per token, None for the first, those of the
    token and its most probable alternatives by token id. A rank is known of these alternatives."""
    return None if entries is None else [_by_token(entry, tokenizer) for entry in entries]


def _by_token(entry: TokenLogprobs | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if entry is None:
        return None
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    values = {entry.token: entry.logprob, **dict(entry.top)}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": ranks.get(token),
            "decoded_token": _text(token, tokenizer),
        }
        for token, value in values.items()
    }


class CompletionLogprobs:
    """The completion format: parallel lists over the tokens, built as they are generated. Text
    offsets count from the start of `echo`, the echoed text of the prompt."""

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = len(echo)

    def for_prompt(self, prompt: list[int], entries: list[TokenLogprobs | None]) -> dict[str, Any]:
        """The lists of the prompt's tokens; the first has no log-probability."""
        detokenizer = Detokenizer(self._tokenizer)
        lengths = [len(detokenizer.push(token)) for token in prompt]
        offset = len(self._echo) - sum(lengths) - len(detokenizer.flush())
        offsets = []
        for length in lengths:  # the text may lack the leading space of the first token
            offsets.append(max(0, offset))
            offset += length
        return self._lists(prompt, entries, offsets)

    def for_tokens(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """The lists of the next generated tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(entry.token))
        return self._lists([entry.token for entry in entries], entries, offsets)

    def _lists(
        self, tokens: list[int], entries: Iterable[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        entries = list(entries)
        return {
            "tokens": [self._display_text(token) for token in tokens],
            "token_logprobs": [
                None if entry is None else _finite(entry.logprob) for entry in entries
            ],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the token itself, by text; of tokens with equal text, the
        first."""
        result: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            result.setdefault(self._display_text(token), _finite(value))
        return result

    def _display_text(self, token: int) -> str:
        """A token's text, or its bytes in OpenAI's notation if they are not valid UTF-8."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": _text(token, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _text(token: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace") if data else tokenizer.token_text(token)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR
