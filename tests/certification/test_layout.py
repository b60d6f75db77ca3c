"""A method is three files of one name: its implementation, its oracle test and its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydecode import catalogue
from anydecode.certification.certify import load_oracle_tests

KEYS = [card.key for card in catalogue.cards()]
#: Where the oracle tests of a folder of methods are; others have the name of the folder.
FAMILIES = {"api": "serving"}


def implementation(key: str) -> tuple[str, ...]:
    """The folders of the method's module, below the package, and the module's name."""
    return tuple(catalogue.entries()[key].build.__module__.split(".")[1:])


@pytest.mark.parametrize("key", sorted(KEYS))
def test_an_oracle_test_is_in_the_file_of_its_method(key: str) -> None:
    *folders, name = implementation(key)
    family = [FAMILIES.get(one, one) for one in folders[-1:] if one != "decoders"]
    oracles = "anydecode.certification.oracles"
    assert load_oracle_tests()[key].__module__ == ".".join([oracles, *family, name])


@pytest.mark.parametrize("key", sorted(KEYS))
def test_the_tests_of_a_method_mirror_its_module(key: str, repository: Path) -> None:
    *folders, name = implementation(key)
    path = repository.joinpath("tests", *folders, f"test_{name}.py")
    assert path.is_file(), f"{path.relative_to(repository)} is missing"
    assert f'assert_certified("{key}")' in path.read_text()
