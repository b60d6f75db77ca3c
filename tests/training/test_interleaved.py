"""Interleaved texts for simul-mt: the file, the rows, and a model that learns when to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.training.interleaved import Interleaved, interleaved_row, read_interleaved
from train_commands import train_command


def test_parts_and_marks_stand_in_turn() -> None:
    one = Interleaved("to German:", ((" a b", "x"), ("c", "y z")))
    row = interleaved_row(one, lambda text: list(text.encode()), [7], (1, 2))
    assert row == ([7], [*b" a b", 1, *b"x", 2, *b" c", 1, *b"y z", 2])


def test_files_are_read_and_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "chunks.jsonl"
    file.write_text(json.dumps({"prompt": "p:", "chunks": [["a", "b"]]}) + "\n\n")
    assert read_interleaved(file) == [Interleaved("p:", (("a", "b"),))]
    chunks = ("[]", '[["a", 1]]', '["abc"]')
    lines = [f'{{"prompt": "p", "chunks": {one}}}' for one in chunks]
    for bad in (*lines, '{"prompt": "p"}', "no", "[1]"):
        file.write_text(bad)
        with pytest.raises(InvalidRequestError, match=r"chunks\.jsonl:1 is no object"):
            read_interleaved(file)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_interleaved(tmp_path / "none")


@pytest.mark.slow
def test_a_trained_model_reads_and_writes_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All texts are the same, which the adapter learns by heart: two words are read before the
    first part, one before the second."""
    file, out, plot = tmp_path / "chunks.jsonl", tmp_path / "run", tmp_path / "curve.svg"
    line = json.dumps({"prompt": "copy:", "chunks": [[" Ada Ben", " Leo"], [" Sam", " Uma"]]})
    file.write_text(f"{line}\n" * 4)
    log = train_command(
        capsys,
        "interleaved --steps 120 --rate 0.01 --end-of-read $ --end-of-write &",
        data=file,
        out=out,
        plot=plot,
    )
    assert plot.is_file()
    losses = [one["held_out"]["held out"] for one in log["history"] if "held_out" in one]
    assert losses[-1] < 0.2 * losses[0]
    decoder = "simul-mt:policy=trained,end_of_read=$,end_of_write=&,source=copy:"
    with LLM("tiny-autoregressive") as llm:
        llm.add_adapter("translator", out)
        found = llm.generate(
            "copy: Ada Ben Sam", decoder=decoder, adapter="translator", max_tokens=20, trace=True
        )
    assert found.text == " Leo Uma" and found.finish_reason == "stop"
    assert {one["num_read"] for one in found.trace or ()} == {2, 3}
