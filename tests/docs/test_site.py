"""The scripts that generate pages of the documentation: the matrix and the pages of the methods."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from anydecode import catalogue

SITE = Path(__file__).parents[2] / "docs" / "_site"
#: Promises of a card that hold only with parameters, and the message says which.
WITH_PARAMETERS = {("self-infill", "constraint")}
#: Methods whose docstrings do not describe their parameters.
UNDESCRIBED: set[str] = set()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the site."""
    monkeypatch.syspath_prepend(SITE)
    return importlib.import_module


@pytest.mark.slow
def test_what_the_cards_promise_is_not_refused(site: Any) -> None:
    matrix = site("matrix")
    answers = matrix.answers()
    broken = {
        (card.key, column): message
        for card in matrix.decoders()
        for column, message in answers[card.key].items()
        if message and set(matrix.COLUMNS[column][1]) & set(card.works_with)
    }
    assert set(broken) == WITH_PARAMETERS, broken


def test_every_method_has_a_page_with_its_parameters_and_its_oracle_test(site: Any) -> None:
    methods = site("methods")
    undescribed = set()
    for card in catalogue.cards():
        page = methods.method_page(card, [])
        assert card.summary in page
        assert "**oracle test**" in page
        assert "| required |" not in page
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        if any(row.endswith("|  |") for row in rows):
            undescribed.add(card.key)
    assert undescribed == UNDESCRIBED


def test_partial_methods_say_what_is_missing(site: Any) -> None:
    methods = site("methods")
    index = methods.index()
    for card in catalogue.cards():
        page = methods.method_page(card, [])
        assert ("## Not implemented" in page) == bool(card.missing)
        assert all(f"- {methods.escaped(part)}" in page for part in card.missing)
        (row,) = [line for line in index.splitlines() if line.startswith(f"| [`{card.key}`]")]
        assert ("*Partial.*" in row) == bool(card.missing)


def test_pages_have_the_figures_of_their_method_only(site: Any) -> None:
    figures = site("methods").measured(SITE.parent)
    assert set(figures) <= set(catalogue.entries())
    rows = [line for line in figures["dimple"] if line.startswith("| `")]
    assert rows and all(row.startswith("| `dimple`") for row in rows)


def test_attributes_for_the_tests_are_not_shown(site: Any) -> None:
    source = '```sh {.no-run reason="slow"}\nls\n```\n\n```python title="a.py" {.slow}\n1\n```\n'
    shown = site("markup").on_page_markdown(source)
    assert shown == '```sh\nls\n```\n\n```python title="a.py"\n1\n```\n'


def test_a_figure_takes_the_colours_of_the_page(site: Any) -> None:
    svg = "<svg><style>a{b:c}@media(prefers-color-scheme:dark){a{b:d}}</style><g/></svg>"
    expected = "#f{a{b:c}}[data-md-color-scheme=slate] #f{a{b:d}}"
    assert f"<style>{expected}</style><g/>" in site("markup").scoped(svg, "f")


def test_speeds_on_cards_stand_in_the_tables_of_measurements() -> None:
    lines = (SITE.parent / "performance.md").read_text().splitlines()
    speeds = 0
    for card in catalogue.cards():
        rows = [line for line in lines if re.match(rf"\| `{re.escape(card.key)}[`:]", line)]
        for speed in re.findall(r"(\d+\.\d+) times", " ".join(card.measured)):
            assert any(f"| {speed}x |" in row for row in rows), (card.key, speed)
            speeds += 1
    assert speeds > 10
