"""Figures of benchmarks and training runs, drawn by matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anydecode.errors import InvalidRequestError, MissingPackageError
from anydecode.progress import note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of series, distinguishable on light and dark backgrounds.
COLOURS = ("#2f7fc1", "#d9822b", "#3a9d6e", "#b1519e", "#8a8a2c", "#c4504b", "#5b6ec9", "#4d9aa5")
#: Colour of text and axes: contrast of 4.5 to white, of 4.4 to a dark page.
INK = "#767676"
FORMATS = (".svg", ".png", ".pdf")

_LEGEND_ROW = 0.22
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "figure.facecolor": "none",
    "figure.titlesize": 11.0,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 150.0,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "anydecode",  # the same figure is the same file
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def usable_file(file: Path | None) -> Path | None:
    """The file that a figure is to be written to; None, after a note, if matplotlib is missing, so
    that the numbers are still printed.

    Raises:
        InvalidRequestError: The name does not end in one of `FORMATS`, or its folder does not
            exist.
    """
    if file is None:
        return None
    if file.suffix.lower() not in FORMATS:
        raise InvalidRequestError(
            f"--plot is {file}; give a file name that ends in {', '.join(FORMATS)}"
        )
    if not file.parent.is_dir():
        raise InvalidRequestError(f"--plot is {file}; the folder {file.parent} does not exist")
    if find_spec("matplotlib") is None:
        note(str(MissingPackageError("--plot", "matplotlib", "'anydecode[plots]'")))
        return None
    return file


@contextmanager
def figure(
    file: Path, title: str, *, rows: int = 1, height: float = 2.2, share_x: bool = False
) -> Iterator[list[Axes]]:
    """Draw panels below each other within the block, then write them to `file`. Labels of series
    become one legend below the panels; text and axes are readable on light and dark pages.

    Args:
        file: The file, in the format of its suffix.
        title: Title above the panels.
        rows: Number of panels.
        height: Height of a panel, in inches. The width is 7 inches.
        share_x: Whether all panels have the same horizontal axis.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        picture = Figure(figsize=(7.0, rows * height + 0.4), layout="constrained")
        panels: list[Axes] = list(picture.subplots(rows, sharex=share_x, squeeze=False).flat)
        picture.suptitle(title, x=0.01, ha="left")
        yield panels
        series = {
            label: line
            for panel in panels
            for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        if series:
            widest = max(map(len, series))
            per_row = max(1, min(4, 84 // (widest + 6)))
            legend_rows = -(-len(series) // per_row)
            picture.set_figheight(picture.get_figheight() + _LEGEND_ROW * (legend_rows + 1))
            picture.legend(series.values(), series.keys(), loc="outside lower left", ncols=per_row)
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
        picture.savefig(file, metadata=metadata)


def logarithmic(panel: Axes, name: Literal["x", "y"], unit: str = "") -> None:
    """Make an axis of a drawn panel logarithmic, with plain numbers as labels: the powers of ten,
    and their double and fivefold if there is room."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set(**{f"{name}scale": "log"})
    axis = panel.xaxis if name == "x" else panel.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(f"{{x:g}}{unit}")
