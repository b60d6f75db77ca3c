"""Commands of `anydecode train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode.cli.main import run


def train_command(
    capsys: pytest.CaptureFixture[str],
    command: str,
    model: str | Path = "tiny-autoregressive",
    **paths: Path,
) -> dict[str, Any]:
    """What `anydecode train COMMAND --model MODEL --json` prints, with an option for each of
    `paths`."""
    given = {"model": model, **paths}.items()
    options = [word for name, value in given for word in (f"--{name}", str(value))]
    with pytest.raises(SystemExit) as ended:
        run(["train", *command.split(), *options, "--json"])
    assert not ended.value.code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
