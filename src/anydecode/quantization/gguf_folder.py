"""A repository of safetensors as the GGUF file that is written of it: metadata, and tensors by the
names of llama.cpp, each of which is read when it is asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, dequantize, is_packed
from anydecode.kernels.interface import ExpertWeights, Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.classification import read_classifier
from anydecode.models.families.advice import listed
from anydecode.models.families.config import spec_from_config, text_config
from anydecode.models.families.experts import read_experts
from anydecode.models.families.recurrent import decay_of, multiplier
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import layer_config, mapping_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.loading.gguf import open_gguf
from anydecode.models.loading.gguf_encoder import POOLINGS, RANK
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.gguf_keys import SAMPLING
from anydecode.models.loading.gguf_names import (
    INTERLEAVED,
    has_one_added,
)
from anydecode.models.loading.gguf_rope import stored_order
from anydecode.models.loading.lazy import Reader
from anydecode.models.loading.quantized import settings_of
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.quantization.gguf import entry, is_written
from anydecode.quantization.gguf_forms import (
    architecture_of,
    architectures,
    differences,
    metadata_of,
    rope_tensors,
)
from anydecode.quantization.gguf_rearranged import (
    CHANGED,
    OUTER_FACTORS,
    below,
    joined,
    rearranged,
    rows_of,
    shaped,
    stacked,
    times,
)
from anydecode.quantization.gguf_targets import layer_target, outer_target, stack_target, usual_name
from anydecode.quantization.gguf_vocabulary import rwkv_vocabulary, vocabulary

_EXPERT = re.compile(
    r"(^|\.)experts(\.|$)|block_sparse_moe\.(in|out)put_linear"
    r"|\.(e_score_correction_bias|expert_bias)$"
)
#: Buffers that old checkpoints hold beside weights.
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
#: What predicts further tokens, outside the layers.
_FURTHER = ("mtp.",)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_KINDS = ("gate", "up", "down")


class FolderFile(GGUFFile):
    """A model of safetensors, read as a GGUF file.

    Args:
        checkpoint: The model, opened from a folder.

    Attributes:
        packed: The number of packed tensors by their format in the repository.
        opened: The model as it is read from the new file.
        method: The method by which the repository is quantised; None: it is not.

    Raises:
        CheckpointError: GGUF files have no form for the model. The message is one line.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        with untrusted(self.path):
            self._open()

    def _open(self) -> None:
        checkpoint = self._checkpoint
        self._config = text_config(checkpoint.config)
        self._spec = spec_from_config(checkpoint.config)
        known = architectures()
        model_type = self._config["model_type"]
        if model_type not in known:
            raise CheckpointError(
                f"{self.path}: models of type {model_type!r} are not written to GGUF files;"
                f" {listed(model_type, sorted(known))}"
            )
        self._architecture = architecture_of(model_type, self._spec)
        self._family = FAMILIES[model_type]
        self._embedding = self._family.names.get("embed_tokens", "embed_tokens")
        self._classifier = read_classifier(checkpoint, self._spec)
        self._last_experts: tuple[int, ExpertWeights] | None = None
        self._readers: dict[str, Reader] = {}
        self._add_tensors()
        self.tensors = {name: self._info(name) for name in self._readers}
        formats = (info.format for info in self.tensors.values())
        self.packed = Counter(format for format in formats if is_packed(format))
        settings = settings_of(self.path, checkpoint.config, checkpoint.tensors)
        self.method = None if settings is None else str(settings.get("quant_method"))
        self.metadata = self._metadata()
        self._check()

    def entry(self, key: str) -> bytes:
        return entry(key, self.metadata[key])

    def view(self, info: TensorInfo, weight_name: str = "") -> np.ndarray | Weight:
        tensor = self._readers[info.name]()
        return replace(tensor, name=weight_name) if isinstance(tensor, Weight) else tensor

    def part(self, name: str, index: int, weight_name: str = "") -> np.ndarray | Weight:
        tensor = self.read(name, weight_name)
        if not isinstance(tensor, Weight):
            part: np.ndarray = tensor[index]
            return part
        rows = self.tensors[name].shape[1]
        data = tensor.data[index * rows : (index + 1) * rows]
        return replace(tensor, out_features=rows, data=data)

    def _metadata(self) -> dict[str, Any]:
        tokenizer, path = self._checkpoint.tokenizer, str(self.path)
        rows = self.tensors["token_embd.weight"].shape[0]
        if isinstance(tokenizer, RwkvTokenizer):
            tokens = rwkv_vocabulary(tokenizer, rows, path)
        elif isinstance(tokenizer, HFTokenizer):
            tokens = vocabulary(tokenizer, rows, path)
        else:
            raise CheckpointError(f"{self.path}: there is no tokenizer that a GGUF file can hold")
        return {
            "general.architecture": self._architecture,
            "general.type": "model",
            "general.name": self._checkpoint.name,
            **metadata_of(self._architecture, self._spec, self._config),
            **tokens,
            **self._sampling(),
            **self._pooling(),
            **self._token_types(),
        }

    def _token_types(self) -> dict[str, int]:
        """The number of types of tokens of encoders; llama.cpp needs one where they have none."""
        if not self._family.is_encoder:
            return {}
        table = self.tensors.get("token_types.weight")
        return {"tokenizer.ggml.token_type_count": 1 if table is None else table.shape[0]}

    def _pooling(self) -> dict[str, int | list[str]]:
        """How an embedding, or the relevance of a text, is computed from the states of the last
        layer, if the folder says it."""
        if self._classifier is not None:
            return self._ranking(self._classifier.num_labels)
        pooling = self._checkpoint.pooling
        if pooling is None:
            return {}
        if pooling.dense or not pooling.is_normalized:
            raise CheckpointError(
                f"{self.path}: embeddings with dense modules, or not scaled to length 1, are not"
                " written to GGUF files"
            )
        number = next(x for x, mode in POOLINGS.items() if mode == pooling.mode)
        return {f"{self._architecture}.pooling_type": number}

    def _ranking(self, num_labels: int) -> dict[str, int | list[str]]:
        """The names of a classifier's labels; one needs none."""
        found: dict[str, int | list[str]] = {f"{self._architecture}.pooling_type": RANK}
        if num_labels > 1:
            names = mapping_value(self._config, "id2label")
            labels = [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels)]
            found[f"{self._architecture}.classifier.output_labels"] = labels
        return found

    def _sampling(self) -> dict[str, int | float]:
        """The sampling options that the folder recommends, as a GGUF file names them."""
        given = self._checkpoint.generation_config
        found = {}
        for name, key in SAMPLING.items():
            value = given.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[key] = int(value) if name == "top_k" else float(value)
        return found

    def _check(self) -> None:
        """Raise CheckpointError if the metadata describe another model than the config."""
        self.opened = open_gguf(self)
        other = spec_from_config(self.opened.config)
        changes = CHANGED.get(self._architecture, {})
        own = spec_from_config({**self._config, **changes}) if changes else self._spec
        found = next(differences(own, other), None) or self._difference_of_classifiers()
        if found is not None:
            raise CheckpointError(
                f"{self.path}: GGUF files of {self._architecture} have no form for this model's"
                f" {found}"
            )

    def _difference_of_classifiers(self) -> str | None:
        """The property in which the file's classifier is another than the folder's."""
        if self._classifier is None:
            return None
        other = read_classifier(self.opened, self._spec)
        for name in ("activation", "pooling", "score", "prompt"):
            if getattr(other, name) != getattr(self._classifier, name):
                return f"classifier.{name}"
        return None

    def _info(self, name: str) -> TensorInfo:
        tensor = self._readers[name]()
        if isinstance(tensor, Weight):
            shape: tuple[int, ...] = (tensor.out_features, tensor.in_features)
            format, size = tensor.format, tensor.num_bytes
        else:
            shape, size = tensor.shape, tensor.nbytes
            format = next(x for x, dtype in DTYPES.items() if dtype == tensor.dtype)
        if name.endswith("_exps.weight"):
            count = len(self._experts(int(name.split(".")[1])).up)
            shape = (count, shape[-2] // count if len(shape) == 2 else shape[-2], shape[-1])
        return TensorInfo(name, format, shape, 0, size)

    def _add_tensors(self) -> None:
        """A reader for every tensor of the file, in the order of the layers."""
        outer: dict[str, Reader] = {
            name: partial(np.copy, tensor)
            for name, tensor in rope_tensors(self._spec, self._config).items()
        }
        stacks: dict[str, dict[int, Reader]] = {}
        layers: dict[int, dict[str, Reader]] = {i: {} for i in range(len(self._spec.layers))}
        tensors = self._checkpoint.tensors
        prefix = self._prefix()
        num_further = self._config.get("num_nextn_predict_layers") or 0
        is_tied = bool(self._config.get("tie_word_embeddings"))
        for full in tensors:
            name = full.removeprefix(prefix)
            match = _LAYER.fullmatch(name)
            if name.endswith(_BUFFERS) or (full == "lm_head.weight" and is_tied):
                continue
            if match is not None and len(layers) <= int(match[1]) < len(layers) + num_further:
                continue  # llama.cpp needs no layers that predict further tokens
            if full.startswith(_FURTHER):
                continue
            stack = stack_target(self._architecture, name)
            target = outer_target(self._architecture, self._family, name)
            if stack is not None:
                stacks.setdefault(stack[0], {})[stack[1]] = partial(self._plain, full)
            elif target is not None:
                outer[target] = self._outer_reader(full, target)
            elif match is None:
                raise self._without_form(full)
            elif int(match[1]) not in layers:
                raise self._without_form(full)
            elif not _EXPERT.search(match[2]):
                layers[int(match[1])] |= self._layer_readers(int(match[1]), match[2], full)
        has_head = not is_tied and not self._family.is_encoder
        if has_head and "output.weight" not in outer:
            raise CheckpointError(f"{self.path}: tensor lm_head.weight is missing")
        if is_tied and self._architecture in OUTER_FACTORS:  # which are not the same
            embedding = f"{prefix}{self._embedding}.weight"
            outer["output.weight"] = self._outer_reader(embedding, "output.weight")
        for stack_name, parts in stacks.items():
            reader = partial(stacked, [parts[index] for index in sorted(parts)])
            outer[stack_name] = partial(self._stored, reader, stack_name, None)
        self._readers = dict(outer)
        for layer, readers in layers.items():
            if self._spec.layers[layer].num_experts:
                readers |= self._expert_readers(layer)
            self._readers |= joined(self._architecture, f"blk.{layer}.", readers)

    def _prefix(self) -> str:
        """What the names of tensors begin with."""
        end = f"{self._embedding}.weight"
        name = next((x for x in self._checkpoint.tensors if x.endswith(end)), f"model.{end}")
        return name.removesuffix(end)

    def _without_form(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: GGUF files of {self._architecture} have no tensor for {name!r}"
        )

    def _outer_reader(self, full: str, target: str) -> Reader:
        """A tensor outside the layers, as a file stores it."""
        reader: Reader = partial(self._plain, full)
        key = OUTER_FACTORS.get(self._architecture, {}).get(target.removesuffix(".weight"))
        if key is not None:
            reader = partial(times, reader, multiplier(self._config, key))
        return partial(self._stored, reader, target, None)

    def _layer_readers(self, layer: int, name: str, full: str) -> dict[str, Reader]:
        """The tensors of a file that one of a layer becomes; `full` is its whole name."""
        architecture, spec = self._architecture, self._spec.layers[layer]
        reader, usual = partial(self._plain, full), usual_name(self._family, name)
        found: dict[str, Reader] = {}
        for part, reads in rearranged(architecture, spec, self._config, usual, reader).items():
            target = layer_target(architecture, self._family, part)
            if target is None:
                raise self._without_form(full)
            target = f"blk.{layer}.{target}"
            found[target] = partial(self._stored, reads, target, layer)
        return found

    def _plain(self, full: str) -> np.ndarray | Weight:
        return _plain(self._checkpoint.tensors[full])

    def _stored(self, reader: Reader, target: str, layer: int | None) -> np.ndarray | Weight:
        """A tensor as a file stores it."""
        kind = target.split(".")[-2]
        if self._architecture in INTERLEAVED and kind in ("attn_q", "attn_k") and layer is not None:
            shape = self._spec.layers[layer].attention
            assert shape is not None, "it has queries or keys"
            heads = shape.num_heads if kind == "attn_q" else shape.num_kv_heads
            tensor = rows_of(reader, stored_order(heads * shape.head_dim, heads))
        else:
            tensor = reader()
        shape_of = (0, 0) if isinstance(tensor, Weight) else tensor.shape
        if is_written(target, shape_of):
            return tensor
        values = dequantize(tensor) if isinstance(tensor, Weight) else tensor.astype(np.float32)
        if has_one_added(self._architecture, target, self._family.has_final_offset):
            values = values + np.float32(1)
        if target.endswith(".ssm_a"):
            values = decay_of(values)
        if layer is not None:
            values = shaped(self._spec.layers[layer], target, values)
        return values

    def _expert_readers(self, layer: int) -> Iterator[tuple[str, Reader]]:
        experts = self._experts(layer)
        if experts.selection_bias is not None:
            yield f"blk.{layer}.exp_probs_b.bias", partial(np.copy, experts.selection_bias)
        for kind in _KINDS:
            if not getattr(experts, kind):
                continue
            name = f"blk.{layer}.ffn_{kind}_exps"
            yield f"{name}.weight", partial(self._expert_stack, layer, kind)
            if getattr(experts, f"{kind}_bias") is not None:
                yield f"{name}.bias", partial(self._expert_biases, layer, kind)

    def _expert_stack(self, layer: int, kind: str) -> np.ndarray | Weight:
        """The matrices of one kind of all experts, one below the other."""
        matrices = getattr(self._experts(layer), kind)
        tensor = below([partial(_plain, one) for one in matrices])
        if isinstance(tensor, Weight):
            return tensor
        return tensor.reshape(len(matrices), -1, tensor.shape[-1])

    def _expert_biases(self, layer: int, kind: str) -> np.ndarray:
        return np.stack(getattr(self._experts(layer), f"{kind}_bias"))

    def _experts(self, layer: int) -> ExpertWeights:
        """The experts of a layer. Those of one layer are kept, for its next matrices."""
        if self._last_experts is None or self._last_experts[0] != layer:
            self._last_experts = None
            reader = TensorReader(self._checkpoint, None, self._embedding)
            shape = self._spec.layers[layer].num_experts, self._spec.hidden_size
            config = layer_config(self._config, layer)
            found = read_experts(reader, config, self._family, f"layers.{layer}", shape)
            self._last_experts = layer, found.routed
        return self._last_experts[1]


def _plain(tensor: np.ndarray | Weight) -> np.ndarray | Weight:
    """A tensor in a format that has all of it: plain numbers as an array, else without a factor and
    with its inputs in order."""
    if not isinstance(tensor, Weight):
        return tensor if tensor.dtype in DTYPES.values() else tensor.astype(np.float32)
    if tensor.scale != 1.0 or tensor.order is not None:
        return dequantize(tensor)
    return tensor if is_packed(tensor.format) else tensor.data
