"""CUDA graphs, behind one small class: everything else here runs without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Launch = Callable[[], None]


class Recorder(Protocol):
    """Makes of a function that only launches kernels on fixed memory one that replays them."""

    def capture(self, run: Launch) -> Launch:
        """`run` is called at least once; every call of the result does the same again."""
        ...


class CudaGraphs:
    """Captures launches into graphs that share one pool of memory for what they make."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Launch) -> Launch:
        # The first call compiles kernels and fills caches, which a capture must not.
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
    """Calls the function again: for the interpreter."""

    def capture(self, run: Launch) -> Launch:
        run()
        return run
