"""What an operator may set, and the bounds that keep one client from hurting another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """How to serve.

    `name` is the model's id in answers. Without `api_keys` nobody is asked for one. `max_body` is
    in bytes, `max_prompt` in tokens (0: what the context holds), `max_requests` counts requests at
    work, `max_choices` prompts times samples of one request. `stall_seconds` is how long a client
    may leave a streamed answer unread; `drain_seconds` how long a shutdown waits for answers under
    way. `tool_parser` and `reasoning_parser` are names of `server.parsers`, "auto" to go by the
    chat template, or "none". On the loopback the server answers to the loopback's names and to
    `allowed_hosts`; elsewhere to any name, unless some are given ("*": any). With keys, /metrics
    and /live want one too, unless `open_metrics`.
    """

    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body: int = 4 << 20
    max_prompt: int = 0
    max_requests: int = 256
    max_choices: int = 64
    stall_seconds: float = 60.0
    drain_seconds: float = 10.0
    decoder: str | None = None  # None: the model's default
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_hosts: tuple[str, ...] = ()
    open_metrics: bool = False

    @property
    def namespaces(self) -> dict[str, str]:
        """By API key, the name under which its prefixes and drafters' memory are kept apart."""
        return {key: hashlib.sha256(key.encode()).hexdigest()[:12] for key in self.api_keys}
