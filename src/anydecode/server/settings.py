"""Server settings, with the limits that protect clients from each other."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from anydecode.errors import InvalidRequestError


@dataclass(frozen=True)
class Settings:
    """Settings of one server.

    Attributes:
        name: The model's id in responses.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        api_keys: Accepted API keys; if empty, no key is required.
        max_body: Largest request body, in bytes.
        max_header: Largest request line and headers, in bytes.
        max_prompt: Longest prompt, in tokens; 0 for the context length.
        max_requests: Most requests that run at once.
        max_choices: Most choices of one request: prompts times samples.
        max_logprobs: Most log-probabilities that the running requests of a model may record.
        max_texts: Most texts of one request for embeddings, or pairs of texts to compare.
        body_seconds: How long a client may take to send the headers, and then the body.
        stall_seconds: How long a client may leave a stream unread before it is cancelled.
        drain_seconds: How long a shutdown waits for running requests.
        decoder: Default decoder; None for the model's default.
        tool_parser: A name of `TOOL_FORMATS`, "auto" (chosen by the chat template) or "none".
        reasoning_parser: A name of `REASONING_TAGS`, "auto" or "none".
        allowed_hosts: Accepted Host names, "*" for any. On a loopback address, loopback names are
            always accepted; on other addresses an empty tuple accepts any name.
        prepare_seconds: Most processor time that compiling the constraint of a request, rendering
            its conversation, or tokenising its prompt may take.
        prepare_memory: Most memory that one of these may take, in bytes.
        allowed_decoders: Decoders with parameters ("key:name=value") that requests may select,
            although a parameter is beyond the bounds of the method's card.
        allowed_logits_processors: Sampler presets ("key" or "key:name=value") that requests may
            name in `logits_processors`.
        adapter_folder: The folder whose adapters requests may load; None: they may load none.
        max_adapters: Most adapters that are loaded when a request loads another.
        store: Where responses are stored: "memory", "none" or a file.
        store_bytes: Maximum size of the stored responses, in bytes.
        store_seconds: Maximum age of a stored response, in seconds.
        max_background: Most responses that are generated in the background at once.
        max_file: Largest uploaded file with its form, in bytes.
        file_bytes: Maximum size of the files of batches, in bytes.
        max_batches: Most batches of one API key that have not ended.
        batch_lines: Most requests of batches that run at once.
        accepts_images: Whether conversations may have images, which a fleet encodes.
        open_metrics: Whether /metrics and /live need no key although keys are configured.
    """

    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body: int = 4 << 20
    max_header: int = 64 << 10
    max_prompt: int = 0
    max_requests: int = 256
    max_choices: int = 64
    max_logprobs: int = 1 << 21
    max_texts: int = 2048
    body_seconds: float = 30.0
    stall_seconds: float = 60.0
    drain_seconds: float = 10.0
    decoder: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_hosts: tuple[str, ...] = ()
    allowed_decoders: tuple[str, ...] = ()
    allowed_logits_processors: tuple[str, ...] = ()
    accepts_images: bool = False
    open_metrics: bool = False
    store: str = "memory"
    store_bytes: int = 64 << 20
    store_seconds: float = 30 * 86400.0
    max_background: int = 64
    max_file: int = 32 << 20
    file_bytes: int = 256 << 20
    max_batches: int = 16
    batch_lines: int = 4
    prepare_seconds: float = 2.0
    prepare_memory: int = 1 << 30
    adapter_folder: Path | None = None
    max_adapters: int = 16

    @property
    def namespaces(self) -> dict[str, str]:
        """By API key: the namespace that isolates its prefix cache and its drafters' state."""
        return {key: hashlib.sha256(key.encode()).hexdigest()[:12] for key in self.api_keys}


@lru_cache(256)  # called for every request, nearly always with the same name
def is_loopback(name: str) -> bool:
    """Whether a host name or address is a loopback one."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def api_keys(
    given: Sequence[str] | None, environment: str | None, host: str, no_auth: bool
) -> tuple[str, ...]:
    """The API keys of a server.

    Args:
        given: Keys of the command line, each one or several separated by commas.
        environment: The value of ANYDECODE_API_KEYS, read where `given` is empty; None: not set.
        host: The address that the server listens on.
        no_auth: Whether a server that other machines can reach may have no key.

    Raises:
        InvalidRequestError: A key is empty; other machines can connect and there is no key; or
            there are keys although `no_auth` is set.
    """
    source = "--api-key" if given else "ANYDECODE_API_KEYS"
    values = list(given) if given else [] if environment is None else [environment]
    keys = [key.strip() for value in values for key in value.split(",")]
    if not all(keys):
        raise InvalidRequestError(
            f"{source} has an empty key; give keys separated by commas, or leave it out"
        )
    if keys and no_auth:
        raise InvalidRequestError(f"--no-auth is given together with keys ({source}): choose one")
    if not keys and not no_auth and not is_loopback(host):
        raise InvalidRequestError(
            f"--host {host} lets other machines connect: give --api-key (or ANYDECODE_API_KEYS), or"
            " --no-auth to accept requests without a key"
        )
    return tuple(keys)
