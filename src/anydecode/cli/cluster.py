"""`anydecode cluster`: a fleet of workers behind one server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.cli import options
from anydecode.cli.command_list import CommandListGroup
from anydecode.cli.serve import served_name
from anydecode.errors import InvalidRequestError

if TYPE_CHECKING:
    from anydecode.cluster.control.distserve import Limits
    from anydecode.cluster.ledger import Frame

app = typer.Typer(
    cls=CommandListGroup,
    help="Several worker processes behind one server.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

#: The port that workers connect to.
FLEET_PORT = 8001

Model = Annotated[
    str,
    typer.Argument(
        envvar="ANYDECODE_MODEL", help="Model name, Hugging Face repo id, folder or .gguf file."
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        help="File with the secret of the fleet, which all its processes need. Default: that of"
        " ANYDECODE_CLUSTER_SECRET, or cluster/secret in the cache folder.",
    ),
]
Address = Annotated[
    str,
    typer.Option("--address", metavar="HOST:PORT", help="Where the proxy listens for workers."),
]
CachePositions = Annotated[
    int | None,
    typer.Option(
        "--cache-positions",
        min=1,
        help="Size of each worker's key-value cache in positions. Default: chosen for the model.",
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        "--cache-memory",
        metavar="SIZE",
        help="Maximum size of each worker's key-value cache, such as 2GiB. Default: for `up`, a"
        " quarter of the machine's memory divided by the number of workers.",
    ),
]
RowBudget = Annotated[
    int, typer.Option("--row-budget", min=1, help="Maximum number of rows per pass.")
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="Scheduler key of `anydecode methods` (family serving), such as online-offline.",
    ),
]
HandoverMemory = Annotated[
    str,
    typer.Option(
        "--handover-memory",
        metavar="SIZE",
        help="Memory of a worker for blocks that it gets from others, such as 512MiB.",
    ),
]
PrefixSpill = Annotated[
    str | None,
    typer.Option(
        "--prefix-spill",
        metavar="DIR",
        help="Store evicted prefixes of a worker in this folder of its machine, or in 'memory'."
        " Default: not stored.",
    ),
]
SpillLimit = Annotated[
    str,
    typer.Option(
        "--spill-limit",
        metavar="SIZE",
        help="Maximum size of the prefixes that a worker stores, such as 512MiB.",
    ),
]
MaxRunning = Annotated[
    int, typer.Option("--max-running", min=1, help="Maximum number of answers of one worker.")
]


@app.command()
def up(
    model: Model = options.DEFAULT_MODEL,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            help="Number of worker processes. Default: those with a role, or 2.",
        ),
    ] = None,
    prefill: Annotated[
        int,
        typer.Option("--prefill", min=0, help="Number of workers that compute long prompts only."),
    ] = 0,
    decode: Annotated[
        int,
        typer.Option("--decode", min=0, help="Number of workers that get the prompts of those."),
    ] = 0,
    encode: Annotated[
        int,
        typer.Option("--encode", min=0, help="Number of workers that encode images only."),
    ] = 0,
    ratio: Annotated[
        str | None,
        typer.Option(
            "--ratio",
            help="Let workers change their roles: pd-serve and xllm (prefill and decode) or epd"
            " (encode, too). Default: roles stay.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0: a free one."),
    ] = 8000,
    fleet_host: Annotated[
        str,
        typer.Option("--fleet-host", help="Address to listen on for workers of other machines."),
    ] = "127.0.0.1",
    fleet_port: Annotated[
        int,
        typer.Option(
            "--fleet-port", min=0, max=65535, help="Port to listen on for workers; 0: a free one."
        ),
    ] = FLEET_PORT,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Let Ray start the workers, on all machines of its cluster: HOST:PORT, auto (the"
            " cluster of this machine) or local (a new one). Default: processes of this machine.",
        ),
    ] = None,
    secret_file: SecretFile = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model for clients. Default: MODEL, no folder."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="Require this API key; repeatable, or separated by commas. Default: those of"
            " ANYDECODE_API_KEYS, or no key.",
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Require no key, although other machines can connect."),
    ] = False,
    max_requests: Annotated[
        int,
        typer.Option(
            "--max-requests", min=1, help="Maximum number of requests that run or wait at once."
        ),
    ] = 256,
    decoder: options.Decoder = None,
    draft: options.Drafts = None,
    max_running: MaxRunning = 64,
    handover_memory: HandoverMemory = "1GiB",
    schedule: ScheduleOption = None,
    row_budget: RowBudget = 512,
    cache_positions: CachePositions = None,
    cache_memory: CacheMemory = None,
    prefix_spill: PrefixSpill = None,
    spill_limit: SpillLimit = "4GiB",
    generation_config: options.GenerationConfig = "auto",
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="CPU threads of each worker. Default: those of the machine divided by the number"
            " of workers.",
        ),
    ] = None,
    backend: options.Backend = None,
) -> None:
    """Start a fleet on this machine: a server, and workers that compute its answers.

    Workers of other machines join with `anydecode cluster worker`.

    Example: anydecode cluster up smollm2-135m-instruct --workers 2
    """
    from anydecode.api.methods import build_as, build_decoder
    from anydecode.api.prefix_spill import MEMORY, open_spill, spill_folder
    from anydecode.cluster.control.roles import RoleControl
    from anydecode.cluster.launcher import Launcher, LocalWorkers, Starter, places
    from anydecode.cluster.metrics import FleetCollector
    from anydecode.cluster.proxy import FleetLLM
    from anydecode.cluster.ray_workers import RayWorkers
    from anydecode.cluster.secret import read_secret
    from anydecode.cluster.worker import WorkerOptions
    from anydecode.kernels.pages import memory_bytes
    from anydecode.progress import status as status_line
    from anydecode.server import logs
    from anydecode.server.models import as_served
    from anydecode.server.running import serve
    from anydecode.server.settings import Settings, api_keys

    wanted = places(workers, prefill, decode, encode)
    control = None if ratio is None else build_as(ratio, RoleControl)
    if control is not None and min(prefill, decode) < control.num_scenarios:
        raise InvalidRequestError(
            f"--ratio {ratio} changes the roles of workers: give --prefill and --decode"
            f" {control.num_scenarios} or more, too"
        )
    # Otherwise only the workers would find these errors, and end, while the server goes on.
    for size in (handover_memory, spill_limit):
        open_spill(MEMORY, size)
    if prefix_spill is not None and prefix_spill != MEMORY:
        if ray is None:
            prefix_spill = str(spill_folder(prefix_spill))
        elif not Path(prefix_spill).is_absolute():
            raise InvalidRequestError(
                f"--prefix-spill is {prefix_spill!r}; with --ray it must be an absolute path or"
                f" '{MEMORY}', since the workers run in other folders"
            )
    if decoder is not None:
        build_decoder(decoder)
    keys = api_keys(api_key, os.environ.get("ANYDECODE_API_KEYS"), host, no_auth)
    settings = Settings(
        name=name or served_name(model),
        host=host,
        port=port,
        api_keys=keys,
        max_requests=max_requests,
        decoder=decoder,
        accepts_images=encode > 0,
    )
    secret = read_secret(secret_file, can_create=True)
    if cache_positions is None and cache_memory is None:
        cache_memory = str((memory_bytes() or 4 << 30) // 4 // len(wanted))
    threads = threads or max(1, (os.cpu_count() or 1) // len(wanted))
    engine = options.without_none(
        draft=draft,
        schedule=schedule,
        row_budget=row_budget,
        cache_positions=cache_positions,
        cache_memory=cache_memory,
        dtype=dtype,
        cache=cache,
        threads=threads,
        backend=backend,
    )
    of_worker = {
        **engine,
        **options.without_none(prefix_spill=prefix_spill, spill_limit=spill_limit),
    }
    with status_line(f"loading {model}"):
        llm = FleetLLM(
            model,
            secret,
            fleet_host=fleet_host,
            fleet_port=fleet_port,
            ratio=control,
            generation_config=generation_config,
            **engine,
        )
    at = f"{'127.0.0.1' if fleet_host == '0.0.0.0' else fleet_host}:{llm.fleet_port}"
    start: Starter
    if ray is None:
        arguments = [model, "--address", at, "--patience", "5"]
        arguments += ["--max-running", str(max_running), "--handover-memory", handover_memory]
        for name_of, value in of_worker.items():
            for one in value if isinstance(value, list) else [value]:
                arguments += [f"--{name_of.replace('_', '-')}", str(one)]
        start = LocalWorkers(arguments, secret)
    else:
        common = WorkerOptions(
            model,
            *split_address(at),
            of_worker,
            max_running=max_running,
            handover_memory=handover_memory,
            patience=5.0,
        )
        start = RayWorkers(ray, common, secret, threads)
    served = as_served(llm, settings)
    served.metrics.registry.register(FleetCollector(llm.status))
    launcher = Launcher(start)
    logs.write_json_lines()
    logs.event("fleet", address=at, workers=[place.name for place in wanted])
    try:
        launcher.start(wanted)
        serve(served)
    finally:
        launcher.close()
        if isinstance(start, RayWorkers):
            start.close()


@app.command()
def worker(
    model: Model = options.DEFAULT_MODEL,
    address: Address = f"127.0.0.1:{FLEET_PORT}",
    role: Annotated[
        str,
        typer.Option(
            "--role",
            help="mixed, encode (encodes images for others), prefill (computes long prompts for"
            " others) or decode (gets them).",
        ),
    ] = "mixed",
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of this worker. Default: worker- and the process id."),
    ] = None,
    secret_file: SecretFile = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", min=0, help="Seconds for which the worker tries to reach its proxy."
        ),
    ] = 60.0,
    max_running: MaxRunning = 64,
    handover_memory: HandoverMemory = "1GiB",
    draft: options.Drafts = None,
    schedule: ScheduleOption = None,
    row_budget: RowBudget = 512,
    cache_positions: CachePositions = None,
    cache_memory: CacheMemory = None,
    prefix_spill: PrefixSpill = None,
    spill_limit: SpillLimit = "4GiB",
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
) -> None:
    """Compute answers for the fleet at ADDRESS until it drains this worker.

    Example: anydecode cluster worker smollm2-135m-instruct --address 10.0.0.1:8001
    """
    from anydecode.cluster.fleet import ROLES
    from anydecode.cluster.secret import read_secret
    from anydecode.cluster.worker import WorkerOptions, work
    from anydecode.server.logs import write_json_lines

    host, port = split_address(address)
    if role not in ROLES:
        raise InvalidRequestError(f"--role is {role!r}; allowed are {', '.join(ROLES)}")
    secret = read_secret(secret_file)
    engine = options.without_none(
        draft=draft,
        schedule=schedule,
        row_budget=row_budget,
        cache_positions=cache_positions,
        cache_memory=cache_memory,
        prefix_spill=prefix_spill,
        spill_limit=spill_limit,
        dtype=dtype,
        cache=cache,
        threads=threads,
        backend=backend,
    )
    signal.signal(signal.SIGTERM, _end)  # the cached prefixes are stored, if they are to be
    write_json_lines()
    work(
        WorkerOptions(
            model,
            host,
            port,
            engine,
            name=name or "",
            role=role,
            max_running=max_running,
            handover_memory=handover_memory,
            patience=patience,
        ),
        secret,
    )


def _end(number: int, _: Any) -> None:
    """End the process, as a signal without a handler does, but close what is open."""
    raise SystemExit(128 + number)


@app.command()
def status(
    address: Address = f"127.0.0.1:{FLEET_PORT}",
    secret_file: SecretFile = None,
    as_json: options.Json = False,
) -> None:
    """Show the workers of a fleet, their tasks, and what waits.

    Example: anydecode cluster status
    """
    found = _ask(address, secret_file, {"type": "status"})
    if as_json:
        typer.echo(json.dumps(found))
        return
    names = ["name", "role", "state", "tasks", "leases", "used", "positions", "pid", "group"]
    if any(one["scenario"] is not None for one in found["workers"]):
        names.insert(2, "scenario")
    rows = [names, *([str(one[name]) for name in names] for one in found["workers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    counts = ", ".join(f"{name.replace('_', ' ')} {one}" for name, one in found["counts"].items())
    typer.echo(f"running {found['running']}, waiting {found['waiting']}; so far: {counts}")


@app.command()
def drain(
    worker_name: Annotated[
        str, typer.Argument(metavar="WORKER", help="Name of the worker, as `status` shows it.")
    ],
    address: Address = f"127.0.0.1:{FLEET_PORT}",
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=0, help="Seconds after which its answers go on at other workers."
        ),
    ] = 60.0,
    secret_file: SecretFile = None,
) -> None:
    """Give a worker no new work, and end it when it has none.

    Example: anydecode cluster drain mixed-1
    """
    frame = {"type": "drain", "name": worker_name, "seconds": seconds}
    reason = _ask(address, secret_file, frame)["reason"]
    if reason is not None:
        raise InvalidRequestError(reason)
    typer.echo(
        f"{worker_name} gets no new work; after {seconds:g} s its answers go on at other workers"
    )


@app.command()
def ffn(
    model: Model = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0: a free one."),
    ] = 8002,
    is_single: Annotated[
        bool, typer.Option("--single", help="End when the first connection has ended.")
    ] = False,
    secret_file: SecretFile = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
) -> None:
    """Compute the FFNs of a model for attention processes (step-3).

    These give the address: anydecode generate --split step-3:address=HOST:PORT

    Example: anydecode cluster ffn smollm2-135m-instruct --port 8002
    """
    import asyncio

    from anydecode.cluster.ffn import READY, FfnServer
    from anydecode.cluster.secret import read_secret
    from anydecode.models.families import load_network
    from anydecode.models.loading import load_checkpoint
    from anydecode.models.opening import choose_executor

    secret = read_secret(secret_file, can_create=True)
    make = choose_executor(backend, threads)
    network = load_network(load_checkpoint(model), dtype, keeps_updates=True)
    server = FfnServer(network, make, secret, model)

    def ready(port: int) -> None:
        typer.echo(f"{READY}{host}:{port}")

    asyncio.run(server.serve(host, port, ready, is_single=is_single))


@app.command()
def plan(
    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="Requests: a file of the Azure LLM inference traces (.csv), or of Mooncake"
            " (.jsonl).",
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(
            "--slo",
            metavar="ttft=SECONDS,tpot=SECONDS",
            help="Maximum time to the first token, and mean time between tokens, of a request.",
        ),
    ],
    model: Model = options.DEFAULT_MODEL,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            max=10_000,
            help="Number of workers. More than 64 are simulated many passes at a time.",
        ),
    ] = 2,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Requests per second to plan for: finds the best unit of up to --workers workers,"
            " and how many of them this rate needs.",
        ),
    ] = None,
    search: Annotated[
        str, typer.Option("--search", help="Method of the search, with parameters.")
    ] = "distserve",
    requests: Annotated[
        int, typer.Option("--requests", min=2, help="Maximum number of requests of the trace.")
    ] = 200,
    shorten: Annotated[
        float,
        typer.Option("--shorten", min=1.0, help="Divide the lengths of prompts and answers."),
    ] = 1.0,
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            metavar="NxE",
            help="Number of images of every prompt, and of embeddings per image, such as 4x64; they"
            " come before the prompt's tokens. Placements with encode workers are compared, too.",
        ),
    ] = None,
    link_rate: Annotated[
        str,
        typer.Option(
            "--link-rate",
            metavar="SIZE",
            help="Keys and values that two workers exchange per second, such as 500MB.",
        ),
    ] = "500MB",
    link_latency: Annotated[
        float,
        typer.Option("--link-latency", min=0, help="Seconds for each exchange of any size."),
    ] = 0.004,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", help="Schedule of the workers, such as sarathi-serve."),
    ] = None,
    max_running: MaxRunning = 64,
    row_budget: RowBudget = 512,
    cache_positions: CachePositions = None,
    cache_memory: CacheMemory = None,
    dtype: options.Dtype = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Draw the share of requests within the limits by rate, for each placement, to"
            " this .svg, .png or .pdf file.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Plan attention and FFN instances in place of workers: step-3, by its formulas,"
            " for machines of --instance.",
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance",
            metavar="flops=N,bandwidth=N,network=N",
            help="What a machine does per second, for --split: operations, bytes of its memory, and"
            " bytes of its network, such as flops=1.6e16,bandwidth=2.7e13,network=4e11.",
        ),
    ] = None,
    ffn_instance: Annotated[
        str | None,
        typer.Option(
            "--ffn-instance",
            metavar="flops=N,bandwidth=N,network=N",
            help="The same of machines for FFNs. Default: --instance.",
        ),
    ] = None,
    hidden_bytes: Annotated[
        float,
        typer.Option(
            "--hidden-bytes",
            help="Bytes of a number of a hidden state, to the FFNs and back together, for --split;"
            " 3 in the paper.",
        ),
    ] = 8.0,
    as_json: options.Json = False,
) -> None:
    """Find the roles of workers that serve the most requests of a trace within limits.

    Measures the passes of the model on this machine, and simulates workers that each have such a
    machine. Drafts are not simulated. With --split, nothing is measured or simulated.

    Example: anydecode cluster plan --trace trace.csv --slo ttft=1,tpot=0.1 --workers 4
    """
    from anydecode import LLM
    from anydecode.api.methods import build_as
    from anydecode.api.prefix_spill import parse_bytes
    from anydecode.benchmarks.fleet_runs import request_seconds
    from anydecode.cluster.control.distserve import PlacementSearch
    from anydecode.cluster.plan import measured
    from anydecode.cluster.plan import plan as found_by
    from anydecode.cluster.plan_plot import draw_goodput
    from anydecode.cluster.simulator.simulation import Link
    from anydecode.cluster.simulator.trace_files import mean_context, read_trace
    from anydecode.plots import usable_file
    from anydecode.progress import status as status_line
    from anydecode.serialization import to_plain

    figure = usable_file(plot)
    limits, method = _limits(slo), build_as(search, PlacementSearch)
    sizes = _images(images)
    traced = read_trace(trace, requests)
    if split is not None:
        _plan_split(
            split,
            model,
            dtype,
            cache,
            instances=(instance, ffn_instance or instance),
            tpot=limits.tpot,
            context=mean_context(traced) / shorten,
            hidden_bytes=hidden_bytes,
            as_json=as_json,
        )
        return
    link_bytes = parse_bytes(link_rate)
    if link_bytes == 0:
        raise InvalidRequestError("--link-rate is 0; allowed is 1 or more")
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRequestError(f"--rate is {rate:g}; allowed is a number above 0")
    engine = options.without_none(schedule=schedule, row_budget=row_budget)
    memory = options.without_none(
        cache_positions=cache_positions,
        cache_memory=cache_memory,
        dtype=dtype,
        cache=cache,
        threads=threads,
        backend=backend,
    )
    began = perf_counter()
    with status_line(f"measuring {model}"), LLM(model, draft="none", **engine, **memory) as llm:
        machine = measured(llm, max_running=max_running, engine=engine)
        of_request = request_seconds()
    measured_at = perf_counter()
    link = Link(
        machine.position_bytes, link_bytes, link_latency, machine.embedding_bytes, of_request
    )
    with status_line(f"simulating {len(traced)} requests"):
        found = found_by(
            traced,
            limits,
            workers,
            machine,
            link,
            method,
            shorten=shorten,
            can_replicate=rate is not None,
            images=sizes,
        )
    simulated_at = perf_counter()
    if figure is not None:
        draw_goodput(figure, found, limits, method.attainment)
    best = found[0]
    replicas = None if rate is None or not best.goodput else best.replicas(rate)
    if as_json:
        typer.echo(
            json.dumps(
                {"placements": to_plain(found), "link": to_plain(link), "replicas": replicas}
            )
        )
        return
    typer.echo("placement             requests/s  per worker  missed above: ttft   tpot")
    for one in found:
        note = "  or more"
        if one.missed is not None:
            ttft, tpot = one.missed
            note = f"{ttft:20.0%} {tpot:6.0%}"
        figures = f"{one.goodput:10.3g}  {one.goodput_per_worker:10.3g}{note}"
        typer.echo(f"{one.placement!s:20}  {figures}")
    typer.echo(
        f"measured in {measured_at - began:.0f} s, simulated in {simulated_at - measured_at:.0f} s"
    )
    if not best.goodput:
        typer.echo("no placement serves enough requests within the limits at any rate")
        return
    if not all(one.is_bounded for one in found):
        typer.echo("'or more': no rate that was tried is too high; raise --requests")
    if replicas is not None:
        each = best.placement.workers
        typer.echo(
            f"{rate:g} requests/s need {replicas} x {best.placement}: {replicas * each} workers"
        )
    typer.echo(f"within the limits at {best.placement}, by requests/s:")
    for tried, share in best.probes:
        typer.echo(f"{tried:10.3g}  {share:6.1%}")


def _plan_split(
    split: str,
    model: str,
    dtype: str | None,
    cache: str | None,
    *,
    instances: tuple[str | None, str | None],
    tpot: float,
    context: float,
    hidden_bytes: float,
    as_json: bool,
) -> None:
    """Print the numbers of attention and FFN instances; `instances` are descriptions of one each.

    Raises:
        InvalidRequestError: A description is missing or wrong.
        UnsupportedCombinationError: The model cannot be split.
    """
    from anydecode.api.methods import build_as
    from anydecode.cluster.afd import Instance, report, split_costs, split_size
    from anydecode.cluster.control.step_3 import FfnSplit
    from anydecode.kernels.cache import number_bytes
    from anydecode.models.families import load_network
    from anydecode.models.loading import load_checkpoint
    from anydecode.serialization import to_plain

    method = build_as(split, FfnSplit)
    if not 0 < hidden_bytes < float("inf"):
        raise InvalidRequestError(f"--hidden-bytes is {hidden_bytes:g}; allowed is more than 0")
    found = []
    for option, text in zip(("--instance", "--ffn-instance"), instances, strict=True):
        rates = _numbers(text or "")
        if set(rates) != {"flops", "bandwidth", "network"}:
            raise InvalidRequestError(
                f"{option} is {text!r}; with --split it must have the form"
                " flops=N,bandwidth=N,network=N"
            )
        found.append(Instance(**rates))
    network = load_network(load_checkpoint(model), dtype)
    costs = split_costs(network, model, context, number_bytes(cache or "float16"))
    attention, ffn = found
    size = split_size(costs, attention, ffn, tpot, method.micro_batches, hidden_bytes)
    if as_json:
        typer.echo(json.dumps({"costs": to_plain(costs), "size": to_plain(size)}))
        return
    for line in report(costs, size, attention):
        typer.echo(line)


def _numbers(text: str) -> dict[str, float]:
    """The numbers of `NAME=NUMBER,NAME=NUMBER`; empty if it has another form."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        found = {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        return {}
    return found if len(found) == len(pairs) else {}


def _limits(text: str) -> Limits:
    """The limits of `ttft=SECONDS,tpot=SECONDS`.

    Raises:
        InvalidRequestError: It has another form.
    """
    from anydecode.cluster.control.distserve import Limits

    found = _numbers(text)
    if set(found) != {"ttft", "tpot"} or not min(found.values()) > 0:
        raise InvalidRequestError(
            f"--slo is {text!r}; it must have the form ttft=SECONDS,tpot=SECONDS, both above 0"
        )
    return Limits(**found)


def _images(text: str | None) -> tuple[int, ...]:
    """The number of embeddings of each image of `NxE`.

    Raises:
        InvalidRequestError: It has another form.
    """
    if text is None:
        return ()
    number, _, size = text.partition("x")
    is_valid = all(one.isdecimal() and 0 < int(one) <= 4096 for one in (number, size))
    if not is_valid:
        raise InvalidRequestError(
            f"--images is {text!r}; it must have the form NxE, such as 4x64, with numbers from 1 to"
            " 4096"
        )
    return (int(size),) * int(number)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        InvalidRequestError: It has another form.
    """
    from anydecode.cluster.connection import host_and_port

    found = host_and_port(address)
    if found is None:
        raise InvalidRequestError(
            f"--address is {address!r}; it must have the form HOST:PORT, such as"
            f" 127.0.0.1:{FLEET_PORT}"
        )
    return found


def _ask(address: str, secret_file: Path | None, frame: Frame) -> Any:
    """The answer of the fleet at an address to a command."""
    import asyncio

    from anydecode.cluster.connection import Connection
    from anydecode.cluster.secret import read_secret

    host, port = split_address(address)
    secret = read_secret(secret_file)

    async def exchange() -> Frame:
        connection = await Connection.open(host, port, secret)
        try:
            connection.send(frame)
            answer, _ = await connection.receive()
            return answer
        finally:
            connection.close()

    return asyncio.run(exchange())
