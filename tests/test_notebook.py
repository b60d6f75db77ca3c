"""The notebook in docs/ runs from its first cell to its last and was saved with its outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"


def cells() -> list[dict]:
    return [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_notebook_was_executed() -> None:
    for cell in cells():
        assert cell["execution_count"], "a cell was never run"
        assert all(output["output_type"] != "error" for output in cell["outputs"])


@pytest.mark.slow
@pytest.mark.model
def test_the_notebook_runs(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {}
    for cell in cells():
        source = "".join(cell["source"]).replace(
            '"smollm2-135m-instruct"', repr(str(default_model_path))
        )
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert names["mine"].stats.passes > 0
