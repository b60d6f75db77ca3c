"""Kills a worker of a fleet in the middle of an answer, and shows that no word has changed.

python examples/kill_a_worker.py [MODEL]
"""

from __future__ import annotations

import os
import signal
import sys
import time

from anydecode import LLM
from anydecode.cluster.launcher import Launcher, LocalWorkers, places
from anydecode.cluster.proxy import FleetLLM

SECRET = os.urandom(32).hex().encode()


def main(model: str = "smollm2-135m-instruct") -> None:
    options = {"max_tokens": 600, "temperature": 1.0, "top_p": 0.99, "seed": 7, "ignore_eos": True}
    with LLM(model, threads=1) as llm:
        expected = llm.generate("Once upon a time", **options).text
    with FleetLLM(model, SECRET, threads=1) as fleet:
        address = f"127.0.0.1:{fleet.fleet_port}"
        arguments = [model, "--address", address, "--threads", "1"]
        launcher = Launcher(LocalWorkers(arguments, SECRET))
        launcher.start(places(2, 0, 0))
        try:
            while len(fleet.status()["workers"]) < 2:
                time.sleep(0.1)
            text, killed = "", ""
            for chunk in fleet.stream("Once upon a time", **options):
                text += chunk.text
                busy = [one for one in fleet.status()["workers"] if one["tasks"]]
                if busy and not killed:
                    os.kill(busy[0]["pid"], signal.SIGKILL)
                    killed = busy[0]["name"]
                    print(f"{killed} was killed after {len(text)} characters")
            counts = fleet.status()["counts"]
        finally:
            launcher.close()
    print(f"{len(text)} characters; the answer was started again {counts['restarts']} times")
    print(f"the text of one engine: {text == expected}")


if __name__ == "__main__":
    main(*sys.argv[1:])
