"""`anydecode certify`: check what the catalogue cards claim."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import anydecode
from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.progress import note, progress

if TYPE_CHECKING:
    from anydecode.certification.certify_model import BatchOutcome, Trials
    from anydecode.certification.checks import Certificate, Check
    from anydecode.results_log import ResultsLog


def certify_methods(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY",
            help="Method keys, or package:Class; with --model, also with parameters, such as"
            " hidden-transfer:maps=FILE. Default: all methods; with --model, those that need no"
            " trained parts.",
        ),
    ] = None,
    json: options.Json = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Instead, compare long answers of this model with its plain decoding.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="With --model: folder with Spec-Bench's question.jsonl. Default: built-in.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="With --model: prompts per category. Default: all."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="With --model: tokens per answer.")
    ] = 128,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="With --model: batch size, in prompts.")
    ] = 8,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", min=0.0, help="With --model: temperature of the sampled runs."
        ),
    ] = 0.8,
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            min=0,
            help="With --model: prompts in the sample that is run in every dtype; 0: none.",
        ),
    ] = 24,
    sample_tokens: Annotated[
        int | None,
        typer.Option(
            "--sample-tokens",
            min=1,
            help="With --model: tokens per answer of the sample. Default: --tokens, at most 64.",
        ),
    ] = None,
    dtypes: Annotated[
        str,
        typer.Option("--dtypes", help="With --model: dtypes of the sample, separated by commas."),
    ] = "as stored,bfloat16,float32",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help=(
                "Append results to this file and resume from it. Default: a file in"
                " the cache folder, deleted when the run is complete."
            ),
        ),
    ] = None,
    draft: options.Draft = "self:int4",
    threads: options.Threads = None,
) -> None:
    """Check the claims of methods; exits with 1 if a check fails. A check that needs a missing
    package is skipped and listed as not run.

    With --model, answers of that model are compared with its plain decoding: all prompts in
    batches, and a sample in every dtype, greedy and sampled, alone and restarted at random.

    Results are saved as they arrive. An interrupted run resumes when it is started again; checks
    that failed or were not run are repeated.

    Example: anydecode certify prompt-lookup --json
    """
    from anydecode.kernels.native import thread_count

    thread_count(threads)  # also validated for checks that do not use it
    settings: dict[str, Any] = {"anydecode": anydecode.__version__}
    if model is None:
        log = _open_log(keep, settings)
        certificates, stopped = _run_checks(keys or [], log, json)
    else:
        from anydecode.certification.certify_model import Trials
        from anydecode.report import split_names
        from anydecode.tasks.spec_bench import questions

        formats = tuple(split_names(dtypes))
        prompts = questions(data, limit)
        sample_tokens = sample_tokens or min(tokens, 64)
        trials = Trials(prompts, tokens, batch, temperature, sample, sample_tokens, formats)
        log = _open_log(keep, {**settings, "model": model, "draft": draft})
        certificates, stopped = _run_on_model(keys or [], model, trials, draft, threads, log)
        if not json:
            for certificate in certificates:
                _print_certificate(certificate, certificate.checks)
    if json:
        print_json(certificates)
    if log is not None and keep is None and not stopped:
        log.clear()
    _exit(certificates, stopped)


def _exit(certificates: list[Certificate], stopped: bool) -> None:
    """Print which methods were not run in full, with what to install, and which failed; exit with
    the matching code."""
    from anydecode.certification.checks import NOT_RUN

    not_run: dict[str, list[str]] = {}
    for certificate in certificates:
        reasons = [check.detail for check in certificate.checks if check.passed is None]
        for reason in dict.fromkeys(reasons):
            not_run.setdefault(reason, []).append(certificate.key)
    for reason, keys in not_run.items():
        note(f"{NOT_RUN} in full: {', '.join(keys)}: {reason.removeprefix(f'{NOT_RUN}: ')}")
    failed = [one.key for one in certificates if one.status == "failed"]
    if failed:
        note(f"not certified: {', '.join(failed)}")
        raise typer.Exit(1)
    if stopped:
        raise KeyboardInterrupt


def _print_certificate(certificate: Certificate, checks: Iterable[Check]) -> None:
    """Print one certificate with some of its checks."""
    label = "FAILED" if certificate.status == "failed" else certificate.status
    lines = [f"        {check.name}: {check.detail}" for check in checks]
    print("\n".join([f"{label}  {certificate.key}", *lines]), flush=True)


def _open_log(keep: Path | None, settings: dict[str, Any]) -> ResultsLog | None:
    """Open the results log: the user's file, else one in the cache folder that belongs to these
    settings and this code; None if that cannot be written."""
    from anydecode.folders import default_cache
    from anydecode.results_log import ResultsLog

    if keep is not None:
        return ResultsLog(keep, settings)
    settings = {
        **settings,
        "code": _fingerprint(Path(anydecode.__file__).parent, ("*.py", "*.[ch]")),
    }
    model = settings.get("model")
    if model is not None and Path(model).exists():
        settings["files"] = _fingerprint(Path(model), ("*",), contents=False)
    name = hashlib.sha256(dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    file = default_cache() / "certify" / f"{name}.jsonl"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return ResultsLog(file, settings)
    except OSError as error:
        note(f"results are not saved: {error}")
        return None


def _fingerprint(root: Path, patterns: Iterable[str], contents: bool = True) -> str:
    """A hash of the files below `root`, or of the file `root`; without `contents`, of their sizes
    and modification times."""
    digest = hashlib.sha256()
    files = {path for pattern in patterns for path in root.rglob(pattern)} or {root}
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes() if contents else str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _run_checks(
    keys: list[str], log: ResultsLog | None, json: bool
) -> tuple[list[Certificate], bool]:
    """Run the checks of methods. Returns the certificates, and whether the user interrupted."""
    from anydecode.catalogue import cards
    from anydecode.certification.certify import certify

    selected = keys or sorted(card.key for card in cards())
    done: list[Certificate] = []
    started: list[str] = []
    with progress("methods", len(selected)) as bar:

        def begin(key: str) -> None:
            started.append(key)
            bar.begin(key)

        def report(certificate: Certificate) -> None:
            done.append(certificate)
            bar.advance(skipped=certificate.key not in started)
            if not json:
                _print_certificate(
                    certificate, [one for one in certificate.checks if not one.passed]
                )

        try:
            certify(selected, on_start=begin, on_done=report, results_log=log)
        except KeyboardInterrupt:
            note(f"interrupted: {len(done)} of {len(selected)} methods were checked")
    return done, len(done) < len(selected)


def _run_on_model(
    keys: list[str],
    model: str,
    trials: Trials,
    draft: str | None,
    threads: int | None,
    log: ResultsLog | None,
) -> tuple[list[Certificate], bool]:
    """Run methods on a model. Returns the certificates, and whether the user interrupted."""
    from anydecode.certification.certify_model import certificates, outcomes

    selected = keys or drafting_keys()
    total = len(selected) * sum(map(len, trials.batches().values()))
    results: list[BatchOutcome] = []
    with progress("trials", total) as bar:
        try:
            for outcome in outcomes(
                model, selected, trials, draft=draft, threads=threads, results_log=log
            ):
                results.append(outcome)
                bar.update(len(results), step=outcome.check, detail=outcome.key)
                if outcome.differ:
                    note(f"FAILED  {outcome.key}: {outcome.check}: {outcome.detail}")
        except KeyboardInterrupt:
            note(f"interrupted: {len(results)} of {total} trials were run")
    return certificates(results), len(results) < total


def drafting_keys() -> list[str]:
    """Keys of the token-exact methods that need nothing but a copy of the target, if that."""
    from anydecode.catalogue import cards

    return sorted(
        card.key
        for card in cards()
        if card.exactness == "token-exact"
        and not card.use
        and card.family in ("speculative", "depth")
        and set(card.needs) <= {"draft model"}
    )
