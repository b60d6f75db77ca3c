"""Workers on other hosts, for which network namespaces stand: blocks go from host to host, and a
host that is lost and comes back changes no word. The tests need the rights of root on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from anydecode import LLM
from anydecode.cluster import fleet as fleet_module
from anydecode.cluster.proxy import FleetLLM
from waiting import wait_for
from worker_threads import SECRET

MODEL, OPTIONS = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}
LONG_PROMPT = [65 + number % 26 for number in range(257)]
NAME = f"ad{os.getpid() % 100_000}"
NETWORK = "10.199.7"

pytestmark = pytest.mark.slow


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Hosts on one network, whose switch is this machine.

    Args:
        stack: Removes them.
        number: The number of hosts.
    """

    def __init__(self, stack: ExitStack, number: int) -> None:
        self.address = f"{NETWORK}.1"
        ip("link", "add", NAME, "type", "bridge")
        stack.callback(ip, "link", "del", NAME)
        ip("addr", "add", f"{self.address}/24", "dev", NAME)
        ip("link", "set", NAME, "up")
        for host in range(number):
            ip("netns", "add", f"{NAME}-{host}")
            stack.callback(ip, "netns", "del", f"{NAME}-{host}")
            ip("link", "add", f"{NAME}v{host}", "type", "veth", "peer", "eth0", "netns", self[host])
            ip("link", "set", f"{NAME}v{host}", "master", NAME, "up")
            ip("-n", self[host], "addr", "add", f"{NETWORK}.{host + 2}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", self[host], "link", "set", device, "up")

    def __getitem__(self, host: int) -> str:
        return f"{NAME}-{host}"

    def connect(self, host: int, state: str) -> None:
        """Plug the cable of a host in ("up") or out ("down")."""
        ip("link", "set", f"{NAME}v{host}", state)


@contextmanager
def fleet_on_hosts(*roles: str) -> Iterator[tuple[FleetLLM, Hosts]]:
    """A fleet with the proxy on this machine and a worker on a host for each role."""
    with ExitStack() as stack:
        try:
            hosts = Hosts(stack, len(roles))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need the rights of root, and ip: {error}")
        fleet = stack.enter_context(
            FleetLLM(MODEL, SECRET, fleet_host=hosts.address, **OPTIONS)  # type: ignore[arg-type]
        )
        for host, role in enumerate(roles):
            command = ["ip", "netns", "exec", hosts[host], sys.executable, "-m", "anydecode"]
            command += ["cluster", "worker", MODEL, "--name", f"{role}-{host}", "--role", role]
            command += ["--address", f"{hosts.address}:{fleet.fleet_port}", "--threads", "1"]
            environment = {**os.environ, "ANYDECODE_CLUSTER_SECRET": SECRET.decode()}
            worker = subprocess.Popen([*command, "--cache-positions", "4096"], env=environment)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        wait_for(lambda: len(fleet.status()["workers"]) == len(roles))
        yield fleet, hosts


def test_blocks_go_from_host_to_host() -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 1}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = llm.generate(LONG_PROMPT, **options).tokens
    with fleet_on_hosts("prefill", "decode") as (fleet, _):
        assert fleet.generate(LONG_PROMPT, **options).tokens == expected

        def restored() -> int:
            return sum(one["restored"] for one in fleet.status()["workers"])

        assert fleet.status()["counts"]["handovers"] == 1
        wait_for(restored)  # the blocks have come, and were not computed again
        assert restored() == 256


def test_a_host_that_is_lost_and_comes_back_changes_no_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "DEAD_SECONDS", 4.0)
    options: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
    with LLM(MODEL, **OPTIONS) as llm:
        expected = [llm.generate("a", seed=seed, **options).tokens for seed in range(2)]
    with fleet_on_hosts("mixed", "mixed") as (fleet, hosts), ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(fleet.generate, "a", seed=seed, **options) for seed in range(2)]

        def is_busy() -> bool:
            workers = fleet.status()["workers"]
            return any(one["tasks"] for one in workers if one["name"] == "mixed-1")

        wait_for(is_busy)
        hosts.connect(1, "down")
        assert [one.result(60).tokens for one in answers] == expected
        wait_for(lambda: len(fleet.status()["workers"]) == 1)
        assert fleet.status()["counts"]["restarts"] >= 1
        hosts.connect(1, "up")
        wait_for(lambda: len(fleet.status()["workers"]) == 2)
