"""Finds and downloads models of the Hugging Face hub, with `huggingface_hub` and its cache.

Its offline mode (`HF_HUB_OFFLINE`) is respected; its telemetry is disabled during the calls.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anydecode.errors import AnydecodeError, ModelNotFoundError
from anydecode.models.file_tokenizers import TOKENIZER_FILES
from anydecode.models.loading.gguf_split import first_parts, part_names
from anydecode.models.loading.torch_file import HEADS, heads_file

#: The files of a checkpoint; files of other frameworks are not downloaded, and pickled weights only
#: if they are those of heads that open.
_FOLDER = [
    "*.json",
    "*.jinja",
    *TOKENIZER_FILES,
    "merges.txt",
    "rwkv_vocab_*.txt",
    "*.safetensors",
    *HEADS,
]
#: The files of a module of sentence-transformers, whose folder has its number (1_Pooling).
_MODULES = ["[0-9]_*/config.json", "[0-9]_*/model.safetensors"]
#: The weights once more, in the layout of Mistral's own code.
_DUPLICATES = "consolidated*.safetensors"
#: The preferred GGUF file of a repo that has several, best first.
_PREFERRED = (
    "Q4_K_M", "Q4_K_S", "MXFP4", "Q4_1", "IQ4_NL", "IQ4_XS", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0",
    "NVFP4", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K",
    "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "BF16", "F16", "F32",
)  # fmt: skip

Progress = Callable[[int, int], None]


def find(name: str) -> Path | None:
    """The path of `owner/name` or `owner/name:FILE` in the hub's cache; None if it is not there."""
    repo, _, choice = name.partition(":")
    with _quiet_hub() as hub:
        try:
            folder = Path(hub.snapshot_download(repo, local_files_only=True))
        except (OSError, ValueError, hub.errors.LocalEntryNotFoundError):
            return None
    return _model_path(folder, choice)


def fetch(name: str, progress: Progress | None) -> Path:
    """Download a repo's safetensors, configuration and tokenizer, or one of its GGUF files.

    Args:
        name: `owner/name` or `owner/name:FILE`.
        progress: Called with the bytes done and the total bytes.

    Raises:
        ModelNotFoundError: The hub has no such model, or it is gated, or the hub is offline.
        AnydecodeError: The download failed.
    """
    repo, _, choice = name.partition(":")
    with _quiet_hub() as hub:
        try:
            entries = hub.HfApi().model_info(repo, files_metadata=True).siblings or []
            sizes = {entry.rfilename: entry.size or 0 for entry in entries}
            selected = _files_to_fetch(repo, list(sizes), choice)
            total = sum(sizes[file] for file in selected)
            folder = Path(
                hub.snapshot_download(
                    repo, allow_patterns=selected, tqdm_class=_progress_class(progress, total)
                )
            )
        except AnydecodeError:
            raise
        except Exception as error:  # httpx, requests and the hub raise exceptions of their own
            raise _fetch_error(hub, repo, error) from None
    if progress is not None:
        progress(total, total)
    found = _model_path(folder, choice)
    if found is None:
        raise ModelNotFoundError(f"{repo} contains no supported model")
    return found


@contextmanager
def _quiet_hub() -> Iterator[Any]:
    """`huggingface_hub` with its telemetry disabled."""
    import huggingface_hub as hub
    import huggingface_hub.constants
    import huggingface_hub.errors  # noqa: F401  (neither is imported otherwise)

    before = hub.constants.HF_HUB_DISABLE_TELEMETRY
    hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield hub
    finally:
        hub.constants.HF_HUB_DISABLE_TELEMETRY = before


def _files_to_fetch(repo: str, files: list[str], choice: str) -> list[str]:
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    weights = [file for file in files if fnmatch(file, "*.safetensors")]
    if choice or not (weights or set(HEADS).intersection(files)):
        chosen = _choose(ggufs, choice)
        if chosen is None:
            listed = f" among {', '.join(ggufs[:12])}" if ggufs else ""
            what = f"no GGUF file {choice!r}" if choice else "neither safetensors nor GGUF files"
            raise ModelNotFoundError(f"{repo} has {what}{listed}")
        return part_names(chosen)
    has_others = any("/" not in file and not fnmatch(file, _DUPLICATES) for file in weights)
    return [
        file
        for file in files
        if any(fnmatch(file, pattern) for pattern in (_MODULES if "/" in file else _FOLDER))
        and not (has_others and fnmatch(file, _DUPLICATES))
    ]


def _choose(ggufs: list[str], choice: str) -> str | None:
    """The GGUF file whose name contains `choice`, or the preferred one without a choice."""
    candidates = [file for file in first_parts(ggufs) if "mmproj" not in file.lower()]
    for kind in (choice,) if choice else _PREFERRED:
        for file in candidates:
            if kind.lower() in Path(file).name.lower():
                return file
    return None if choice or not candidates else candidates[0]


def _model_path(folder: Path, choice: str) -> Path | None:
    ggufs = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.gguf"))
    has_weights = any(folder.glob("*.safetensors")) or heads_file(folder) is not None
    if not choice and (folder / "config.json").is_file() and has_weights:
        return folder
    chosen = _choose(ggufs, choice)
    return folder / chosen if chosen is not None else None


def _progress_class(progress: Progress | None, total: int) -> type:
    """A subclass of tqdm that reports bytes to `progress` and prints nothing.

    The hub counts the same bytes in one bar when they arrive and in another when they are written;
    the larger count is reported.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

    furthest = 0

    class Reporter(tqdm):  # type: ignore[misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # some versions of the hub pass a name
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            self.n += n or 0  # a disabled bar does not count
            if self.counts_bytes and progress is not None:
                furthest = max(furthest, min(total, int(self.n)))
                progress(furthest, total)

    return Reporter


def _fetch_error(hub: Any, repo: str, error: Exception) -> AnydecodeError:
    import httpx

    errors = hub.errors
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return AnydecodeError(f"the disk is full; {repo} was not fetched")
    if isinstance(error, errors.OfflineModeIsEnabled) or hub.constants.HF_HUB_OFFLINE:
        return ModelNotFoundError(f"{repo} is not on this machine and HF_HUB_OFFLINE is set")
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(f"{repo} is gated: accept its terms on the hub and log in")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"the Hugging Face hub has no model {repo} that you may read")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, httpx.TransportError):
        return AnydecodeError(
            f"the Hugging Face hub cannot be reached; {repo} was not fetched: {reason}"
        )
    return AnydecodeError(f"{repo} could not be fetched from the Hugging Face hub: {reason}")
