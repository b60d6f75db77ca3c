"""The engine around a model of `transformers` that its caller owns: opened once per model, which it
does not keep in memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from anydecode.api.llm import LLM
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.hf import MAX_CACHED, HuggingFaceModel


def refuse(message: str) -> NoReturn:
    """Raise the error for an option or argument of `generate` that cannot be applied."""
    raise UnsupportedCombinationError(f"anydecode in generate: {message}")


class NoTokenizer:
    """Stands in for a tokenizer, which `transformers` does not pass to a callable: the texts of
    tokens are empty, and what reads them is refused."""

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    mask_id: int | None = None
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        refuse("this decoder reads the texts of tokens: use it with LLM(model, tokenizer=...)")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self.vocab_size]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return str(self.vocab_size)

    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return str(self.vocab_size)

    def token_bytes(self, token: int) -> bytes:
        return b""

    def token_text(self, token: int) -> str:
        return f"<{token}>"

    def is_special(self, token: int) -> bool:
        return False


@dataclass(frozen=True)
class _Engine:
    """An engine with its models: the target, then the draft model if there is one."""

    llm: LLM
    models: list[HuggingFaceModel]
    lock: threading.Lock


#: The engines by model, then by assistant model (the model itself for none).
_engines: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, _Engine]] = (
    weakref.WeakKeyDictionary()
)
_lookup = threading.Lock()


@contextmanager
def engine_of(model: Any, assistant: Any) -> Iterator[LLM]:
    """The engine around a model and its assistant model, which it does not keep in memory; for one
    call of `generate` at a time."""
    models = [_borrowed(one) for one in (model, assistant) if one is not None]
    with _lookup:
        engines = _engines.setdefault(model, weakref.WeakKeyDictionary())
        key = model if assistant is None else assistant
        engine = engines.get(key)
        if engine is None or not _is_usable(engine, models):
            llm = LLM(
                models[0],
                tokenizer=NoTokenizer(),
                draft=None if assistant is None else models[1],
                max_running=MAX_CACHED // 2,  # more would drop each other's keys and values
            )
            engine = engines[key] = _Engine(llm, models, threading.Lock())
    with engine.lock:
        for one in engine.models:
            one.clear_cache()  # the weights may have changed since the last call
        yield engine.llm


def _is_usable(engine: _Engine, models: list[HuggingFaceModel]) -> bool:
    """Whether the engine runs, and its models still have the same vocabulary and context."""
    sizes = [
        [(model.spec.vocab_size, model.spec.max_positions) for model in each]
        for each in (engine.models, models)
    ]
    return engine.llm.driver.error is None and sizes[0] == sizes[1]


def _borrowed(model: Any) -> HuggingFaceModel:
    """A model for the engine that holds only a weak reference to the `transformers` model."""
    wrapped = HuggingFaceModel(model)
    wrapped.model = weakref.proxy(model)
    return wrapped
