"""Items of `/v1/responses`: those of a request in their complete form, and as messages."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from anydecode.server.errors import ApiError
from anydecode.server.prompts import text_of
from anydecode.server.protocol import Message
from anydecode.server.responses.store import Item

#: The prefix of an item's id, by its type.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
#: The fields that are read: of all items, and by their type.
_HEAD = frozenset({"id", "type", "status"})
_READ = {
    "message": {"role", "content"},
    "reasoning": {"summary", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}
_MAX_ID = 256
_ROLES = ("system", "developer", "user", "assistant")


def new_id(kind: str) -> str:
    """A new id for an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid4().hex}"


def complete_items(given: str | list[Item]) -> list[Item]:
    """The input of a request as items with all fields. References to stored items stay as they are.

    Raises:
        ApiError: An item is invalid, or of a type that is not supported.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_complete(item) for item in given]


def unread_fields(given: str | list[Item] | None) -> set[str]:
    """Names of the fields of input items, and of the parts of their contents, that have a value and
    no effect."""
    names: set[str] = set()
    for item in given if isinstance(given, list) else ():
        kind = item.get("type") or "message"
        names |= {name for name in item.keys() - _READ.get(kind, ()) - _HEAD if item[name]}
        for field in ("content", "output", "summary"):
            for part in item[field] if isinstance(item.get(field), list) else ():
                unread = part.keys() - {"type", "text", "refusal"} if isinstance(part, dict) else ()
                names |= {f"{field}.{name}" for name in unread if part[name]}
    return names


def is_reference(item: Item) -> bool:
    """Whether `item` is a reference to a stored item."""
    return item.get("type") == "item_reference"


def _complete(item: Item) -> Item:
    is_message = "role" in item or "content" in item
    kind = item.get("type") or ("message" if is_message else "item_reference")
    if kind == "item_reference":
        return {"type": kind, "id": _text(item, "id", kind)}
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise _error(
            f"an input item has type {kind!r}; it must be {', '.join(_PREFIXES)} or item_reference"
        )
    head = {"id": item.get("id") or new_id(kind), "type": kind}
    if not isinstance(head["id"], str) or len(head["id"].encode()) > _MAX_ID:
        raise _error(
            f"the id of an item of type {kind} must be a string of at most {_MAX_ID} bytes"
        )
    if kind == "function_call":
        names = ("call_id", "name", "arguments")
        return head | {"status": "completed"} | {name: _text(item, name, kind) for name in names}
    if kind == "function_call_output":
        output = item.get("output")
        return head | {
            "status": "completed",
            "call_id": _text(item, "call_id", kind),
            "output": output if isinstance(output, str) else _parts(output, "input_text", kind),
        }
    if kind == "reasoning":
        return head | {
            "summary": _parts(item.get("summary") or [], "summary_text", kind),
            "content": _parts(item.get("content") or [], "reasoning_text", kind),
        }
    role, content = item.get("role", "user"), item.get("content")
    if role not in _ROLES:
        raise _error(f"the role is {role!r}; it must be system, developer, user or assistant")
    part_type = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": part_type, "text": content}]
    parts = _parts(content, part_type, kind)
    return head | {"status": "completed", "role": role, "content": parts}


def _text(item: Item, name: str, kind: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _error(f"an input item of type {kind} needs the field {name}, a string")
    return value


def _parts(content: Any, part_type: str, kind: str) -> list[Item]:
    """A list of parts, all of `part_type`. Refusals of the assistant become text."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _error(f"the content of an item of type {kind} must be text or a list of parts")
    parts: list[Item] = []
    for part in content:
        if part.get("type") == "refusal":
            part = {"type": "output_text", "text": part.get("refusal")}
        if part.get("type") in ("summary_text", "reasoning_text"):
            part = {**part, "type": "text"}
        text = text_of([part])
        parts.append({"type": part_type, "text": text})
        if part_type == "output_text":
            parts[-1]["annotations"] = []
    return parts


def messages_of(items: list[Item], instructions: str | None) -> list[Message]:
    """The conversation that `items` are. Reasoning, text and calls of the assistant that follow
    each other are one message.

    Raises:
        ApiError: An output of a function belongs to no call before it.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    names: dict[str, str] = {}  # by id of the call
    turn: dict[str, Any] | None = None  # the assistant's, while it may go on

    def end_turn() -> None:
        nonlocal turn
        if turn is not None:
            messages.append(Message(role="assistant", **{"content": "", **turn}))
            turn = None

    for item in items:
        kind = item["type"]
        is_output = kind != "function_call_output" and item.get("role", "assistant") == "assistant"
        if not is_output or (turn is not None and _ends(turn, kind)):
            end_turn()
        if is_output and turn is None:
            turn = {}
        if kind == "function_call_output":
            name = names.get(item["call_id"])
            if name is None:
                raise _error(f"no function_call has the call_id {item['call_id']!r} of an output")
            content = text_of(item["output"])
            call_id = item["call_id"]
            message = Message(role="tool", content=content, tool_call_id=call_id, name=name)  # type: ignore[call-arg]
            messages.append(message)
        elif turn is None:
            messages.append(Message(role=item["role"], content=text_of(item["content"])))
        elif kind == "function_call":
            names[item["call_id"]] = item["name"]
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            parts = item.get("content") or item["summary"]
            turn["reasoning_content"] = "".join(part["text"] for part in parts)
        else:
            turn["content"] = text_of(item["content"])
    end_turn()
    return messages


def _ends(turn: dict[str, Any], kind: str) -> bool:
    """Whether a turn of the assistant is complete before an output item of this type."""
    if kind == "reasoning":
        return bool(turn)
    return kind == "message" and ("content" in turn or "tool_calls" in turn)


def _error(message: str) -> ApiError:
    return ApiError(400, message, param="input")
