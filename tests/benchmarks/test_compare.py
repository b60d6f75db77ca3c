"""The comparison of the work tree with a commit: worktrees, intervals, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anydecode.benchmarks import compare
from anydecode.benchmarks.baselines import Worker
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command, as a committer without a configuration."""
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    environment = {**os.environ, **dict.fromkeys(names, "someone")}
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two commits of a package `anydecode`, which is changed since."""
    package = tmp_path / "repository" / "src" / "anydecode"
    package.mkdir(parents=True)
    folder = tmp_path / "repository"
    git(folder, "init", "-q")
    for text in ("first", "second"):
        (package / "version.py").write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", text)
    (package / "version.py").write_text("changed")
    return folder


def test_the_commit_is_checked_out_and_removed(tree: Path) -> None:
    with compare.checkout("HEAD~1", tree) as folder:
        assert (folder / "src" / "anydecode" / "version.py").read_text() == "first"
        assert len(git(tree, "worktree", "list").splitlines()) == 2
    assert not folder.exists()
    assert len(git(tree, "worktree", "list").splitlines()) == 1
    assert (tree / "src" / "anydecode" / "version.py").read_text() == "changed"


def test_the_worktree_is_removed_after_an_error(tree: Path) -> None:
    with pytest.raises(RuntimeError), compare.checkout("HEAD", tree):
        raise RuntimeError
    assert len(git(tree, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("ref", ["nothing", "--all", ""])
def test_an_unknown_commit_is_refused(tree: Path, ref: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no commit of .* give a hash"):
        with compare.checkout(ref, tree):
            raise AssertionError("the commit does not exist")


def test_other_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match="not a git repository"):
        run_bench("compare", ["--ref", "HEAD"])
    git(tmp_path, "init", "-q")
    with pytest.raises(InvalidRequestError, match="is not a source tree of anydecode"):
        run_bench("compare", ["--ref", "HEAD"])


def test_the_interval_is_that_of_paired_ratios() -> None:
    theirs = [1.0, 10.0, 100.0, 1000.0]
    result = compare.ratio_interval([2 * value for value in theirs], theirs)
    assert result["ratio"] == pytest.approx(2)
    assert result["interval"] == pytest.approx([2, 2])
    low, high = compare.ratio_interval([0.9, 12.0, 90.0, 1200.0], theirs)["interval"]
    assert low < 1 < high and low * high == pytest.approx(0.9 * 1.2)


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 3.182), (9, 2.262), (30, 2.042)])
def test_quantiles_of_students_t(degrees: int, quantile: float) -> None:
    assert compare.t_quantile(degrees) == pytest.approx(quantile, rel=0.01)


class Process:
    """A worker that answers at once, twice as fast in the work tree as in the commit."""

    running: list[str] = []
    order: list[str] = []

    def __init__(self, *arguments: Any, environment: dict[str, str], **options: Any) -> None:
        self.missing = None
        self.timeout = 0.0
        self.tree = environment["PYTHONPATH"]
        self.running.append(self.tree)

    def ask(self, tokens: int, prompts: tuple[str, ...] = (), **request: Any) -> dict[str, Any]:
        self.order.append(self.tree)
        duration = 2.0 if "anydecode-compare" in self.tree else 1.0
        num_tokens = tokens * max(1, len(prompts))
        return {"tokens": num_tokens, "total": duration, "first": duration, "prompt_tokens": 512,
                "peak_memory": duration * 2**20}  # fmt: skip

    def close(self) -> None:
        self.running.remove(self.tree)


def test_the_versions_are_measured_in_alternating_order(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setattr(compare, "Worker", Process)
    monkeypatch.setattr(compare, "seconds_to_serve", lambda name, *_: 1.0)
    file = tree.parent / "report.json"
    run_bench("compare", ["--ref", "HEAD", "--rounds", "4", "--json", str(file)])
    report = json.loads(file.read_text())
    ratios = {row["name"]: row["ratio"] for row in report["measures"]}
    assert ratios.pop("start-up to the first token") > 0
    assert ratios == {
        "plain decoding": 2,
        "prefill of 512": 2,
        "auto, alone": 2,
        "auto, 8 together": 2,
        "peak memory": 0.5,
        "server ready": 1,
    }
    assert not Process.running
    per_version = len(Process.order) // 10  # a warm-up and four rounds of two versions
    firsts = [Process.order[2 * per_version * (1 + number)] for number in range(4)]
    assert [("compare" in path) for path in firsts] == [False, True, False, True]
    assert "peak memory" in capsys.readouterr().out


def test_a_version_that_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "src" / "anydecode").mkdir(parents=True)
    (tmp_path / "src" / "anydecode" / "__init__.py").write_text("raise ImportError('broken')")
    with pytest.raises(InvalidRequestError, match="HEAD~9 cannot be measured: ImportError: broken"):
        compare.measure_round({"HEAD~9": tmp_path}, "model", 1, 2)


def test_workers_are_real_processes_of_the_given_tree(tmp_path: Path) -> None:
    package = tmp_path / "anydecode"
    package.mkdir()
    (package / "__init__.py").write_text(
        "__version__ = 'of the tree'\nclass LLM:\n    def __init__(self, *a, **b): pass"
    )
    worker = Worker("anydecode", "m", 1, sys.executable, environment={"PYTHONPATH": str(tmp_path)})
    worker.close()
    assert worker.hello["version"] == "of the tree"
