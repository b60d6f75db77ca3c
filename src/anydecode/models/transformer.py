"""`Transformer`, which runs rows through ranges of layers and returns logits and hidden states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from operator import gt
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.arithmetic import RowArithmetic
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import (
    Adapter,
    Array,
    Attention,
    KeyValues,
    Output,
    OutputSpec,
    Recurrence,
    Rows,
    StoredInputs,
    Variant,
)
from anydecode.kernels.routes import Route, RoutedPass, part_of
from anydecode.models.accelerators import Accelerators
from anydecode.models.acceptance_head import AcceptanceWeights
from anydecode.models.block_heads import SlotHeads
from anydecode.models.classification import Classifier
from anydecode.models.encoder_tasks import EncoderTask
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.future_masks import FutureMasks
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.judge import Judge
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.lora import load_adapter
from anydecode.models.mlp_routers import MlpRouters
from anydecode.models.network import Network
from anydecode.models.per_layer import late_start_error
from anydecode.models.pooling import Pooling
from anydecode.models.self_conditioning import expected_embeddings
from anydecode.models.sentence_diffusion import SentenceDiffusion
from anydecode.models.spec import ModelSpec
from anydecode.models.yes_no import YesNo

#: Programs of variants that an executor keeps; the oldest is recorded again when it is needed.
MAX_VARIANTS = 64


class Executor(Protocol):
    """Runs a network's passes. Arrays are numpy, or the executor's own on another device.

    Executors that run `Network.layer` and `Network.head` may have `regroup(layer, head)`, which
    replaces them. Those without adapters have a false `takes_adapters`.
    """

    cache_formats: tuple[str, ...]  # the supported formats of the key-value cache
    cache_format: str  # the fastest of them

    @property
    def kernels(self) -> str:
        """A name of the code that computes the passes. Equal rows may have other bits with code of
        another name."""
        ...

    def new_cache(
        self,
        format: str,
        num_slots: int,
        shapes: Sequence[Attention | None],
        recurrences: Mapping[int, Recurrence] = MappingProxyType({}),
    ) -> KeyValues:
        """A key-value cache of zeros, see `kernels.cache.new_cache`."""
        ...

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass. Outputs may be views that the next pass overwrites."""
        ...

    def embed(self, tokens: np.ndarray) -> Array:
        """Embeddings float32 `[m, hidden_size]` of token ids, with the model's scale applied."""
        ...

    def head(self, x: Array) -> Array:
        """Logits float32 `[m, vocab_size]`, final norm included. May be called outside a pass."""
        ...


class Transformer:
    """A transformer as a `Model`.

    Rows with token -1 take their input from `rows.inputs`: an embedding if they start at layer 0
    (the model's embedding scale is not applied to it; learned position embeddings are added), a
    hidden state if they start at a later layer. All rows of a drafter that starts from states
    (`ModelSpec.states`) have a token and, in `rows.inputs`, a state; those of a context have a
    state only, and the variant `STORE_ONLY`.

    Args:
        network: The architecture and the weights.
        name: A name for messages and reports.
        executor: Makes the executor of the network.
    """

    def __init__(
        self,
        network: Network,
        *,
        name: str = "model",
        executor: Callable[[Network], Executor],
    ) -> None:
        self.spec: ModelSpec = network.spec
        self.name = name
        self.network = network
        self.executor: Executor = executor(network)
        self._make_executor = executor
        self._adapters_lock = threading.Lock()
        #: Held by what uses the executor's buffers: a decoder that was resumed by another model's
        #: pass may read heads while a pass of this model runs. A pass may read heads itself.
        self._buffers_lock = threading.RLock()
        self._variants: dict[Variant, tuple[Any, Any]] = {}  # of layers and of the head
        self._chains: tuple[Transformer | None, Any] = (None, None)  # of the last target
        self._beside: list[tuple[Transformer, int]] = []  # with their teams of threads
        self.further: Sequence[Transformer] = ()  # modules that draft the tokens behind its own
        self.path: Path | None = None  # of the checkpoint, if there is one
        self.dtype: str | None = None  # the format its weights were converted to; None: as stored
        self.end_split: Callable[[], None] | None = None  # ends processes of its own
        self.generation_config: Mapping[str, Any] = {}  # of its files
        self.pooling: Pooling | None = None  # of its embeddings, if its repository says
        self.tasks: Mapping[str, EncoderTask] = {}  # of an encoder
        heads = network.weights.block_heads
        self.slot_heads = None if heads is None else SlotHeads(heads, executor, self.embed)
        self.reranker: Classifier | YesNo | None = None  # of a cross-encoder
        self.exit_routers: ExitRouters | None = None  # of its folder
        self.exit_predictors: ExitPredictors | None = None  # of its folder
        self.accelerators: Accelerators | None = None  # of its folder
        self.layer_routers: LayerRouters | None = None  # of its folder
        self.mlp_routers: MlpRouters | None = None  # of its folder
        self.future_masks: FutureMasks | None = None  # of its folder
        self.sentence_diffusion: SentenceDiffusion | None = None  # of its folder
        self.hidden_transfer: HiddenTransfer | None = None  # of its folder
        self.judge: Judge | None = None  # of its folder
        self.acceptance_head: AcceptanceWeights | None = None  # of its folder

    def new_cache(self, num_slots: int, format: str | None = None) -> KeyValues:
        """Zeroed keys and values for `num_slots` positions, in `format` (one of `cache_formats`).
        The default is the executor's preferred format."""
        shapes = self.spec.cache_shapes
        # The keys and values of an encoder are those of one pass, whose size is bounded.
        format = format or ("float32" if self.spec.is_encoder else self.executor.cache_format)
        return self.executor.new_cache(format, num_slots, shapes, self.spec.recurrences)

    @property
    def cache_formats(self) -> tuple[str, ...]:
        """The supported formats of the key-value cache."""
        return self.executor.cache_formats

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One forward pass.

        Raises:
            InvalidRequestError: Rows are invalid: a missing input, an unknown token or adapter, or
                a wrong range of layers.
            UnsupportedCombinationError: This executor has no variants of layers, or none with
                adapters.
        """
        self._check(rows, output_spec)
        with self._buffers_lock:
            if rows.variant is not None:
                return self._run_variants(rows, cache, output_spec)
            try:
                return self.executor.run(rows, cache, output_spec)
            except BaseException:
                if cache.states is not None:
                    cache.states.forget(rows.slots)  # they may not have been computed
                raise

    def beside(self, team: int) -> Transformer | None:
        """This model with buffers of its own over the same caches, whose passes run at the same
        time as those of another team of threads, 0 or 1; None where they cannot."""
        make = getattr(self.executor, "beside", None)
        executor = None if make is None or self.spec.recurrences else make(team)
        if executor is None:
            return None
        other = copy(self)
        other.executor, other._variants, other._chains = executor, {}, (None, None)
        other._buffers_lock = threading.RLock()
        self._beside.append((other, team))
        return other

    def head(self, hidden: Array) -> np.ndarray:
        """Logits float32 `[n, vocab_size]` of states `[n, hidden_size]`, final norm included. Waits
        for a pass of this model that runs on another thread."""
        with self._buffers_lock:
            return to_host(self.executor.head(hidden))

    @property
    def norm_size(self) -> int:
        """The numbers of a hidden state that `normed` reads: those of all streams that it sums."""
        has_sum = self.spec.hyper is not None or self.spec.stream_gate_rank > 0
        return self.spec.hidden_size * (self.spec.num_streams if has_sum else 1)

    def normed(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states `[n, norm_size]` after the final norm, the input of the head's matrix."""
        backend: Any = RowArithmetic()
        weights, product = self.network.weights, getattr(self.executor, "linear", None)
        if weights.stream_gates is not None:
            return weights.stream_gates.read_rows(hidden, self.spec, product)
        if self.spec.hyper is not None:
            if weights.hyper is None:
                parts = hidden.reshape(len(hidden), self.spec.num_streams, -1)
                hidden = parts.mean(1)
            else:
                hidden = weights.hyper.merge_rows(hidden, self.spec, product)
            merged: np.ndarray = self.network.normed_sum(backend, hidden)
            return merged
        normed: np.ndarray = self.network.final_norm(backend, hidden)
        return normed

    def logits_of(self, hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The logits of some tokens alone, float64 `[n, tokens]`, of states `[n, hidden_size]`,
        from the head's values as they are stored."""
        return self.head_products(self.normed(hidden), tokens)

    def head_products(self, inputs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The logits of some tokens alone, float64 `[n, tokens]`, from inputs of the head's matrix,
        `[n, hidden_size]`."""
        weights, read = self.network.weights, getattr(self.executor, "read_rows", dequantize_rows)
        rows = read(weights.head, tokens).astype(np.float64)
        products = (inputs.astype(np.float64)[:, None] * rows).sum(-1)
        if weights.head_bias is not None:
            products = products + weights.head_bias[tokens]
        logits: np.ndarray = products * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits = cap * np.tanh(logits / cap)
        return logits

    @property
    def head_tokens(self) -> np.ndarray | None:
        """The token of each logit, int64 `[num_logits]`; None: logit i is that of token i."""
        return self.network.weights.head_tokens

    def project_states(self, taps: list[np.ndarray]) -> np.ndarray:
        """The states that a drafter reads, float32 `[rows, hidden_size]`, from those of its target,
        float32 `[rows, target_size]` per tap."""
        weights = self.network.weights.states
        assert weights is not None, "a drafter that reads states"
        return weights.project(taps, self.spec, getattr(self.executor, "linear", None))

    def mask_states(self, count: int) -> np.ndarray:
        """The states that the first `count` mask tokens read, float32 `[count, hidden_size]`."""
        weights, states = self.network.weights.states, self.spec.states
        assert weights is not None and weights.mask is not None and states is not None
        rows = np.broadcast_to(weights.mask, (max(count, len(weights.mask)), weights.mask.shape[1]))
        return self.project_states(np.split(rows[:count], states.num_taps, -1))

    def own_states(self, hidden: np.ndarray) -> np.ndarray:
        """The states of a drafter's own that stand in for those of its target, from its last hidden
        states, both float32 `[rows, hidden_size]`."""
        states = self.spec.states
        assert states is not None, "a drafter that reads states"
        return self.normed(hidden) if states.feeds_normed else hidden.copy()

    def chains(self, target: Transformer) -> Any:
        """This drafter's part of the multi-step passes of `target` (`BurstDrafter.chains`); None
        where it cannot draft in them."""
        if self._chains[0] is not target:
            self._chains = target, self._make_chains(target)
        return self._chains[1]

    def _make_chains(self, target: Transformer) -> Any:
        spec, weights = self.spec, self.network.weights.states
        make, states = getattr(self.executor, "chains", None), spec.states
        if make is None or states is None or weights is None or not self.network.carries_states:
            return None
        is_summed = not states.taps and target.spec.hyper is not None
        is_narrow = bool(states.taps) and states.target_size < target.network.width
        if states.has_mask or states.delay or is_narrow or is_summed:
            return None
        if not getattr(target.executor, "drafts_in_bursts", False):
            return None

        def project(backend: Any, x: Any) -> Any:
            if not states.taps:
                x = target.network.final_norm(backend, x)
            return weights.projected(backend, x, spec)

        return make(project, states.num_taps * states.target_size)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Input embeddings of tokens, float32 `[n, hidden_size]`, with the model's scale
        applied. Decoders call it while a pass may run on another thread, whose buffers the
        executor's own `embed` shares on CPUs."""
        if read := getattr(self.executor, "read_rows", None):
            rows: np.ndarray = read(self.network.weights.embedding, tokens)
            return rows * np.float32(self.spec.embedding_scale)
        return to_host(self.executor.embed(tokens))

    def expected_embeddings(self, probabilities: np.ndarray) -> np.ndarray:
        """The mean embedding under each distribution, float32 `[n, hidden_size]`, from
        probabilities `[n, vocab_size]`."""
        return expected_embeddings(probabilities, self.embed)

    @property
    def has_confidences(self) -> bool:
        """Whether the model gives each row's token a confidence (RemeDi)."""
        return self.network.weights.unmasking is not None

    def confidences(self, hidden: np.ndarray) -> np.ndarray:
        """The confidence of each row's token, float64 `[n]`, from hidden states after the last
        layer, float32 `[n, hidden_size + memory_size]`, of a model that `has_confidences`."""
        weights = self.network.weights.unmasking
        assert weights is not None
        side = np.ascontiguousarray(hidden[:, self.spec.hidden_size :])
        normed = RowArithmetic().rms_norm(side, weights.norm, self.spec.norm_eps)
        result: np.ndarray = normed.astype(np.float64) @ weights.head.weight + weights.head.bias
        return result

    def canvas_inputs(self, tokens: np.ndarray, expected: np.ndarray | None) -> np.ndarray:
        """What rows of a canvas with `tokens` read, float32 `[n, hidden_size]`; `expected` are the
        `expected_embeddings` of the last pass, None in the first one."""
        weights, embedded = self.network.weights.self_conditioning, self.embed(tokens)
        assert weights is not None, "a model with a canvas"
        return weights.inputs(embedded, expected, self.spec)

    def add_adapter(self, path: str | Path) -> int:
        """Load a PEFT LoRA adapter from a folder. Passes may run on another thread meanwhile.

        Returns:
            Its index, for `rows.adapters`: one that no adapter of this model has had.

        Raises:
            CheckpointError: The files are missing or corrupt, or do not fit the model.
            UnsupportedCombinationError: A part of the model runs in another process.
        """
        return self.install_adapter(load_adapter(Path(path), self.network))

    def install_adapter(self, adapter: Adapter) -> int:
        """Add an adapter that fits the model; see `add_adapter`."""
        if not getattr(self.executor, "takes_adapters", True):
            raise UnsupportedCombinationError(
                "adapters do not work with split=: the other process lacks them"
            )
        with self._adapters_lock:
            self.network.adapters.append(adapter)
            return len(self.network.adapters) - 1

    def remove_adapter(self, index: int) -> None:
        """Free the factors of the adapter `index`, which no row may use any more. Kernels with
        copies free them in the next pass with adapters."""
        self.network.adapters[index] = {}

    def replace_weights(self, network: Network) -> None:
        """Run with the weights of `network`, which has the same spec, from the next pass on. Passes
        may run on another thread meanwhile. What is cached stays as the old weights have made
        it."""
        executor = self._make_executor(network)
        self.network, self.executor, self._variants = network, executor, {}
        self._chains = None, None
        for other, team in self._beside:
            other.network, other._variants = network, {}
            other.executor = executor.beside(team)  # type: ignore[attr-defined]

    def _run_variants(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass of rows with several variants of the layers: one part per variant, those that
        are only stored first, so that they are there for the others, then the layers as they
        are."""
        assert rows.variant is not None
        plain = [
            number
            for number, variant in enumerate(rows.variants)
            if not (isinstance(variant, Route) and variant.takes_adapters)
        ]
        has_adapters = (
            rows.adapters is not None and (rows.adapters[np.isin(rows.variant, plain)] >= 0).any()
        )
        if not hasattr(self.executor, "regroup") or has_adapters:
            raise UnsupportedCombinationError(
                "layers in parallel (easyspec), layers that are skipped or left within a pass,"
                " rows that are only stored (dflash) and compressed caches (gear) work on CPUs,"
                " without adapters and without split=; states that enter at a layer"
                " (hidden-transfer) work on CPUs without split="
            )
        variants: list[Variant | None] = [None, *rows.variants]
        variants.sort(key=_place)
        order = {id(variant): number for number, variant in enumerate(variants)}
        by_index = [order[id(variant)] for variant in [*rows.variants, None]]  # -1 is the last one

        def run(number: int, part: Rows, part_spec: OutputSpec) -> Output:
            variant = variants[number]
            if variant is None:
                return self.run(part, cache, part_spec)
            if isinstance(variant, Route):
                return self._run_route(variant, part, cache, part_spec)
            with self._running(variant):
                return self.run(part, cache, part_spec)

        logits = np.empty((len(output_spec.logits), self.spec.num_logits), np.float32)
        hidden = {
            depth: np.empty((len(index), self.spec.hidden_size), np.float32)
            for depth, index in output_spec.hidden.items()
        }
        numbers = np.array(by_index)[rows.variant]
        run_parts(rows, numbers, output_spec, run, Output(logits, hidden))
        return Output(logits, hidden)

    @contextmanager
    def _running(self, variant: Variant | None) -> Iterator[None]:
        """Within it, the executor runs the layers of `variant`."""
        if variant is None:
            yield
            return
        if variant not in self._variants:
            while len(self._variants) >= MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[variant] = self.network.variant(variant)
        regroup = self.executor.regroup  # type: ignore[attr-defined]
        regroup(*self._variants[variant])
        try:
            yield
        finally:
            regroup(None)

    def _run_route(
        self, route: Route, rows: Rows, cache: KeyValues, output_spec: OutputSpec
    ) -> Output:
        """Run rows that follow `route`."""
        executor: Any = self.executor
        depth = self.spec.num_layers
        if str(getattr(executor, "device", "cpu")) != "cpu":
            raise UnsupportedCombinationError(
                "layers are left, or caches compressed, within a pass on CPUs only"
            )
        if self.network.has_wide_states:
            raise UnsupportedCombinationError(
                f"{self.name} cannot leave or skip layers within a pass: its hidden states are"
                " wider than its embeddings"
            )
        if self.spec.shares_selections:
            raise late_start_error(self.name)
        states = np.empty((len(rows), self.spec.hidden_size), np.float32)
        has_token = rows.tokens >= 0
        states[has_token] = to_host(executor.embed(rows.tokens[has_token]))
        if not has_token.all():
            assert rows.inputs is not None, "checked by `_check`"
            states[~has_token] = rows.inputs[~has_token]
        assert rows.guides is not None, "written by the span"

        def run_layers(
            x: np.ndarray, active: np.ndarray, first: int, last: int, variant: Variant | None
        ) -> np.ndarray:
            with self._running(variant):
                return to_host(executor.layers(x, active, first, last))

        routed = RoutedPass(
            states,
            rows.guides,
            depth,
            run_layers,
            self.head,
            executor.begin,
            rows,
            cache,
            output_spec.hidden,
        )
        route.run(routed)
        hidden = {
            layers: routed.hidden(layers)[index] for layers, index in output_spec.hidden.items()
        }
        logits = np.empty((0, self.spec.num_logits), np.float32)
        if len(output_spec.logits):
            logits = self.head(routed.states[output_spec.logits])
        return Output(logits, hidden)

    def _check(self, rows: Rows, output_spec: OutputSpec) -> None:
        """Reject rows that would read outside the model or give wrong results."""
        num_layers = self.spec.num_layers
        # Most passes have few rows, for which lists are faster than arrays.
        tokens, start, stop = rows.tokens.tolist(), rows.start.tolist(), rows.stop.tolist()
        if min(tokens, default=0) < 0 and (rows.inputs is None or len(rows.inputs) != len(tokens)):
            raise InvalidRequestError("rows with token -1 need one row of inputs each")
        if self.spec.starts_from_states and (rows.inputs is None or min(tokens, default=0) < 0):
            raise InvalidRequestError(f"{self.name} reads a state beside each token")
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise InvalidRequestError(
                f"token {max(tokens)} is outside the vocabulary of {self.spec.vocab_size}"
            )
        pairs = zip(start, tokens, strict=True)
        if any(start) and any(first and token >= 0 for first, token in pairs):
            raise InvalidRequestError("a row whose input is a token must start at layer 0")
        if (
            min(start, default=0) < 0
            or max(stop, default=0) > num_layers
            or any(map(gt, start, stop))
        ):
            raise InvalidRequestError(f"layer ranges must lie within 0 and {num_layers}")
        spec = self.spec
        if spec.starts_at_first_layer and any(start):
            raise late_start_error(self.name)
        for depth, index in output_spec.hidden.items():
            if (rows.start[index] > depth).any() or (rows.stop[index] < depth).any():
                raise InvalidRequestError(
                    f"the hidden state after {depth} layers is requested of a row that does not run"
                    " through them"
                )
        if rows.adapters is not None and (rows.adapters >= len(self.network.adapters)).any():
            raise InvalidRequestError(f"there is no adapter {int(rows.adapters.max())}")


def _place(variant: Variant | None) -> int:
    """The order of the parts of a pass: what is only stored, the layers as they are, the others."""
    return 0 if isinstance(variant, StoredInputs) else 1 if variant is None else 2


def run_parts(
    rows: Rows,
    groups: np.ndarray,
    output_spec: OutputSpec,
    run: Callable[[int, Rows, OutputSpec], Output],
    output: Output,
) -> None:
    """Run a pass in parts, one after the other.

    Args:
        rows: The rows of the pass.
        groups: int `[rows]`, the group of each row. Rows of a group below 0 do not run.
        output_spec: The outputs of the pass.
        run: Runs the rows of one group: `run(group, rows, output_spec)`.
        output: Where the outputs of the parts are written.
    """
    for group in np.unique(groups[groups >= 0]).tolist():
        is_selected = groups == group
        part_row = np.cumsum(is_selected, dtype=np.int32) - 1
        kept = is_selected[output_spec.logits]
        kept_hidden = {depth: is_selected[index] for depth, index in output_spec.hidden.items()}
        hidden_rows = {
            depth: part_row[index[kept_hidden[depth]]]
            for depth, index in output_spec.hidden.items()
        }
        part_spec = OutputSpec(part_row[output_spec.logits[kept]], hidden_rows)
        result = run(group, part_of(rows, np.flatnonzero(is_selected)), part_spec)
        output.logits[kept] = to_host(result.logits)
        for depth, selected in kept_hidden.items():
            output.hidden[depth][selected] = to_host(result.hidden[depth])
