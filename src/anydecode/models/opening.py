"""Opens a model from a name, a path, a checkpoint or a model object."""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from anydecode.errors import (
    CheckpointError,
    InvalidRequestError,
    MissingPackageError,
    UnsupportedCombinationError,
)
from anydecode.kernels import ptq161
from anydecode.kernels.host import has_torch
from anydecode.kernels.native import NativeExecutor, thread_count
from anydecode.kernels.packing import Packer
from anydecode.models import (
    accelerators,
    acceptance_head,
    exit_predictors,
    exit_routers,
    future_masks,
    hidden_transfer,
    judge,
    layer_routers,
    mlp_routers,
    sentence_diffusion,
    through_transformers,
)
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.classification import read_classifier
from anydecode.models.ffn_split import ModelSplit, OpenOptions
from anydecode.models.files import untrusted
from anydecode.models.interface import Model
from anydecode.models.limits import refusal
from anydecode.models.network import Network
from anydecode.models.spec import ModelSpec
from anydecode.models.task_files import read_tasks
from anydecode.models.tokenizer import Tokenizer, end_tokens
from anydecode.models.transformer import Executor
from anydecode.models.yes_no import read_yes_no

BACKENDS = ("native", "torch", "triton")
#: What was trained for a model, by the model's attribute: the file or folder in that of the model,
#: and how it is read.
_TRAINED_PARTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "exit_routers": (exit_routers.FILE_NAME, exit_routers.ExitRouters.load),
    "exit_predictors": (exit_predictors.FILE_NAME, exit_predictors.ExitPredictors.load),
    "accelerators": (accelerators.FILE_NAME, accelerators.Accelerators.load),
    "layer_routers": (layer_routers.FILE_NAME, layer_routers.LayerRouters.load),
    "mlp_routers": (mlp_routers.FILE_NAME, mlp_routers.MlpRouters.load),
    "future_masks": (future_masks.FOLDER_NAME, future_masks.FutureMasks.load),
    "sentence_diffusion": (sentence_diffusion.FILE_NAME, sentence_diffusion.SentenceDiffusion.load),
    "hidden_transfer": (hidden_transfer.FILE_NAME, hidden_transfer.HiddenTransfer.load),
    "judge": (judge.FILE_NAME, judge.Judge.load),
    "acceptance_head": (acceptance_head.FILE_NAME, acceptance_head.AcceptanceWeights.load),
}


class WeightFormat(ABC):
    """A weight format that a method of its own produces (quantisation with calibration, say)."""

    @property
    @abstractmethod
    def dtype(self) -> str | None:
        """The resulting number format, as `dtype` names it; None means as stored."""

    @abstractmethod
    def open(self, model: Any, **options: Any) -> tuple[Model, Tokenizer | None]:
        """Open the model of a name, a folder or a file in this format; `options` as for
        `open_model`."""


def choose_executor(
    backend: str | None = None,
    threads: int | None = None,
    device: str | None = None,
    packer: Packer | None = None,
) -> Callable[[Network], Executor]:
    """The executor that runs a network, as a factory.

    Args:
        backend: "native", "torch" or "triton". None means the environment variable
            ANYDECODE_BACKEND if it is set. Otherwise the compiled kernels ("native") run on the CPU
            and the Triton kernels on CUDA, each if available, and else torch.
        threads: The number of threads of the native kernels.
        device: "cpu" or "cuda"; None means "cpu".
        packer: The native kernels' packer of another network with which this one shares weights.

    Raises:
        InvalidRequestError: An unknown backend or device, or a wrong number of threads.
        UnsupportedCombinationError: The backend is not available, or not on this device.
        MissingPackageError: Only torch could run here, and it is not installed.
    """
    thread_count(threads)  # also validated for backends that do not use it
    requested = backend or os.environ.get("ANYDECODE_BACKEND") or None
    if requested not in (None, *BACKENDS):
        raise InvalidRequestError(
            f"backend {requested!r} is unknown; choose from {', '.join(BACKENDS)}, or transformers"
            " for folders of models without an implementation here"
        )
    device_type = str(device or "cpu").partition(":")[0]
    if device_type not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device {device!r} is unknown; choose cpu or cuda")
    is_cuda = device_type == "cuda"
    if is_cuda and requested == "native":
        raise UnsupportedCombinationError("the native kernels run on the CPU, not on cuda")
    if requested == "triton" or (is_cuda and requested is None):
        triton = _triton_executor(requested, device)
        return triton or torch_executor(device)
    if requested == "torch":
        return torch_executor(device)
    from anydecode.kernels.library import load_library

    if load_library() is None:
        if requested == "native":
            raise UnsupportedCombinationError("the native kernels are not available here")
        check_torch(
            "a model without compiled kernels (install a C compiler or the package ziglang)"
        )
        return torch_executor(device)

    def execute(network: Network) -> Executor:
        return NativeExecutor(
            network.weights.embedding,
            network.spec.num_logits,
            network.spec.num_layers,
            network.layer,
            network.head,
            embedding_scale=network.spec.embedding_scale,
            reads_states=network.spec.starts_from_states,
            carries_states=network.carries_states,
            head_tokens=network.weights.head_tokens,
            width=network.width,
            packer=packer,
            adapters=network.adapters,
            threads=threads,
            free_weights=True,
        )

    return execute


def _triton_executor(
    requested: str | None, device: str | None
) -> Callable[[Network], Executor] | None:
    from anydecode.kernels.cuda.available import unavailable_reason

    problem = unavailable_reason()
    if problem is not None:
        if requested:
            raise UnsupportedCombinationError(f"the Triton kernels cannot run here: {problem}")
        return None

    def execute(network: Network) -> Executor:
        shapes = [layer.attention for layer in network.spec.layers if layer.attention is not None]
        if network.spec.recurrences:
            raise UnsupportedCombinationError(
                "recurrent layers run on the CPU only; use device='cpu'"
            )
        missing = ""
        if any(weight.format == ptq161.FORMAT for weight in network.matrices()):
            missing = "PTQ161"
        elif any(layer.has_sinks for layer in network.spec.layers):
            missing = "attention sinks (gpt-oss)"
        elif any(shape.is_two_sided for shape in shapes):
            missing = "windows or linear biases on both sides (ModernBERT, Jina BERT)"
        elif any(layer.has_relative_positions for layer in network.spec.layers):
            missing = "disentangled attention (DeBERTa)"
        elif any(layer.bias_reach for layer in network.spec.layers):
            missing = "biases by distance (MPNet)"
        elif any(shape.slopes is not None for shape in shapes):
            missing = "linear biases of attention (ALiBi)"
        elif any(shape.latent_dim is not None for shape in shapes):
            missing = "latent attention (DeepSeek)"
        elif any(shape.top_k is not None for shape in shapes):
            missing = "attention to selected positions (MiniMax-M3)"
        elif any(shape.value_size is not None for shape in shapes):
            missing = "values of fewer numbers than keys (MiMo-V2)"
        elif any(shape.chunk is not None for shape in shapes):
            missing = "chunked attention (Llama 4)"
        elif any(layer.cache_layer is not None for layer in network.spec.layers):
            missing = "layers that share keys and values (Gemma 4)"
        elif network.spec.num_streams > 1:
            missing = "several streams of hidden states (Gemma 3n)"
        elif any(layer.is_differential for layer in network.spec.layers):
            missing = "differential attention (Phi-4-mini-flash)"
        elif any(layer.memory in ("joins", "swaps") for layer in network.spec.layers):
            missing = "stacks of layers with a state each (HRM-Text)"
        elif any(layer.has_residual_gates for layer in network.spec.layers):
            missing = "residual gates (Muse Spark)"
        elif any(x.routing and x.routing.block_experts for x in network.spec.layers):
            missing = "experts that are chosen per block (LLaDA2.2)"
        elif network.spec.per_layer_size:
            missing = "embeddings of tokens in every layer (Gemma 4)"
        elif any(layer.has_value_norm for layer in network.spec.layers):
            missing = "norms of values (Gemma 4)"
        elif network.spec.states is not None:
            missing = "drafters that read states (EAGLE, DFlash)"
        if missing:
            if not requested:
                return torch_executor(device)(network)
            raise UnsupportedCombinationError(
                f"the Triton kernels do not support {missing}; use backend='torch', or the native"
                " kernels on the CPU"
            )
        from anydecode.kernels.cuda.executor import TritonExecutor

        executor = TritonExecutor(
            network.weights.embedding,
            network.spec.vocab_size,
            network.layer,
            network.head,
            shapes,
            matrices=network.matrices(),
            embedding_scale=network.spec.embedding_scale,
            adapters=network.adapters,
        )
        network.release_matrices()
        return executor

    return execute


def open_tokenizer(tokenizer: Any, model: Model) -> Tokenizer | None:
    """Wrap a fast tokenizer of `transformers`; the texts end also at the end-of-text tokens of the
    model's generation config. An object with anydecode's Tokenizer protocol is returned as it is.

    Raises:
        CheckpointError: The model's end-of-text tokens are no integers.
        InvalidRequestError: The object is neither.
    """
    if tokenizer is None or hasattr(tokenizer, "token_bytes"):
        own: Tokenizer | None = tokenizer
        return own
    if hasattr(tokenizer, "backend_tokenizer"):
        from anydecode.models.tokenizers import HFTokenizer

        config = getattr(model, "generation_config", {})
        with untrusted(getattr(model, "path", None) or Path(model.name)):
            return HFTokenizer.from_transformers(tokenizer, end_tokens(config))
    raise InvalidRequestError(
        f"a {type(tokenizer).__name__} is no tokenizer: pass a fast tokenizer of transformers, or"
        " an object with anydecode's Tokenizer protocol"
    )


def check_torch(what: str) -> None:
    """Check that torch, which `what` needs, is installed, can be imported and has a known version.

    Raises:
        MissingPackageError: It is not installed.
        UnsupportedCombinationError: It cannot be imported, or is of another version.
    """
    if not has_torch():
        raise MissingPackageError(what, "torch", "'anydecode[torch]'")
    command = "pip install 'anydecode[torch]'"
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedCombinationError(
            f"{what} needs torch, whose installation is broken ({reason}): {command}"
        ) from None
    version = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not (2, 11) <= (int(numbers[1]), int(numbers[2])) < (3, 0):
        raise UnsupportedCombinationError(
            f"{what} needs torch from 2.11 to below 3, and {version} is installed: {command}"
        )


def torch_executor(device: str | None = None, backend: Any = None) -> Callable[[Network], Executor]:
    """The torch reference as an executor.

    Args:
        device: "cpu" or "cuda"; None means "cpu".
        backend: The `ReferenceBackend` to run; None means a new one.

    Raises:
        MissingPackageError: torch is not installed.
        UnsupportedCombinationError: torch finds no such device.
    """
    check_torch("the torch backend")
    import torch

    from anydecode.kernels.eager import EagerExecutor
    from anydecode.kernels.reference import ReferenceBackend

    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedCombinationError("torch finds no CUDA device")
    reference = backend or ReferenceBackend(device or "cpu")

    def execute(network: Network) -> Executor:
        return EagerExecutor(
            network.weights.embedding,
            network.layer,
            network.head,
            embedding_scale=network.spec.embedding_scale,
            reads_states=network.spec.starts_from_states,
            extra_width=network.spec.extra_width,
            adapters=network.adapters,
            backend=reference,
        )

    return execute


def open_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    split: ModelSplit | None = None,
) -> tuple[Model, Tokenizer | None]:
    """Build the model of a loaded checkpoint; returns it with the checkpoint's tokenizer. Arguments
    and errors as for `open_model`."""
    from anydecode.models.drafters import is_drafter_alone
    from anydecode.models.families import build_model, spec_from_config

    if is_drafter_alone(checkpoint):
        raise CheckpointError(
            f"{checkpoint.name} contains a drafter, not a model: open its target, and give this as"
            " the draft model (draft=, --draft)"
        )
    executor, close = choose_executor(backend, threads, device), None
    if split is not None:
        options = OpenOptions(dtype, threads, backend)
        executor, close = split.executor(checkpoint.path, options)
    pooling, limit = checkpoint.pooling, None
    if pooling is not None and pooling.max_tokens is not None:
        with untrusted(checkpoint.path):
            limit = min(pooling.max_tokens, spec_from_config(checkpoint.config).max_positions)
    model = build_model(checkpoint, dtype, max_positions=limit, executor=executor)
    model.pooling = pooling
    model.path, model.dtype, model.end_split = checkpoint.path, dtype, close
    model.generation_config = checkpoint.generation_config
    add_trained_parts(model, checkpoint.path)
    tokenizer, size = checkpoint.tokenizer, model.spec.vocab_size
    mask = getattr(tokenizer, "mask_id", None)
    with untrusted(checkpoint.path):
        model.tasks = read_tasks(checkpoint, model.network)
        model.reranker = read_classifier(checkpoint, model.spec) or read_yes_no(checkpoint)
        if mask is not None and mask >= size and not model.spec.causal:
            raise refusal("mask_token_id", mask, f"a token of the {size} that have embeddings")
    return model, None if tokenizer is None else fitted_tokenizer(tokenizer, model.spec)


def add_trained_parts(model: Model, folder: Path) -> None:
    """Set what was trained for a model, and is in its folder."""
    for name, (file, load) in _TRAINED_PARTS.items():
        if (path := folder / file).exists():
            setattr(model, name, load(path))


def fitted_tokenizer(tokenizer: Tokenizer, spec: ModelSpec, mask: int | None = None) -> Tokenizer:
    """The tokenizer as the model has tokens: with the mask token of a diffusion model, and without
    end-of-text tokens beyond the vocabulary, which are never generated.

    Args:
        tokenizer: The tokenizer.
        spec: The architecture of the model.
        mask: The mask token; None means the tokenizer's if the model has it, or else the model's.

    Raises:
        InvalidRequestError: `mask` is no token of the model.
    """
    known, size = getattr(tokenizer, "mask_id", None), spec.vocab_size
    if mask is not None and (type(mask) is not int or not 0 <= mask < size):
        raise InvalidRequestError(
            f"mask={mask!r} is no token of the model; allowed is a token from 0 to {size - 1}"
        )
    chosen = known if mask is None else mask
    if spec.mask_token is not None and (chosen is None or chosen >= size):
        chosen = spec.mask_token
    ends = frozenset(token for token in tokenizer.eos_ids if token < size)
    if chosen == known and ends == tokenizer.eos_ids:
        return tokenizer
    own = copy(tokenizer)
    own.mask_id, own.eos_ids = chosen, ends
    return own


def as_family(checkpoint: Checkpoint, family: str | None, block: int | None) -> Checkpoint:
    """A checkpoint whose config says what only its user knows.

    Args:
        checkpoint: The checkpoint.
        family: The key of its family in `FAMILIES`, instead of the one that the config names.
        block: The block size of a block-diffusion model, instead of the config's.

    Raises:
        InvalidRequestError: There is no such family, or its models have no blocks.
    """
    from anydecode.models.families.config import text_config
    from anydecode.models.families.table import FAMILIES

    config = dict(checkpoint.config)
    if family is not None:
        if not isinstance(family, str) or family not in FAMILIES:
            close = difflib.get_close_matches(str(family), FAMILIES, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise InvalidRequestError(
                f"family={family!r} is none of the model types in the guide to models"
                f" (docs/guides/models.md){hint}"
            )
        config |= {"model_type": family, "architectures": None, "auto_map": None}
    if block is not None:
        key = text_config(config)["model_type"]
        denoising = FAMILIES[key].denoising
        if denoising is None or denoising.block_size is None:
            raise InvalidRequestError(
                f"block={block} has no meaning for {key}: its models have no blocks; leave it out"
            )
        if type(block) is not int or block < 1:
            raise InvalidRequestError(f"block={block!r} must be an integer of at least 1")
        config[denoising.block_size] = block
    return replace(checkpoint, config=config)


def open_model(
    model: Any,
    *,
    dtype: str | WeightFormat | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    family: str | None = None,
    block: int | None = None,
    split: ModelSplit | None = None,
) -> tuple[Model, Tokenizer | None]:
    """Open a model.

    Args:
        model: A name, a repo id, a folder, a `.gguf` path, an object with the `Model` protocol or a
            `transformers` causal model.
        dtype: The weight format to convert to; None means as stored.
        threads: The number of threads of the native kernels.
        backend: "native", "torch" or "triton", see `choose_executor`; "transformers" opens a folder
            or a GGUF file as a model of `transformers`.
        device: "cpu" or "cuda"; None means "cpu".
        family, block: What a checkpoint's config does not say, see `as_family`.
        split: Runs parts of its passes in other processes, which open the same files.

    Returns:
        The model, and the tokenizer of its checkpoint if it has one.

    Raises:
        InvalidRequestError: The object is not a model.
        ModelNotFoundError: There is no model of this name.
        CheckpointError: The checkpoint is corrupt or unsupported.
        UnsupportedCombinationError: The backend is not available, or not on this device.
    """
    thread_count(threads)  # also validated for models that do not use it
    is_path = isinstance(model, str | os.PathLike)
    if (family, block) != (None, None) and (isinstance(dtype, WeightFormat) or not is_path):
        raise InvalidRequestError(
            "family= and block= are for models that are opened from files as they are stored"
        )
    others = (family, block, device) != (None, None, None)
    if split is not None and (others or isinstance(dtype, WeightFormat) or not is_path):
        raise InvalidRequestError(
            "split= is for models that are opened from files, without device=, family=, block= and"
            " dtypes that quantise them"
        )
    if split is not None and backend in (through_transformers.BACKEND, "triton"):
        raise InvalidRequestError(f"split= works on CPUs with native or torch, not {backend}")
    if backend == through_transformers.BACKEND and is_path:
        return through_transformers.open_through_transformers(model, dtype, device)
    if isinstance(dtype, WeightFormat):
        return dtype.open(model, threads=threads, backend=backend, device=device)
    if isinstance(model, str | os.PathLike):
        from anydecode.models.loading import load_checkpoint

        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        if (family, block) != (None, None):
            checkpoint = as_family(checkpoint, family, block)
        return open_checkpoint(
            checkpoint, dtype=dtype, threads=threads, backend=backend, device=device, split=split
        )
    if hasattr(model, "run") and hasattr(model, "spec"):
        return model, getattr(model, "tokenizer", None)
    if hasattr(model, "forward") and hasattr(model, "config"):
        from anydecode.models.hf import HuggingFaceModel

        return HuggingFaceModel(model), None
    raise InvalidRequestError(
        f"{type(model).__name__} is no kind of model: pass a name, a folder, a .gguf file, or a"
        " transformers causal model"
    )
