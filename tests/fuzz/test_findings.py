"""Every input that fuzzing has found is accepted, or refused with the documented error."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx")

from fuzz.surfaces import SURFACES

FINDINGS = Path(__file__).parent / "findings"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SURFACES)
def test_the_seeds_and_the_findings_of_a_surface(name: str) -> None:
    surface = SURFACES[name]
    seeds = surface.seeds()
    with surface.open() as run:
        # Of many seeds some: `test_run` opens all folders and files.
        for case in seeds[:: 1 + len(seeds) // 40]:
            run(case)
        for path in sorted((FINDINGS / name).glob("*")):
            run(path.read_bytes())
