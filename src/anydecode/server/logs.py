"""One line of JSON per event on stderr. No line contains prompts, answers, schemas or API keys."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Iterator
from datetime import datetime, timezone

from anydecode.errors import InvalidRequestError

log = logging.getLogger("anydecode.server")

#: Names the environment variable with the key of `tenant_name`.
LOG_KEY = "ANYDECODE_LOG_KEY"


class JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time, level, logger, event, and the record's
    `fields`. A traceback has the types of the exceptions without their texts, which may quote
    requests."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(_traceback(record.exc_info[1]))
        return json.dumps(line, ensure_ascii=False, default=str)


def _traceback(error: BaseException) -> Iterator[str]:
    """The frames and the type of an exception, after those of the exceptions that led to it."""
    chain: list[BaseException] = []
    earlier: BaseException | None = error
    while earlier is not None and earlier not in chain:
        chain.append(earlier)
        context = None if earlier.__suppress_context__ else earlier.__context__
        earlier = earlier.__cause__ or context
    for one in reversed(chain):
        yield from traceback.format_tb(one.__traceback__)
        yield f"{type(one).__name__}\n"


def log_key() -> bytes:
    """The key of `tenant_name`: the environment's, by which the logs of several processes can be
    joined, else a random one. Raises `InvalidRequestError` if the environment's is empty."""
    given = os.environ.get(LOG_KEY)
    if given is None:
        return secrets.token_bytes(32)
    if not given:
        raise InvalidRequestError(f"{LOG_KEY} is empty; give it a random text, or unset it")
    return given.encode()


def tenant_name(namespace: str | None, key: bytes) -> str | None:
    """The name of a tenant in logs: a keyed hash, from which no API key can be guessed."""
    if namespace is None:
        return None
    return hmac.new(key, namespace.encode(), "sha256").hexdigest()[:16]


def event(name: str, **fields: object) -> None:
    """Log `name` with `fields`."""
    log.info(name, extra={"fields": fields})


def write_json_lines(level: str = "INFO") -> None:
    """Send the logs of anydecode, uvicorn and asyncio to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("anydecode", "uvicorn", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
