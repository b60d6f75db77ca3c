"""Server settings, with the limits that protect clients from each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Settings of one server.

    Attributes:
        name: The model's id in responses.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        api_keys: Accepted API keys; if empty, no key is required.
        max_body: Largest request body, in bytes.
        max_prompt: Longest prompt, in tokens; 0 for the context length.
        max_requests: Most requests that run at once.
        max_choices: Most choices of one request: prompts times samples.
        stall_seconds: How long a client may leave a stream unread before it is cancelled.
        drain_seconds: How long a shutdown waits for running requests.
        decoder: Default decoder; None for the model's default.
        tool_parser: A name of `server.parsers.TOOL_FORMATS`, "auto" (chosen by the chat template)
            or "none".
        reasoning_parser: A name of `REASONING_TAGS`, "auto" or "none".
        allowed_hosts: Accepted Host names, "*" for any. On a loopback address, loopback names are
            always accepted; on other addresses an empty tuple accepts any name.
        open_metrics: Whether /metrics and /live need no key although keys are configured.
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
    decoder: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_hosts: tuple[str, ...] = ()
    open_metrics: bool = False

    @property
    def namespaces(self) -> dict[str, str]:
        """By API key: the namespace that isolates its prefix cache and its drafters' state."""
        return {key: hashlib.sha256(key.encode()).hexdigest()[:12] for key in self.api_keys}
