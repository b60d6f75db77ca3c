"""Requests that try to occupy a server: expensive constraints, templates, headers and bodies.

`python -m anydecode.benchmarks.serving.attacks HOST PORT NAME` sends one kind of them until its
input ends. It prints a line when it begins, and the number of answers by status as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: A message with this text makes `HOSTILE_TEMPLATE` render without end.
TRIGGER = "attack"
HOSTILE_TEMPLATE = (
    "{% if messages[0].content.startswith('attack') %}"
    + "{% for a in range(99999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
_HEADER_BYTES = 48 << 20
_BODY_BYTES = 4 << 20
#: How long a client that sends half a body waits, in seconds.
_HALF_SECONDS = 1.0
#: Number of clients of one attack.
NUM_CLIENTS = 2
_CHAIN = 40


class Address:
    """The server that is attacked."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def head(self, path: str, length: int) -> bytes:
        """Request line and headers of a POST, without the empty line."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        ).encode()

    async def send(self, data: bytes, seconds: float | None = None) -> int:
        """The status of the answer to `data`; 0 for none, also after waiting `seconds`."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            # The answer may come, and the connection end, before all is sent.
            sending = asyncio.ensure_future(writer.drain())
            try:
                line = await asyncio.wait_for(reader.readline(), seconds)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
                if not sending.cancelled():
                    sending.exception()
            return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0
        except (ConnectionError, asyncio.TimeoutError):
            return 0
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def post(self, path: str, body: bytes) -> int:
        """The status of the answer to a body."""
        return await self.send(self.head(path, len(body)) + b"\r\n" + body)


Attack = Callable[[Address, int], Awaitable[int]]


def _schema_attack(make: Callable[[], dict[str, Any]], max_tokens: int = 2) -> Attack:
    async def attack(address: Address, number: int) -> int:
        # A title of its own, as accepted schemas are compiled once.
        schema = {**make(), "title": f"attack {number}"}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "a", "max_tokens": max_tokens, "response_format": form}
        return await address.post(COMPLETIONS, json.dumps(body).encode())

    return attack


def _alternatives(groups: int, options: int) -> dict[str, Any]:
    """`allOf` of `anyOf`: as many alternatives as `options` to the power of `groups`."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"p{group}_{one}": {"type": "integer"}}}
                    for one in range(options)
                ]
            }
            for group in range(groups)
        ]
    }


def _doubled_references() -> dict[str, Any]:
    """A chain of definitions, each of which refers twice to the next."""
    definitions: dict[str, Any] = {f"d{_CHAIN}": {"type": "integer"}}
    for index in range(_CHAIN):
        following = {"$ref": f"#/$defs/d{index + 1}"}
        definitions[f"d{index}"] = {"allOf": [following, following]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _multiples() -> dict[str, Any]:
    """A multiple of several primes, of which each mask of the grammar takes long."""
    primes = (1009, 1013, 1019, 1021, 1031, 1033)
    return {"allOf": [{"type": "integer", "multipleOf": prime} for prime in primes]}


async def _template(address: Address, number: int) -> int:
    messages = [{"role": "user", "content": f"{TRIGGER} {number}"}]
    body = json.dumps({"messages": messages, "max_tokens": 2}).encode()
    return await address.post(CHAT, body)


async def _half_body(address: Address, number: int) -> int:
    head = address.head(COMPLETIONS, _BODY_BYTES - 1024)
    return await address.send(head + b"\r\n" + b" " * (_BODY_BYTES // 2), _HALF_SECONDS)


async def _headers(address: Address, number: int) -> int:
    lines = b"x-a: " + b"a" * 1017 + b"\r\n"
    return await address.send(address.head(COMPLETIONS, 2) + lines * (_HEADER_BYTES // len(lines)))


async def _type_errors(address: Address, number: int) -> int:
    start, end = b'{"prompt": "a", "stop": [', b"null]}"
    values = b"null," * ((_BODY_BYTES - len(start) - len(end)) // 5)
    return await address.post(COMPLETIONS, start + values + end)


async def _decoder(address: Address, number: int) -> int:
    names = ("nonsense", "beam:width=999999999", "prompt-lookup:size=-1", "suffix:memory=1e99",
             "x" * 100_000, "specdec:draft=/etc/passwd")  # fmt: skip
    body = {"prompt": "a", "max_tokens": 2, "decoder": names[number % len(names)]}
    return await address.post(COMPLETIONS, json.dumps(body).encode())


async def _banned_words(address: Address, number: int) -> int:
    """Half of the requests have a word that is too long, half as many words as a body may have."""
    words = ["ab " * 1_000_000] if number % 2 else [f"{number} {i}" for i in range(8000)]
    body = {"prompt": "a", "max_tokens": 8, "banned_words": words}
    return await address.post(COMPLETIONS, json.dumps(body).encode())


#: The attacks by name. Each sends one request, with a number of its own, and returns the status.
ATTACKS: dict[str, Attack] = {
    "nested quantifiers": _schema_attack(
        lambda: {"type": "string", "pattern": "^((a+)+)+$"}
    ),
    "allOf of anyOf": _schema_attack(lambda: _alternatives(12, 8)),
    "doubled references": _schema_attack(_doubled_references),
    "minProperties 60": _schema_attack(lambda: {"type": "object", "minProperties": 60}),
    "long constants": _schema_attack(lambda: {"const": "x" * 100_000}),
    "multiples": _schema_attack(_multiples, 16),
    "endless template": _template,
    "half a body": _half_body,
    "48 MiB of headers": _headers,
    "4 MiB of type errors": _type_errors,
    "wrong decoders": _decoder,
    "banned words": _banned_words,
}  # fmt: skip


async def _attack(address: Address, name: str) -> Counter[int]:
    statuses: Counter[int] = Counter()
    numbers = count(random.randrange(1 << 40))

    async def client() -> None:
        for number in numbers:
            statuses[await ATTACKS[name](address, number)] += 1

    clients = [asyncio.ensure_future(client()) for _ in range(NUM_CLIENTS)]
    print("started", flush=True)
    ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    done, _ = await asyncio.wait([*clients, ending], return_when=asyncio.FIRST_COMPLETED)
    for task in clients:
        task.cancel()
    await asyncio.wait(clients)
    for task in done - {ending}:
        task.result()  # raises what ended it
    return statuses


if __name__ == "__main__":
    host, port, name = sys.argv[1:]
    print(json.dumps(asyncio.run(_attack(Address(host, int(port)), name))))
