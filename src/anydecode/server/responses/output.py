"""The output items of a response and the events of its stream, built from the events of its run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from anydecode.constraints.tools.stream import Event
from anydecode.server.responses.items import new_id
from anydecode.server.responses.store import Item

#: An event of a stream: its type and fields, without its number.
StreamEvent = dict[str, Any]
#: The type of the item that an event of a run belongs to.
_TYPES = {
    "content": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "arguments": "function_call",
}


class OutputItem:
    """One output item, which grows until it is done.

    Args:
        kind: Its type.
        index: Its position in the output.
        name: The function's name, of a call.
    """

    def __init__(self, kind: str, index: int, name: str = "") -> None:
        self.kind = kind
        self.index = index
        self.id = new_id(kind)
        self.status = "in_progress"
        self.logprobs: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._call = {"call_id": f"call_{uuid4().hex[:24]}", "name": name}

    def to_dict(self) -> Item:
        """The item with its text so far."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return {**head, **self._call, "arguments": self._text}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": [self._part(self._text)]}
        return {**head, "role": "assistant", "content": [self._part(self._text)]}

    def start(self) -> Iterator[StreamEvent]:
        """The events that begin the item."""
        item = self.to_dict()
        if self.kind != "function_call":
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}
        if self.kind != "function_call":
            part = self._part("")
            yield self._event("response.content_part.added", content_index=0, part=part)

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> StreamEvent:
        """The event of more text."""
        self._texts.append(text)
        self.logprobs += logprobs
        if self.kind == "function_call":
            return self._event("response.function_call_arguments.delta", delta=text)
        if self.kind == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        return self._event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def end(self, status: str) -> Iterator[StreamEvent]:
        """The events that end the item with `status`."""
        self.status, text = status, self._text
        if self.kind == "function_call":
            name = self._call["name"]
            yield self._event("response.function_call_arguments.done", name=name, arguments=text)
        elif self.kind == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=text)
        else:
            yield self._event(
                "response.output_text.done", content_index=0, text=text, logprobs=self.logprobs
            )
        if self.kind != "function_call":
            part = self._part(text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        item = self.to_dict()
        yield {"type": "response.output_item.done", "output_index": self.index, "item": item}

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}


class Output:
    """The output of a response. `items` are its items so far; the last one may be growing."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # not sent yet, as in `push`

    def to_list(self) -> list[Item]:
        """The output as JSON-compatible values."""
        return [item.to_dict() for item in self.items]

    def add_logprobs(self, num_others: int, entry: dict[str, Any]) -> None:
        """Add the log-probabilities of a token of the text after `num_others` items that are no
        messages."""
        self._logprobs.setdefault(num_others, []).append(entry)

    def push(self, event: Event) -> Iterator[StreamEvent]:
        """Add an event of a run. Yields the events of the stream."""
        kind, text = event
        if kind not in _TYPES:
            return  # the end of a call
        if kind == "call" or not self.items or self.items[-1].kind != _TYPES[kind]:
            yield from self._start(_TYPES[kind], text if kind == "call" else "")
        if kind != "call":
            item = self.items[-1]
            yield item.add(text, self._take_logprobs(item))

    def end(self, is_complete: bool) -> Iterator[StreamEvent]:
        """End the last item; of a complete answer without one, an empty message."""
        if not self.items or (is_complete and self.items[-1].kind == "reasoning"):
            yield from self._start("message")
        yield from self._end_last("completed" if is_complete else "incomplete")

    def stop(self) -> None:
        """Mark the last item as incomplete, if it is growing, after an error or a cancellation."""
        if self.items and self.items[-1].status == "in_progress":
            self.items[-1].status = "incomplete"

    def _start(self, kind: str, name: str = "") -> Iterator[StreamEvent]:
        if self.items:
            yield from self._end_last("completed")
        self.items.append(OutputItem(kind, len(self.items), name))
        yield from self.items[-1].start()

    def _end_last(self, status: str) -> Iterator[StreamEvent]:
        item = self.items[-1]
        if logprobs := self._take_logprobs(item):
            yield item.add("", logprobs)
        yield from item.end(status)

    def _take_logprobs(self, item: OutputItem) -> list[dict[str, Any]]:
        if item.kind != "message":
            return []
        return self._logprobs.pop(sum(one.kind != "message" for one in self.items), [])
