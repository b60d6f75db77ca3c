"""The Python blocks and the shell commands of the documentation run, page by page, in order.

A block with a title is written to a file of that name. A block that cannot run has the attribute
`{.no-run reason="..."}`, one that takes long `{.slow}`.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import anydecode
from anydecode import catalogue
from anydecode.cli import bench, main
from anydecode.cli.train.recipes import RecipeGroup
from anydecode.decoders.depth.dynamax import Dynamax
from anydecode.decoders.depth.first_router import FirstRouter
from anydecode.decoders.depth.specee import SpecEe
from anydecode.decoders.depth.tide import Tide
from anydecode.errors import InvalidRequestError
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.mlp_routers import MlpRouters
from registries import modules_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?(?: \{(?P<attributes>[^}\n]*)\})?\n"
    r"(?P<code>.*?)^```$",
    re.M | re.S,
)
NO_RUN = re.compile(r'\.no-run reason="[^"]+"')
LANGUAGES = ("python", "sh", "toml", "json", "bibtex", "text")


@dataclass
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    attributes: str
    code: str

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.attributes


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text[: match.start()].count("\n") + 1,
            match["language"],
            match["title"],
            match["attributes"] or "",
            match["code"],
        )
        for match in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def parameters(slow: bool) -> list[Any]:
    """The pages with blocks to run; those that use the default model are marked."""
    found = []
    for page in PAGES:
        chosen = [one for one in blocks(page) if one.runs or (slow and one.attributes == ".slow")]
        if not any(one.runs != slow for one in chosen):
            continue
        marks = [pytest.mark.model] if "smollm2-135m" in page.read_text() else []
        found.append(pytest.param(page, marks=marks, id=name_of(page)))
    return found


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder that modules are imported from. What a page registers is forgotten
    afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with modules_of(tmp_path):
        yield tmp_path


def run(page: Path, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.attributes and not (slow and block.attributes == ".slow"):
            continue
        where = f"{name_of(page)}:{block.line}"
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            exec(compile("\n" * block.line + block.code, where, "exec"), names)
        elif block.language == "sh":
            for command in commands(block.code):
                shell(command, where, monkeypatch)


def commands(code: str) -> list[str]:
    """The commands of a shell block, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def shell(command: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command: anydecode and Python files in this process, others in a shell."""
    words = shlex.split(command, comments=True)
    if words[:3] == ["python", "-m", "anydecode"]:
        words = words[2:]
    if words[0] == "anydecode":
        with pytest.raises(SystemExit) as caught:
            main.run(words[1:])
        assert not caught.value.code, f"{where}: {command} ended with {caught.value.code}"
    elif words[0] == "python":
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
    else:
        subprocess.run(["bash", "-c", command], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", parameters(slow=False))
def test_a_page_runs(
    page: Path, page_folder: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("default_model_path")
    run(page, False, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_is_known_and_every_exception_has_a_reason(page: Path) -> None:
    found = blocks(page)
    assert page.read_text().count("\n```") == 2 * len(found), "a fence that the tests cannot read"
    for block in found:
        assert block.language in LANGUAGES, f"{name_of(page)}:{block.line}"
        is_known = block.attributes in ("", ".slow") or NO_RUN.fullmatch(block.attributes)
        assert is_known, f"{name_of(page)}:{block.line}: {block.attributes}"


def anydecode_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of `anydecode` in the shell blocks of a page, also in those that do not run,
    with the page's variables in place."""
    variables: dict[str, str] = {}
    for block in blocks(page):
        for line in commands(block.code) if block.language == "sh" else ():
            words = shlex.split(string.Template(line).safe_substitute(variables), comments=True)
            named = [word.partition("=") for word in words]
            if all(re.fullmatch("[A-Z]+", name) for name, _, _ in named):
                variables |= {name: value for name, _, value in named}
            for start in (["anydecode"], ["python", "-m", "anydecode"]):
                if words[: len(start)] == start:
                    yield f"{name_of(page)}:{block.line}: {line}", words[len(start) :]


@cache
def parser(benchmark: str = "") -> Any:
    """The command `anydecode`, or that of a benchmark, which parses its arguments and runs
    nothing."""
    command = bench.bench_command(benchmark) if benchmark else typer.main.get_command(main.app)
    waiting = [command]
    while waiting:
        one = waiting.pop()
        one.callback = None
        waiting += getattr(one, "commands", {}).values()
    return command


def parse(words: list[str]) -> None:
    """Parse the arguments of `anydecode`, and run nothing. Raises what typer raises for wrong ones,
    such as an option that the command does not have."""
    is_benchmark = words[:1] == ["bench"] and words[1] != "--help"
    command, rest = (parser(words[1]), words[2:]) if is_benchmark else (parser(), words)
    command(rest, standalone_mode=False)


def test_every_command_takes_its_options() -> None:
    pytest.importorskip("torch")  # of which modules of benchmarks have parts
    for command in (["bench", "speculative"], ["generate"]):
        with pytest.raises(Exception, match="No such option: --mehods"):
            parse([*command, "--mehods", "auto"])
    wrong = []
    for where, words in (one for page in PAGES for one in anydecode_commands(page)):
        try:
            parse(words)
        except Exception as error:
            if "does not exist" not in str(error):  # a file of the reader
                wrong.append(f"{where}: {error}")
    assert not wrong, "\n".join(wrong)


@cache
def root_command() -> Any:
    return typer.main.get_command(main.app)


def unknown_command(text: str) -> str | None:
    """The word behind `anydecode` in `text` that is no command; None if there is none."""
    command = root_command()
    for word in text.split()[1:]:
        if word == "--recipe" and isinstance(command, RecipeGroup):
            continue
        if not hasattr(command, "commands") or word.startswith("-"):
            return None
        if word not in command.commands:
            return word
        command = command.commands[word]
    return None


def test_every_command_in_the_text_exists() -> None:
    assert unknown_command("anydecode train\nschedule --minutes 60") == "schedule"
    for page in PAGES:
        for text in re.findall(r"`(anydecode [^`]+)`", FENCE.sub("", page.read_text())):
            assert unknown_command(text) is None, f"{name_of(page)}: {text}"


def test_every_command_in_the_code_exists() -> None:
    """In messages, docstrings and cards, whose parts the parser of Python joins."""
    assert unknown_command("anydecode train depth --recipe routers --steps 1") == "routers"
    for file in sorted((ROOT / "src").glob("**/*.py")):
        code = file.read_text()
        if "`anydecode " not in code:
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for text in re.findall(r"`(anydecode [a-z][^`{]+)", node.value):
                    assert unknown_command(text) is None, f"{file.name}: {text}"


def test_commands_that_make_trained_parts_exist() -> None:
    made = [FirstRouter, SpecEe, Tide, Dynamax, LayerRouters, MlpRouters]
    for one in made:
        assert unknown_command(f"anydecode train {one.command}") is None, one


def test_commands_that_train_what_is_no_recipe_of_drafters_exist() -> None:
    pytest.importorskip("torch")
    from anydecode.training.drafters import OTHERS, RECIPES, find_recipe

    assert not OTHERS.keys() & RECIPES.keys()
    for key, command in OTHERS.items():
        assert unknown_command(f"anydecode train {command}") is None, key
        assert key in catalogue.entries()
        with pytest.raises(InvalidRequestError, match=f"is trained by `anydecode train {command}`"):
            find_recipe(key)


def test_the_tutorials_show_the_examples() -> None:
    examples = {path.name: path.read_text() for path in ROOT.glob("examples/*.py")}
    shown = set()
    for page in PAGES:
        for block in blocks(page):
            if block.title in examples:
                assert block.code == examples[block.title], f"{name_of(page)}:{block.line}"
                shown.add(block.title)
    # tests/examples and tests/cluster run them
    assert set(examples) - shown == {
        "openai_client.py",
        "plan_against_a_fleet.py",
        "two_model_curve.py",
    }


def test_the_guide_shows_the_families_of_the_package() -> None:
    """The files that it shows whole and names, and the cases of tests that it names."""
    page = ROOT / "docs" / "extend" / "model-family.md"
    folder = ROOT / "src" / "anydecode" / "models" / "families" / "causal"
    shown = {block.title: block.code for block in blocks(page) if block.title}
    families = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert [shown[name] for name in shown if name in families] == [families["plm.py"]]
    rows = re.findall(r"^\| [^|]+ \| `(\w+\.py)` \|.*\| (?:`([^`]+)` in )?`(tests/[^`]+)` \|$",
                      page.read_text(), re.M)  # fmt: skip
    assert len(rows) == 5
    for file, case, test in rows:
        assert file in families
        assert f'"{case}": ' in (ROOT / test).read_text() or not case, case


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    described = set(re.findall(r"^::: anydecode\.(\w+)$", text, re.M))
    assert described == set(anydecode.__all__) - {"__version__"}


def test_limits_of_the_security_page_are_options_with_these_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.run(["serve", "--help"])
    given = re.split(r"\n  (?=-)", " ".join(capsys.readouterr().out.split("Options:")[1:]))
    help_of = {
        re.findall(r"--[\w-]+", one)[0]: " ".join(one.split()) for one in given if "--" in one
    }
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `(--[\w-]+)`: [^|]+ \| ([^|]+) \|", page, re.M)
    assert len(rows) > 5
    for option, default in rows:
        number, _, unit = default.partition(" ")
        if number.isdigit():
            factor = {"MiB": 1 << 20}.get(unit, 1)
            in_bytes, text = f"default: {int(number) * factor}", f"default: {number}{unit}"
            assert in_bytes in help_of[option] or text in help_of[option], option
        else:
            assert option in help_of
    named = set(re.findall(r"`(--[a-z-]+)", page)) & set(help_of)
    assert named >= {option for option, _ in rows} | {"--host", "--no-auth", "--allow-host"}


def test_links_between_pages_hold() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            is_generated = "methods/" in target
            assert is_generated or os.path.exists(page.parent / target), (
                f"{name_of(page)}: {target}"
            )
