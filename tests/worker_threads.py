"""Workers of a fleet on threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from anydecode import LLM
from anydecode.cluster.worker import Worker
from anydecode.errors import FleetError

SECRET = b"a secret of the tests"


def start_worker(llm: LLM, port: int, **options: Any) -> tuple[Worker, threading.Thread]:
    """A worker on a thread, until its fleet ends."""
    worker = Worker(llm, SECRET, patience=0, **options)

    def work() -> None:
        try:
            asyncio.run(worker.run("127.0.0.1", port))
        except FleetError:
            llm.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return worker, thread
