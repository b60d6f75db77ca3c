"""Attention and FFNs of a model in two processes (attention-FFN disaggregation).

StepFun, "Step-3 is Large yet Affordable: Model-system Co-design for Cost-effective Decoding",
arXiv:2507.19427.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.cluster.connection import host_and_port
from anydecode.cluster.ffn import AttentionExecutor, FfnClient, LocalFfn
from anydecode.cluster.secret import read_secret
from anydecode.errors import InvalidRequestError
from anydecode.kernels.native import thread_count
from anydecode.models.ffn_split import ModelSplit, OpenOptions
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.transformer import Executor


@register(
    Card(
        "step-3",
        "serving",
        paper="StepFun 2025, Step-3, arXiv:2507.19427",
        exactness="token-exact",
        use='LLM(model, split="step-3"), anydecode generate --split step-3; the formulas:'
        " anydecode cluster plan --split step-3 --instance RATES",
        summary="Runs attention and FFNs in two processes, with micro-batches on their way.",
        needs=("the model's files in both processes",),
        missing=(
            "several FFN processes, among which experts are divided, and several attention"
            " processes whose micro-batches an FFN process joins",
            "transfers by RDMA (StepMesh): hidden states go over TCP",
            "overlap of prefill and decode across processes of their own",
            "drafts within multi-step passes, adapters, and methods that skip or leave layers, run"
            " them in parallel, start behind the first, only store rows, or compress the cache",
            "a simulation of the stages: the plan has the formulas, which neither count the head,"
            " latencies, nor uneven micro-batches and experts",
        ),
        deviations=(
            "hidden states are float32 in both directions, so that no bit changes; the paper sends"
            " 8 bits to the FFNs and 16 back",
            "the norm before the FFN and the residual connection belong to the FFN process",
            "the FFN process has no state: if it is lost, another one runs the pass again",
            "the micro-batches are the parts of one pass, and all are back before the next pass",
            "equal kernels, weights and versions are checked; that two types of machines give equal"
            " bits is not",
            "the formulas follow from the stages' time limit; they were not compared with the"
            " paper's tables. Every expert is read in every micro-batch",
        ),
        bounds={"micro_batches": Range(1, 64)},
    )
)
class FfnSplit(ModelSplit):
    """Runs the FFNs of a model in another process.

    Args:
        micro_batches: The largest number of parts of a pass that are on their way at a time. The
            paper has three: for attention, network and FFNs.
        address: HOST:PORT of an FFN process (`anydecode cluster ffn`). By default one is started
            on this machine, and both have half of the threads.
        secret_file: The file with the secret that both share, if there is an address; None: see
            `anydecode cluster ffn`.

    Raises:
        InvalidRequestError: A parameter is invalid.
    """

    def __init__(
        self,
        micro_batches: int = 3,
        address: str = "",
        secret_file: str | Path | None = None,
    ) -> None:
        if micro_batches < 1:
            raise InvalidRequestError(
                f"step-3 has micro_batches={micro_batches}; allowed are 1 and more"
            )
        self.address = host_and_port(address) if address else None
        if address and self.address is None:
            raise InvalidRequestError(
                f"step-3 has address={address!r}; allowed is HOST:PORT, such as 127.0.0.1:8002"
            )
        self.micro_batches = micro_batches
        self.secret_file = None if secret_file is None else Path(secret_file)
        #: What starts the FFN process of each model that was opened without an address.
        self.local: list[LocalFfn] = []

    def executor(
        self, path: Path, options: OpenOptions
    ) -> tuple[Callable[[Network], Executor], Callable[[], None]]:
        threads, clients = options.threads, list[FfnClient]()
        local: LocalFfn | None = None
        locate: Callable[[], tuple[str, int, bytes]]
        if self.address is None:
            total = thread_count(threads)
            threads = max(1, total - total // 2)
            arguments = [str(path), "--threads", str(max(1, total // 2))]
            for name in ("dtype", "backend"):
                value = getattr(options, name)
                arguments += [] if value is None else [f"--{name}", value]
            locate = local = LocalFfn(arguments)
            self.local.append(local)
        else:
            secret = read_secret(self.secret_file)
            server = (*self.address, secret)
            locate = lambda: server  # noqa: E731

        def connect(facts: dict[str, Any], hidden: int) -> FfnClient:
            clients.append(FfnClient(locate, facts, hidden))
            return clients[-1]

        def make(network: Network) -> Executor:
            inner = choose_executor(options.backend, threads)
            try:
                return AttentionExecutor(network, inner, connect, self.micro_batches)
            except BaseException:
                close()
                raise

        def close() -> None:
            for client in clients:
                client.close()
            if local is not None:
                local.close()

        return make, close
