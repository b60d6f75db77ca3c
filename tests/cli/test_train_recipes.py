"""`anydecode train depth --recipe NAME`: each recipe has its own options."""

from __future__ import annotations

import pytest

from anydecode.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.run(["train", "depth", *arguments])
    printed = capsys.readouterr()
    return int(str(ended.value.code)), printed.out, printed.err


def test_help_names_all_recipes_and_their_decoders(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output(capsys, "--help")
    assert code == 0
    for recipe in ("layerskip", "skipdecode", "ceed", "specbound", "m2r2", "tide", "specee"):
        assert f"\n  {recipe} " in text
    assert "anydecode train depth --recipe NAME --help" in text


@pytest.mark.parametrize(
    "given", [["--recipe", "tide", "--help"], ["--help", "--recipe=tide"]], ids=["before", "behind"]
)
def test_the_options_of_a_recipe_are_its_own(
    capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    code, text, _ = output(capsys, *given)
    assert code == 0
    assert "anydecode train depth --recipe tide [OPTIONS]" in text
    assert "--label" in text and "--penalty" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--recipe", "tied"], "--recipe tied is none of layerskip, skipdecode,"),
        (["--recipe"], "--recipe needs a name: one of layerskip, skipdecode,"),
        (["--recipe", "tide", "--penalty", "1"], "No such option: --penalty"),
        (["routers"], "unexpected extra argument"),
    ],
    ids=["unknown", "none", "option of another recipe", "no option"],
)
def test_wrong_recipes_and_options(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    code, _, errors = output(capsys, *given)
    assert code == 2
    assert said in " ".join(errors.split())
