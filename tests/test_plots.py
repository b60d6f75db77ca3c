"""Figures by matplotlib, and what happens without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from anydecode import plots
from anydecode.errors import InvalidRequestError
from anydecode.report import PlotFile


def draw(file: Path) -> None:
    with plots.figure(file, "A title with $ and <", rows=2) as (upper, lower):
        upper.plot([1, 2], [1.0, 1000.0], label="a")
        lower.plot([1, 2], [1.0, 10.0], label="b")
        plots.logarithmic(upper, "y", " s")


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")]
)
def test_the_suffix_chooses_the_format(suffix: str, begin: bytes, tmp_path: Path) -> None:
    draw(tmp_path / f"x{suffix}")
    assert (tmp_path / f"x{suffix}").read_bytes().startswith(begin)


def test_the_text_of_an_svg_is_text_and_the_same_in_every_run(tmp_path: Path) -> None:
    for name in ("x.svg", "y.svg"):
        draw(tmp_path / name)
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "y.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    texts = {"".join(node.itertext()).strip() for node in root.iter() if "text" in node.tag}
    assert {"A title with $ and <", "a", "b", "1 s", "1000 s"} <= texts


@pytest.mark.parametrize(
    ("values", "labels"),
    [([1.0, 30.0], ["1 s", "2 s", "5 s", "10 s", "20 s"]), ([1.0, 1e4], ["1 s", "10 s", "100 s"])],
)
def test_a_logarithmic_axis_has_plain_numbers(
    values: list[float], labels: list[str], tmp_path: Path
) -> None:
    with plots.figure(tmp_path / "x.png", "x") as (panel,):
        panel.plot(values)
        plots.logarithmic(panel, "y", " s")
        shown = [text.get_text() for text in panel.get_yticklabels()]
    position = shown.index("1 s")
    assert shown[position : position + len(labels)] == labels


def test_the_legend_is_below_the_panels(tmp_path: Path, figures: list[Any]) -> None:
    with plots.figure(tmp_path / "x.png", "x") as (panel,):
        for number in range(30):
            panel.plot([0, 1], [0, number], label=f"a rather long name {number}")
    (figure,) = figures
    figure.draw_without_rendering()  # at the resolution of the positions below
    legend = figure.legends[0].get_window_extent()
    assert legend.y0 >= 0 and legend.x1 <= figure.bbox.x1
    assert legend.y1 <= panel.get_tightbbox().y0 and panel.get_window_extent().height > 100


def command(plot: PlotFile = None) -> None:
    """A command with numbers, and a figure of them."""
    print("numbers", plot)
    if plot is not None:
        draw(plot)


def test_a_command_prints_its_numbers_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(command)
    file = tmp_path / "x.svg"
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["--plot", str(file)])
    assert (done.exit_code, done.stdout, file.exists()) == (0, "numbers None\n", False)
    assert done.stderr == (
        "--plot needs matplotlib, which is not installed: pip install 'anydecode[plots]'\n"
    )
    monkeypatch.undo()
    done = CliRunner().invoke(app, ["--plot", str(file)])
    assert (done.exit_code, done.stderr, file.exists()) == (0, "", True)


def test_an_unknown_format_is_refused_before_any_work() -> None:
    assert plots.usable_file(None) is None
    with pytest.raises(InvalidRequestError, match=r"--plot is x.jpeg; .*\.svg, \.png, \.pdf"):
        plots.usable_file(Path("x.jpeg"))
    with pytest.raises(InvalidRequestError, match="the folder none does not exist"):
        plots.usable_file(Path("none/x.svg"))
