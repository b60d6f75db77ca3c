"""`anydecode certify`: prove what the cards claim."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import anydecode
from anydecode.cli import options
from anydecode.cli.output import note, print_json, progress

if TYPE_CHECKING:
    from anydecode.evaluation.certify import Certificate, Check
    from anydecode.evaluation.certify_model import BatchOutcome, Trials
    from anydecode.evaluation.results_log import ResultsLog


def certify_methods(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys, or package:Class; all if absent."),
    ] = None,
    json: options.Json = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Token-exactness on this model instead, at length."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="With --model: a folder with Spec-Bench's question.jsonl."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts per category; all if absent.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per answer.")] = 128,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts decoded together.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0)] = 0.8,
    sample: Annotated[
        int, typer.Option("--sample", min=0, help="Prompts tried in every --dtypes; 0: none.")
    ] = 24,
    sample_tokens: Annotated[
        int | None,
        typer.Option(
            "--sample-tokens", min=1, help="Tokens per answer of the sample; --tokens, at most 64."
        ),
    ] = None,
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Formats of the sample, separated by commas.")
    ] = "as stored,bfloat16,float32",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Write results here as they come, and go on from there. If absent, a file of the"
            " cache folder does that until the run is complete.",
        ),
    ] = None,
    draft: options.Draft = "self:int4",
    threads: options.Threads = None,
) -> None:
    """Run the proofs of methods; exits 1 when one does not hold. A check that needs a package which
    is not installed is not run, and listed as such.

    With --model, answers of that model are held against its plain decoding: every prompt in
    batches, and a sample in every format, greedy and sampled, alone and restarted at random.

    Results are kept as they come. A run that was stopped or killed goes on when it is started
    again; what failed or was not run is tried again.

    Example: anydecode certify prompt-lookup --json
    """
    settings: dict[str, Any] = {"anydecode": anydecode.__version__}
    if model is None:
        log = _log(keep, settings)
        certificates, stopped = _by_proof(keys or [], log, json)
    else:
        from anydecode.evaluation.certify_model import Trials
        from anydecode.evaluation.speculative_bench import questions

        formats = tuple(part.strip() for part in dtypes.split(",") if part.strip())
        asked = questions(data, limit)
        sample_tokens = sample_tokens or min(tokens, 64)
        trials = Trials(asked, tokens, batch, temperature, sample, sample_tokens, formats)
        log = _log(keep, {**settings, "model": model, "draft": draft})
        certificates, stopped = _on_model(keys or [], model, trials, draft, threads, log)
        if not json:
            for certificate in certificates:
                _show(certificate, certificate.checks)
    if json:
        print_json(certificates)
    if log is not None and keep is None and not stopped:
        log.clear()
    _end(certificates, stopped)


def _end(certificates: list[Certificate], stopped: bool) -> None:
    """What did not pass, and the exit code."""
    named = {
        status: [one.key for one in certificates if one.status == status]
        for status in ("not run", "failed")
    }
    if named["not run"]:
        note(f"not run in full: {', '.join(named['not run'])}")
    if named["failed"]:
        note(f"not certified: {', '.join(named['failed'])}")
        raise typer.Exit(1)
    if stopped:
        raise KeyboardInterrupt


def _show(certificate: Certificate, checks: Iterable[Check]) -> None:
    """One certificate, at once, with some of its checks."""
    word = "FAILED" if certificate.status == "failed" else certificate.status
    lines = [f"        {check.name}: {check.detail}" for check in checks]
    print("\n".join([f"{word}  {certificate.key}", *lines]), flush=True)


def _log(keep: Path | None, settings: dict[str, Any]) -> ResultsLog | None:
    """Where results are kept: the file the user named; else one of the cache folder that belongs to
    these settings and this code, or none where that cannot be written."""
    from anydecode.evaluation.results_log import ResultsLog
    from anydecode.folders import default_cache

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
        note(f"results are not kept: {error}")
        return None


def _fingerprint(root: Path, patterns: Iterable[str], contents: bool = True) -> str:
    """A hash of files below `root`, or of that file; without `contents` of their size and time."""
    digest = hashlib.sha256()
    found = {path for pattern in patterns for path in root.rglob(pattern)} or {root}
    for path in sorted(path for path in found if path.is_file()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes() if contents else str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _by_proof(
    keys: list[str], log: ResultsLog | None, json: bool
) -> tuple[list[Certificate], bool]:
    """Certificates of what was tried, and whether the user stopped it before all was."""
    from anydecode.catalogue import cards
    from anydecode.evaluation.certify import certify

    wanted = keys or sorted(card.key for card in cards())
    done: list[Certificate] = []
    with progress() as bar:
        task = bar.add_task("certifying", total=len(wanted))

        def report(certificate: Certificate) -> None:
            done.append(certificate)
            bar.update(task, description=certificate.key, advance=1)
            if not json:
                _show(certificate, [one for one in certificate.checks if not one.passed])

        try:
            certify(wanted, on_done=report, results_log=log)
        except KeyboardInterrupt:
            note(f"stopped: {len(done)} of {len(wanted)} methods were tried")
    return done, len(done) < len(wanted)


def _on_model(
    keys: list[str],
    model: str,
    trials: Trials,
    draft: str | None,
    threads: int | None,
    log: ResultsLog | None,
) -> tuple[list[Certificate], bool]:
    """Certificates of what was tried, and whether the user stopped it before all was."""
    from anydecode.evaluation.certify_model import certificates, outcomes

    wanted = keys or _drafting()
    total = len(wanted) * sum(map(len, trials.batches().values()))
    found: list[BatchOutcome] = []
    with progress() as bar:
        task = bar.add_task("certifying", total=total)
        try:
            for one in outcomes(
                model, wanted, trials, draft=draft, threads=threads, results_log=log
            ):
                found.append(one)
                bar.update(task, description=one.key, advance=1)
                if one.differ:
                    note(f"FAILED  {one.key}: {one.check}: {one.detail}")
                if bar.disable and len(found) % len(wanted) == 0:
                    note(f"{len(found)} of {total}: {one.check}")
        except KeyboardInterrupt:
            note(f"stopped: {len(found)} of {total} trials were made")
    return certificates(found), len(found) < total


def _drafting() -> list[str]:
    """Token-exact methods that draft, and whose draft a model can have of itself."""
    from anydecode.catalogue import cards

    return sorted(
        card.key
        for card in cards()
        if card.exactness == "token-exact"
        and card.family in ("speculative", "depth")
        and "diffusion draft model" not in card.needs
    )
