"""One line of JSON per event on stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

log = logging.getLogger("anydecode.server")


class JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time, level, logger, event, and the record's
    `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def event(name: str, **fields: object) -> None:
    """Log `name` with `fields`."""
    log.info(name, extra={"fields": fields})


def write_json_lines(level: str = "INFO") -> None:
    """Send the logs of anydecode and uvicorn to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("anydecode", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
