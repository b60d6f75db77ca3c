"""Workers that Ray starts, on any machine of its cluster.

Ray places the processes and reports their ends. Tokens, keys and values do not go through it.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from typing import Any

from anydecode.cluster.launcher import Place
from anydecode.cluster.worker import WorkerOptions, work
from anydecode.errors import AnydecodeError, FleetError, InvalidRequestError, MissingPackageError
from anydecode.server import logs

#: Memory of Ray's object store, which a fleet does not use, where this process starts Ray.
_STORE_BYTES = 100 << 20
#: A worker that Ray has not started after so long is reported, in seconds.
WAITING_SECONDS = 30.0


class RayWorker:
    """The actor that is a worker."""

    def ready(self) -> None:
        """Returns as soon as the process is there."""

    def run(self, options: WorkerOptions, secret: bytes) -> int:
        """Be a worker. Returns an exit code."""
        logs.write_json_lines()
        try:
            work(options, secret)
        except AnydecodeError as error:
            logs.event("worker_failed", reason=str(error))
            return 2
        return 0


class RayWorkers:
    """Starts workers with Ray.

    Args:
        address: Address of a Ray cluster, "auto" for the one of this machine, or "local" for a new
            one in this process.
        options: The options of all workers.
        secret: The secret of the fleet.
        cores: The cores that Ray reserves for a worker.

    Raises:
        MissingPackageError: Ray is not installed.
        InvalidRequestError: No Ray cluster answers at the address.
    """

    def __init__(self, address: str, options: WorkerOptions, secret: bytes, cores: int) -> None:
        try:
            import ray
        except ImportError:
            raise MissingPackageError("--ray", "ray", "'anydecode[cluster]'") from None
        self._ray: Any = ray
        self._options, self._secret, self._cores = options, secret, cores
        own = {
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "_system_config": {"worker_niceness": 0},  # by default they yield to all other programs
        }
        try:
            ray.init(
                address=address,
                namespace="anydecode",
                log_to_driver=True,
                **(own if address == "local" else {}),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"no Ray cluster can be used at {address!r}: {error}; start one with `ray start"
                " --head`, or give --ray local"
            ) from None

    def __call__(self, place: Place) -> RayProcess:
        """Start the worker of a place, on the machine with the most free cores."""
        kind = self._ray.remote(RayWorker)
        options = replace(self._options, name=place.name, role=place.role)
        try:
            actor = kind.options(
                num_cpus=self._cores, max_restarts=0, scheduling_strategy="SPREAD"
            ).remote()
            ready, result = actor.ready.remote(), actor.run.remote(options, self._secret)
        except Exception as error:  # of many types, of Ray and of Python
            raise FleetError(f"Ray cannot start it: {error}") from None
        return RayProcess(self._ray, actor, ready, result, place.name, self._cores)

    def close(self) -> None:
        """Leave the Ray cluster."""
        self._ray.shutdown()


class RayProcess:
    """A worker that Ray has started."""

    def __init__(
        self, ray: Any, actor: Any, ready: Any, result: Any, name: str, cores: int
    ) -> None:
        self._ray, self._actor, self._ready, self._result = ray, actor, ready, result
        self._name, self._cores = name, cores
        self._report_at: float | None = time.monotonic() + WAITING_SECONDS

    def poll(self) -> int | None:
        """Its exit code; None while it runs or waits for a machine, 1 if it has died."""
        try:
            self._report_waiting()
            ended, _ = self._ray.wait([self._result], timeout=0)
            if not ended:
                return None
            code: int = self._ray.get(self._result)
        except Exception:  # the process has died, or the worker has failed
            return 1
        return code

    def _report_waiting(self) -> None:
        """Say once that Ray has not started it."""
        if self._report_at is None or time.monotonic() < self._report_at:
            return
        self._report_at = None
        started, _ = self._ray.wait([self._ready], timeout=0)
        if not started:
            reason = (
                f"Ray has not started it in {WAITING_SECONDS:g} s: no machine of its cluster has"
                f" {self._cores} free cores, or they are busy with other programs"
            )
            logs.event("worker_waits", worker=self._name, reason=reason)

    def terminate(self) -> None:
        """End it: its proxy is told by the end of its connection."""
        self._ray.kill(self._actor)

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        ended, _ = self._ray.wait([self._result], timeout=timeout)
        code = self.poll() if ended else None
        if code is None:
            raise subprocess.TimeoutExpired("ray", timeout or 0.0)
        return code
