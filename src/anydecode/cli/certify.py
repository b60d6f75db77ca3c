"""`anydecode certify`: prove what the cards claim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import note, print_json, progress

if TYPE_CHECKING:
    from anydecode.evaluation.certify import Certificate
    from anydecode.evaluation.certify_model import Outcome, Trials


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
        typer.Option("--keep", help="Write outcomes here as they come, and go on from there."),
    ] = None,
    draft: options.Draft = "self:int4",
    threads: options.Threads = None,
) -> None:
    """Run the proofs of methods; exits 1 when one does not hold.

    With --model, answers of that model are held against its plain decoding: every prompt in
    batches, and a sample in every format, greedy and sampled, alone and restarted at random. Every
    method has tried the same prompts at any time, so a run may be stopped, and goes on with --keep.

    Example: anydecode certify prompt-lookup --json
    """
    stopped = False
    if model is None:
        certificates = _by_proof(keys or [])
    else:
        from anydecode.evaluation.certify_model import Trials
        from anydecode.evaluation.speculative_bench import questions

        formats = tuple(part.strip() for part in dtypes.split(",") if part.strip())
        asked = questions(data, limit)
        sample_tokens = sample_tokens or min(tokens, 64)
        trials = Trials(asked, tokens, batch, temperature, sample, sample_tokens, formats)
        certificates, stopped = _on_model(keys or [], model, trials, draft, threads, keep)
    if json:
        print_json(certificates)
    else:
        for certificate in certificates:
            print(f"{'passed' if certificate.passed else 'FAILED'}  {certificate.key}")
            for check in certificate.checks:
                if model is not None or not check.passed:
                    print(f"        {check.name}: {check.detail}")
    failed = [certificate.key for certificate in certificates if not certificate.passed]
    if failed:
        note(f"not certified: {', '.join(failed)}")
        raise typer.Exit(1)
    if stopped:
        raise KeyboardInterrupt


def _by_proof(keys: list[str]) -> list[Certificate]:
    from anydecode.catalogue import cards
    from anydecode.evaluation.certify import certify

    wanted = keys or sorted(card.key for card in cards())
    with progress() as bar:
        task = bar.add_task("certifying", total=len(wanted))

        def report(certificate: Certificate) -> None:
            bar.update(task, description=certificate.key)
            bar.advance(task)

        return certify(wanted, on_done=report)


def _on_model(
    keys: list[str],
    model: str,
    trials: Trials,
    draft: str | None,
    threads: int | None,
    keep: Path | None,
) -> tuple[list[Certificate], bool]:
    """Certificates of what was tried, and whether the user stopped it before all was."""
    from anydecode import __version__
    from anydecode.evaluation.certify_model import certificates, outcomes
    from anydecode.evaluation.diary import Diary

    wanted = keys or _drafting()
    settings = {"anydecode": __version__, "model": model, "draft": draft}
    diary = None if keep is None else Diary(keep, settings)
    total = len(wanted) * sum(map(len, trials.batches().values()))
    found: list[Outcome] = []
    with progress() as bar:
        task = bar.add_task("certifying", total=total)
        try:
            for one in outcomes(model, wanted, trials, draft=draft, threads=threads, diary=diary):
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
