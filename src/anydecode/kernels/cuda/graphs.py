"""Capture and replay of kernel launches: CUDA graphs, and a stand-in without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Launch = Callable[[], None]


class Recorder(Protocol):
    """Turns a function that only launches kernels on fixed memory into one that replays them."""

    def capture(self, run: Launch) -> Launch:
        """Call `run` at least once; return a function that repeats its launches."""
        ...


class CudaGraphs:
    """Captures launches into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Launch) -> Launch:
        # The first call compiles kernels and fills caches, which is not allowed during a capture.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


class NoGraphs:
    """Calls the function again instead of replaying a graph; for the interpreter."""

    def capture(self, run: Launch) -> Launch:
        run()
        return run
