"""Packaging: fast import, version, dependencies, and the contents of wheels."""

from __future__ import annotations

import builtins
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import anydecode
from anydecode.errors import MissingPackageError, UnsupportedCombinationError
from anydecode.folders import default_cache
from anydecode.kernels import build, library, pages
from anydecode.models.opening import choose_executor


def build_hook_module(repository: Path) -> ModuleType:
    """Load `hatch_build.py` with a stand-in for hatchling, which need not be installed."""
    parent = ModuleType("hatchling.builders.hooks.plugin.interface")
    parent.BuildHookInterface = object  # type: ignore[attr-defined]
    sys.modules.setdefault(parent.__name__, parent)
    spec = importlib.util.spec_from_file_location("hatch_build", repository / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_hook(module: ModuleType, repository: Path, version: str = "standard") -> dict[str, Any]:
    """The build data that the hook sets, and its warnings."""
    hook = module.KernelBuildHook()
    warnings: list[str] = []
    hook.root = str(repository)
    hook.app = SimpleNamespace(display_warning=warnings.append)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    return {**data, "warnings": warnings}


def test_import_is_fast_and_llm_is_lazy() -> None:
    program = (
        "import sys, anydecode; print('torch' in sys.modules, 'numpy' in sys.modules);"
        "from anydecode import LLM; print('torch' in sys.modules, LLM.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["False False", "False anydecode.api.llm"]


def test_decoding_imports_no_package_that_it_does_not_need() -> None:
    """Each import takes from tenths of a second to several. `tokenizers` is a positive control."""
    others = {
        "fastapi",
        "jedi",
        "llguidance",
        "lm_eval",
        "pydantic",
        "ray",
        "torch",
        "transformers",
    }
    program = (
        "import sys; from anydecode import LLM;"
        "LLM('tiny-autoregressive', threads=1).generate('for', max_tokens=1);"
        f"print(sorted({others | {'tokenizers'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['tokenizers']\n", done.stderr


def listed(repository: Path, name: str) -> list[str]:
    """The requirements in the list `name` of pyproject.toml."""
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r'"([^"]+)"', match[1])


def pins(path: Path) -> dict[str, set[str]]:
    """The versions of every package in a file of constraints or a lock file."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text("utf-8"), re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


@pytest.mark.parametrize(
    ("file", "lists"),
    [
        ("requirements.lock", ["dependencies", "telemetry"]),
        ("requirements-build.lock", ["requires", "release"]),
    ],
)
def test_lock_files_have_what_the_project_needs_in_the_tested_versions(
    repository: Path, file: str, lists: list[str]
) -> None:
    locked, tested = pins(repository / file), pins(repository / "constraints.txt")
    for requirement in map(Requirement, sum((listed(repository, name) for name in lists), [])):
        versions = locked[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    for name, versions in locked.items():
        assert versions <= tested.get(name, versions), f"{name}: run `make lock`"
    entries = re.split(r"^(?=\w)", (repository / file).read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert len(entries) >= len(locked) > 10
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)


def test_workflows_use_actions_by_their_commits(repository: Path) -> None:
    for path in repository.glob(".github/workflows/*.yml"):
        for action in re.findall(r"uses: (?!\./)(.*)", path.read_text("utf-8")):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_releases_are_built_of_pinned_packages_and_attested_with_an_sbom(repository: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((repository / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    for name in ("wheel", "source", "check", "sbom"):
        text = "\n".join(step.get("run", "") for step in jobs[name]["steps"])
        installs = re.findall(r"pip .*install (.*)", text)
        assert installs and all(
            one.startswith(("--require-hashes -r requirements", "--no-deps dist/"))
            for one in installs
        ), installs
    publish = jobs["publish"]
    assert {"tests", "wheel", "source", "check", "sbom"} <= set(publish["needs"])
    assert publish["permissions"]["attestations"] == "write"
    attested = [
        step["with"] for step in publish["steps"] if step["uses"].startswith("actions/attest@")
    ]
    assert {"subject-path": "dist/*"} in attested
    assert {"subject-path": "dist/*.whl", "sbom-path": "sbom.cdx.json"} in attested


def test_the_tested_wheel_is_installed_with_locked_packages(repository: Path) -> None:
    text = (repository / "Makefile").read_text("utf-8").partition("\ntest-wheel:")[2]
    installs = re.findall(r"-m pip .*install .*", text.partition("\n\n")[0])
    assert len(installs) == 2
    assert installs[0].endswith("--require-hashes -r requirements.lock")
    assert "--no-deps" in installs[1]
    assert "make test-wheel\n" in (repository / ".ci/run").read_text("utf-8")


def core_distributions(repository: Path) -> set[str]:
    """The distributions that `pip install anydecode` installs, without extras."""
    pending = listed(repository, "dependencies")
    names: set[str] = set()
    while pending:
        requirement = Requirement(pending.pop())
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # required in other environments only
            continue
        names.add(name)
        pending += requirements
    return names


BARE_INSTALL = """
import json, sys, urllib.request
from importlib.abc import MetaPathFinder

HIDDEN = set(json.loads(sys.argv[1]))

class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
from anydecode import LLM, Grammar, JsonSchema
from anydecode.server.running import LiveServer
from anydecode.server.settings import Settings

schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}
with LLM("tiny-autoregressive", threads=1) as llm:
    answer = llm.generate("x", max_tokens=40, constraint=JsonSchema(schema)).text
    assert type(json.loads(answer)["a"]) is bool, answer
    llm.generate("x", max_tokens=4, constraint=Grammar('root ::= "ab"', syntax="gbnf"))
    with LiveServer(llm, Settings(port=0)) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(server.url + "/v1/completions", body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        print(json.load(opener.open(request))["usage"]["completion_tokens"])
"""


@pytest.mark.slow
def test_constraints_and_the_server_need_no_extras(repository: Path) -> None:
    """In a process that can import the core dependencies only."""
    core = core_distributions(repository)
    assert {"numpy", "starlette"} <= core and not {"pytest", "torch", "xgrammar"} & core
    hidden = [
        module
        for module, owners in metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*core, "anydecode"}
    ]
    program = [sys.executable, "-c", BARE_INSTALL, json.dumps(hidden)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need rights")
def test_a_command_needs_no_folder_that_can_be_written(tmp_path: Path) -> None:
    """Nothing can be created where the measured costs belong, nor in the home folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "costs").write_text("where a folder should be")
    if (default_cache() / "kernels").exists():
        (home / "kernels").symlink_to(default_cache() / "kernels")
    environment = {**os.environ, "ANYDECODE_HOME": str(home), "HOME": str(home / "costs")}
    command = ["generate", "--model", "tiny-autoregressive", "--max-tokens", "4", "--json", "for"]
    done = subprocess.run(
        [sys.executable, "-m", "anydecode", *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_tokens"] > 0
    (notice,) = done.stderr.splitlines()
    assert "costs of passes are not saved" in notice and "ANYDECODE_HOME" in notice


WITHOUT_POSIX = """
import importlib.util, sys, typing
import numpy, tokenizers, rich, typer  # imported before the removal below
if importlib.util.find_spec("torch"):
    import torch
import mmap, os, select, signal

GONE = {
    os: "fork forkpty register_at_fork sysconf sched_getaffinity getloadavg getuid geteuid getgid"
    " uname posix_fadvise pread preadv pwrite killpg getpgid setsid nice mkfifo chown O_DIRECTORY",
    mmap: "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MADV_HUGEPAGE PROT_READ PROT_WRITE",
    select: "poll epoll",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGALRM SIGPIPE alarm pthread_sigmask",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None
import anydecode
from anydecode.cli.main import run
run(sys.argv[1:])
"""


def run_without_posix(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process without the POSIX functions and modules."""
    program = [sys.executable, "-c", WITHOUT_POSIX, *arguments]
    return subprocess.run(program, capture_output=True, text=True, **settings)


_SLOW = [["--help"], ["methods"], ["bench", "--help"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["serve", "--help"],
        *(pytest.param(one, marks=pytest.mark.slow) for one in _SLOW),
    ],
)
def test_commands_start_without_posix(arguments: list[str]) -> None:
    done = run_without_posix(*arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.slow
def test_without_posix_and_compiler_the_torch_kernels_are_used_with_a_notice() -> None:
    pytest.importorskip("torch")
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    command = ["generate", "--model", "tiny-autoregressive", "--max-tokens", "4", "--json", "for"]
    done = run_without_posix(*command, env={**environment, "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_tokens"] > 0
    (notice,) = [line for line in done.stderr.splitlines() if "C compiler" in line]
    assert notice.startswith("anydecode: no C compiler was found")
    assert notice.endswith("the slower torch kernels are used")
    rejected = run_without_posix(*command, "--backend", "native", env={**environment, "PATH": ""})
    assert rejected.returncode == 2 and "native kernels are not available" in rejected.stderr


def test_physical_memory_is_read_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_status(pointer: Any) -> int:
        status = pointer._obj
        assert status.length == 64  # the size of a MEMORYSTATUSEX
        status.total = 17 << 30
        return 1

    api = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=memory_status))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(pages.ctypes, "windll", api, raising=False)
    assert pages.memory_bytes() == 17 << 30


def test_physical_memory_is_none_where_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.memory_bytes()
    monkeypatch.delattr(os, "sysconf")
    assert pages.memory_bytes() is None


def test_a_library_that_cannot_be_loaded_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "built_library", lambda: broken)
    pytest.importorskip("torch")
    with pytest.warns(UserWarning, match="could not be loaded.*slower torch kernels are used"):
        assert library.load_library.__wrapped__() is None


def test_the_warning_does_not_promise_torch_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "built_library", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.warns(UserWarning) as caught:
        assert library.load_library.__wrapped__() is None
    assert str(caught[0].message) == (
        "no C compiler was found (install one, or the ziglang package); torch is not installed"
        " either"
    )


def test_without_torch_and_compiled_kernels_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None;"
        "from anydecode.cli.main import run; run(sys.argv[1:])"
    )
    command = ["generate", "--model", "tiny-autoregressive", "--max-tokens", "4", "for"]
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    for extra, expected in (
        ([], "without compiled kernels (install a C compiler or the package ziglang) needs torch"),
        (["--backend", "torch"], "the torch backend needs torch"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *command, *extra],
            capture_output=True,
            text=True,
            env={**environment, "PATH": ""},
        )
        assert done.returncode == 2 and done.stdout == ""
        error = done.stderr.splitlines()[-1]
        assert expected in error and error.endswith("pip install 'anydecode[torch]'"), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("2.4.1+cpu", None, "needs torch from 2.11 to below 3, and 2.4.1\\+cpu is installed"),
        ("3.0.0", None, "and 3.0.0 is installed"),
        ("nightly", None, "and nightly is installed"),
        ("", OSError("libtorch.so: illegal\ninstruction"), "is broken .libtorch.so: illegal inst"),
    ],
)
def test_an_unknown_or_broken_torch_is_one_line(
    version: str, error: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Torch(ModuleType):
        def __getattr__(self, name: str) -> str:
            if name == "__version__":
                return version
            raise AttributeError(name)

    def imported(name: str, *rest: Any) -> Any:
        if name == "torch" and error is not None:
            raise error
        return importer(name, *rest)

    importer = builtins.__import__
    monkeypatch.setattr("anydecode.models.opening.has_torch", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", Torch("torch"))
    monkeypatch.setattr(builtins, "__import__", imported)
    with pytest.raises(UnsupportedCombinationError, match=message) as caught:
        choose_executor("torch")
    assert "\n" not in str(caught.value) and "pip install" in str(caught.value)


def test_cuda_without_torch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError, match=r"needs torch.*anydecode\[torch\]"):
        choose_executor(device="cuda")
    with pytest.raises(UnsupportedCombinationError, match="package torch is not installed"):
        choose_executor("triton")


def test_public_names_resolve() -> None:
    for name in anydecode.__all__:
        assert getattr(anydecode, name) is not None
        assert name in dir(anydecode)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = anydecode.nonsense


def test_the_logger_has_only_a_null_handler() -> None:
    handlers = logging.getLogger("anydecode").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]


def test_the_version_is_semantic_and_has_a_changelog_entry(repository: Path) -> None:
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", anydecode.__version__)
    assert release is not None
    assert f"## {release[1]}" in (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (repository / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {release[1]}" in citation


def test_the_package_is_marked_as_typed(repository: Path) -> None:
    assert (repository / "src" / "anydecode" / "py.typed").is_file()


def test_readme_commands_are_targets_of_the_makefile(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)


def test_constraints_pin_torch_and_no_cuda_library(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all("==" in pin for pin in pins)
    assert not [pin for pin in pins if re.match(r"nvidia|cuda", pin)]


def test_a_failed_build_leaves_a_pure_wheel(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build_hook_module(repository)
    monkeypatch.setenv("ANYDECODE_BUILD", "auto")
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    data = run_hook(module, repository)
    assert data["force_include"] == {} and "tag" not in data
    assert len(data["warnings"]) == 1 and "torch reference" in data["warnings"][0]
    monkeypatch.setenv("ANYDECODE_BUILD", "always")
    with pytest.raises(OSError):
        run_hook(module, repository)


def test_a_built_library_makes_a_platform_wheel(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build_hook_module(repository)
    monkeypatch.delenv("ANYDECODE_BUILD", raising=False)
    monkeypatch.setenv("ANYDECODE_PLATFORM", "manylinux_2_17_x86_64")
    monkeypatch.setattr(module, "build_library", lambda root, out_dir: out_dir / "libanydecode.so")
    data = run_hook(module, repository)
    assert data["tag"] == "py3-none-manylinux_2_17_x86_64" and data["pure_python"] is False
    assert list(data["force_include"].values()) == ["anydecode/kernels/cpu/libanydecode.so"]
    assert run_hook(module, repository, "editable")["force_include"] == {}


def test_the_kernels_use_the_library_path_of_the_wheel(repository: Path) -> None:

    assert build.SOURCES == repository / "src" / "anydecode" / "kernels" / "cpu"
    assert callable(build.compile_library) and callable(build.find_compiler)


def test_every_platform_tag_is_cross_compiled(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    workflow = (repository / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    names = []
    for tag, target in build.TARGETS.items():
        assert f"- {tag}\n" in workflow
        assert f"- {{ tag: {tag}, machine:" in workflow
        names.append(build.compile_for(tag, tmp_path / tag).name)
        assert all(command[2:5] == ["ziglang", "cc", "-target"] for command in commands)
        assert {command[5] for command in commands} == {target}
        options = {option for command in commands for option in command}
        assert ("-DVARIANT=neon_dot" in options) == target.startswith("aarch64")
        assert ("-pthread" in options) == ("windows" not in target)
        link = commands[-1]  # no paths of the build machine in the library
        assert "-s" in link and all("-g0" in command for command in commands[:-1])
        assert ("-Wl,-install_name,@rpath/libanydecode.dylib" in link) == ("macos" in target)
        commands.clear()
    assert [name.rpartition(".")[2] for name in names] == [
        "so",
        "so",
        "dylib",
        "dylib",
        "dll",
        "dll",
    ]
