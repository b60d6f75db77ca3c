"""llama.cpp on token ids, in another Python interpreter that has `llama-cpp-python`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
#: The format of its key-value cache unless another one is asked for.
DEFAULT_CACHE = "float16"


@dataclass
class LlamaCpp:
    """llama.cpp on one file. Each request runs in a process of its own.

    Args:
        python: The interpreter (`--baseline`).
        path: The `.gguf` file.
        threads: The number of threads.
        cache: The format of the key-value cache, by anydecode's name.

    Attributes:
        version: That of `llama-cpp-python`; None before the first request.
    """

    python: str
    path: str
    threads: int
    cache: str = DEFAULT_CACHE
    version: str | None = None

    def ask(self, work: str, **fields: Any) -> Any:
        """What `llama_cpp_worker` finds for a request. Raises `InvalidRequestError` if it fails."""
        request = {"work": work, "model": self.path, "threads": self.threads, "cache": self.cache}
        try:
            process = subprocess.run(
                [self.python, str(WORKER)],
                input=json.dumps(request | fields),
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise InvalidRequestError(
                f"--baseline {self.python} cannot be run: {error.strerror}"
            ) from None
        if process.returncode:
            last = process.stderr.splitlines()[-1:]
            reason = next(iter(last), f"exit code {process.returncode}")
            raise InvalidRequestError(f"llama.cpp failed under {self.python}: {reason}")
        answer = json.loads(process.stdout)
        self.version = f"llama-cpp-python {answer['version']}"
        return answer["found"]
