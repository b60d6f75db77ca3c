"""`anydecode methods`: the list, and one page per method."""

from __future__ import annotations

import json
import sys

import pytest

from anydecode import catalogue
from anydecode.catalogue import FAMILIES, cards
from anydecode.cli import main
from anydecode.cli.output import cut, wrapped


def print_methods(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of `anydecode methods ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main.run(["methods", *arguments])
    captured = capsys.readouterr()
    assert (ended.value.code, captured.err) == (0, "")
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of error of `anydecode methods ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main.run(["methods", *arguments])
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (main.USAGE_ERROR, "")
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_the_list_has_one_line_of_80_columns_per_method(
    family: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    selected = cards(family)
    lines = print_methods(capsys, *(["--family", family] if family else [])).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith("  ")]
    assert [row.split()[:2] for row in rows] == [[card.key, card.exactness] for card in selected]
    headings = [line.split()[0] for line in lines[:-1] if line and not line.startswith(" ")]
    assert headings == ([family] if family else list(FAMILIES))
    noun = "method" if len(selected) == 1 else "methods"
    num_partial = sum(bool(card.missing) for card in selected)
    partial = f", {num_partial} partial" if num_partial else ""
    assert lines[-1] == f"{len(selected)} {noun}{partial}; all about one: anydecode methods KEY"
    for row, card in zip(rows, selected, strict=True):
        shown = row.partition(card.exactness)[2].strip()
        assert shown.startswith("partial: ") == bool(card.missing)
        shown = shown.removeprefix("partial: ")
        assert card.summary.startswith(shown.removesuffix("…").rstrip())
        assert shown.endswith("…") or shown == card.summary


def test_the_list_is_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (50, 200):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = print_methods(capsys, "--family", "diffusion").splitlines()
        assert max(map(len, lines)) <= columns
        assert any("…" in line for line in lines) == (columns == 50)


def test_search_looks_in_key_summary_and_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("PROMPT-look", "saxena", "copied from the last occurrence"):
        found = json.loads(print_methods(capsys, "--search", text, "--json"))
        assert "prompt-lookup" in {card["key"] for card in found}
        assert len(found) < len(cards())
    found = json.loads(
        print_methods(capsys, "--search", "draft", "--family", "diffusion", "--json")
    )
    assert found and {card["family"] for card in found} == {"diffusion"}
    assert json.loads(print_methods(capsys, "--search", "nonsense", "--json")) == []
    assert print_methods(capsys, "--search", "nonsense").startswith("0 methods")


@pytest.mark.parametrize("key", sorted(catalogue.entries()))
def test_a_page_fits_80_columns_and_has_the_whole_card(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = print_methods(capsys, key)
    assert max(map(len, page.splitlines())) <= 80
    shown = "".join(page.split())
    card = catalogue.entries()[key].card
    for text in (card.summary, card.exactness, card.use, card.paper, *card.needs, *card.works_with,
                 *card.missing, *card.deviations, *card.measured, card.citation):  # fmt: skip
        assert "".join(text.split()) in shown
    assert ("\npartial: not implemented\n" in page) == bool(card.missing)
    for one in catalogue.parameters(key):
        assert f"{one.name}:{''.join(one.type.split())}" in shown
        assert one.description and "".join(one.description.split()) in shown


def test_a_page_as_json_has_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    page = json.loads(print_methods(capsys, "sarathi", "--json"))
    assert page["key"] == "sarathi" and page["paper"]
    assert page["parameters"][0]["name"] == "budget"
    assert page["parameters"][0]["type"] == "int | None"
    assert page["parameters"][0]["default"] == "None"
    description = page["parameters"][0]["description"]  # of its base class
    assert description.startswith("Maximum number of rows per pass. By default,")
    assert description.endswith("by the measured pass costs on this machine.")


def test_a_partial_method_says_so_with_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = catalogue.find("xllm").card
    assert card.missing
    assert f"{card.key} " in print_methods(capsys, "--family", card.family)
    assert json.loads(print_methods(capsys, card.key, "--json"))["missing"] == list(card.missing)
    listed = json.loads(print_methods(capsys, "--family", card.family, "--json"))
    found = {one["key"]: one["missing"] for one in listed}
    assert found[card.key] == list(card.missing) and [] in found.values()


def test_parameters_are_described_by_the_docstring() -> None:
    def build(first: int, second: str = "a") -> None:
        """Summary.

        Args:
            first: A text: with a colon,
                on two lines.
            second: Another.

        Raises:
            ValueError: Never.
        """

    card = catalogue.Card("x-test", "search", "no paper", "lossy")
    catalogue.register(card)(build)
    try:
        assert catalogue.parameters("x-test") == [
            catalogue.Parameter(
                "first", "int", "", "A text: with a colon, on two lines.", "0 to 1048576"
            ),
            catalogue.Parameter("second", "str", "'a'", "Another."),
        ]
    finally:
        del catalogue.entries()["x-test"]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean prompt-lookup?" in refused(capsys, "prompt-lokup")
    assert "did you mean eqspec-exspec, " in refused(capsys, "exspec")
    assert "no decoding method is called 'qqqq'" in refused(capsys, "qqqq")
    assert "no family 'nonsense': choose from speculative" in refused(
        capsys, "--family", "nonsense"
    )
    assert "not both" in refused(capsys, "beam", "--search", "x")


def test_text_is_cut_and_wrapped_to_a_width() -> None:
    assert cut("12345", 5) == "12345" and cut("123456", 5) == "1234…" and cut("12  56", 4) == "12…"
    assert wrapped("a b\n c", 4, "- ") == "- a\n  b\n  c"
    assert wrapped("a /not/broken-at-a-hyphen b", 5) == "a\n/not/broken-at-a-hyphen\nb"
