"""`anydecode certify`: prove what the cards claim."""

from __future__ import annotations

from typing import Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import note, print_json, progress


def certify_methods(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys, or package:Class; all if absent."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Run the proofs of methods; exits 1 when one does not hold.

    Example: anydecode certify prompt-lookup --json
    """
    from anydecode.catalogue import cards
    from anydecode.evaluation.certify import Certificate, certify

    wanted = list(keys) if keys else sorted(card.key for card in cards())
    with progress() as bar:
        task = bar.add_task("certifying", total=len(wanted))

        def report(certificate: Certificate) -> None:
            bar.update(task, description=certificate.key)
            bar.advance(task)

        certificates = certify(wanted, on_done=report)
    if json:
        print_json(certificates)
    else:
        for certificate in certificates:
            print(f"{'passed' if certificate.passed else 'FAILED'}  {certificate.key}")
            for check in certificate.checks:
                if not check.passed:
                    print(f"        {check.name}: {check.detail}")
    failed = [certificate.key for certificate in certificates if not certificate.passed]
    if failed:
        note(f"not certified: {', '.join(failed)}")
        raise typer.Exit(1)
