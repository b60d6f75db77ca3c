"""The page of models lists exactly the families and GGUF architectures that there are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from anydecode.kernels.interface import FORMATS
from anydecode.models.families.table import FAMILIES
from anydecode.models.loading.gguf_keys import ARCHITECTURES
from parity_table import gguf_cases, references, table

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"


def rows() -> list[tuple[list[str], list[str]]]:
    """The model types and the GGUF architectures of each row of the tables of families."""
    found = []
    for line in PAGE.read_text().partition("\n## What differs between families")[0].splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) > 1 and cells[1]:
            found.append((cells[1], cells[2] if len(cells) > 2 else []))
    return found


def test_every_family_is_listed_once() -> None:
    listed = [model_type for model_types, _ in rows() for model_type in model_types]
    assert sorted(listed) == sorted(FAMILIES)


def test_the_table_of_diffusion_models_is_the_generated_one() -> None:
    source = PAGE.parents[1] / "_site" / "families.py"
    assert runpy.run_path(str(source))["table"]() in PAGE.read_text()


def test_the_table_of_parity_is_the_generated_one() -> None:
    pytest.importorskip("transformers")
    assert table() in (PAGE.parents[1] / "reference" / "parity.md").read_text(), (
        "run `PYTHONPATH=tests python tests/parity_table.py`"
    )


def test_every_family_and_architecture_has_parity_tests() -> None:
    pytest.importorskip("transformers")
    compared = {(kind, name) for kind, name, _ in gguf_cases()}
    causal = {key for key, family in FAMILIES.items() if family.denoising is None}
    assert causal - set(references()) == set()
    files = {name for name, (kind, _) in ARCHITECTURES.items() if kind in causal}
    assert files - {name for _, name in compared} == set()


def test_every_gguf_architecture_is_listed_with_its_family() -> None:
    pairs = {
        (model_type, name) for types, names in rows() for model_type in types for name in names
    }
    assert {name for _, name in pairs} == set(ARCHITECTURES)
    assert {(model_type, name) for name, (model_type, _) in ARCHITECTURES.items()} <= pairs


def test_every_weight_format_is_listed_once() -> None:
    section = PAGE.read_text().partition("## Weight formats")[2].partition("A model that is split")
    listed = re.findall(r"\b[A-Z]+\d[A-Z0-9_]*\b", section[0].replace("GGUF", ""))
    assert sorted(listed) == sorted(FORMATS)
