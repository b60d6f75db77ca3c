"""Opens models through `transformers`, which implements more architectures."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydecode.errors import (
    CheckpointError,
    InvalidRequestError,
    MissingPackageError,
    UnsupportedCombinationError,
    one_line,
)
from anydecode.models.files import folder_name
from anydecode.models.loading import resolve
from anydecode.models.tokenizer import end_tokens

if TYPE_CHECKING:
    from anydecode.models.hf import HuggingFaceModel
    from anydecode.models.tokenizers import HFTokenizer

#: The name of this way in place of a backend's.
BACKEND = "transformers"
_DTYPES = (None, "float32", "float16", "bfloat16")


def open_through_transformers(
    model: Any, dtype: Any = None, device: str | None = None
) -> tuple[HuggingFaceModel, HFTokenizer]:
    """Open a folder or a GGUF file as a causal model of `transformers`. Code of the repository is
    not run. A warning of one line says what the model lacks.

    Args:
        model: A name, a folder or a GGUF file, whose weights `transformers` converts to `dtype`.
        dtype: "float32", "float16", "bfloat16" or None (as stored).
        device: "cpu" or "cuda"; None means "cpu".

    Raises:
        MissingPackageError: `transformers` or torch is not installed.
        ModelNotFoundError: There is no model of this name.
        InvalidRequestError: `dtype` is another format.
        CheckpointError: `transformers` cannot open the model.
    """
    try:
        import transformers

        from anydecode.models.hf import HuggingFaceModel
    except ImportError:
        raise MissingPackageError(f"backend={BACKEND!r}", BACKEND, "'anydecode[hf]'") from None
    from anydecode.models.tokenizers import HFTokenizer

    if dtype not in _DTYPES:
        raise InvalidRequestError(
            f"dtype={dtype!r} is not possible with backend={BACKEND!r}; choose float32, float16 or"
            " bfloat16"
        )
    path = resolve(model)
    folder = path
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.is_file():
        folder, options["gguf_file"] = path.parent, path.name
    bars = transformers.utils.logging
    with suppress(ImportError):  # its bar for the tensors of a GGUF file does not obey the switch
        import_module("transformers.modeling_gguf_pytorch_utils").tqdm = bars.tqdm  # type: ignore[attr-defined]
    has_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    # Each architecture has errors of its own.
    except Exception as error:
        raise CheckpointError(f"{path}: transformers cannot open it: {one_line(error)}") from None
    finally:
        if has_bars:
            bars.enable_progress_bar()
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedCombinationError(
            f"{path}: its tokenizer is no fast one of transformers; pass tokenizer="
        )
    warnings.warn(_lacks(path), stacklevel=2)
    wrapped = HuggingFaceModel(opened.to(device or "cpu"))
    ends = end_tokens(wrapped.generation_config)
    return wrapped, HFTokenizer.from_transformers(tokenizer, ends)


def _lacks(path: Path) -> str:
    return (
        f"{folder_name(path)} runs through transformers: slower, its text may depend on the batch,"
        " and methods that read or skip layers, adapters and dtype='int4' or 'int8' are refused"
    )
