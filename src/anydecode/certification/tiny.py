"""A transformer with random weights, small enough to run thousands of requests in minutes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.models.accelerators import Accelerators
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import drafter_model, find_loader
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.exit_predictors import NUM_CANDIDATES, NUM_FEATURES, ExitPredictors, Predictor
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.families import load_network
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.mamba_blocks import MambaBlocks
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from anydecode.models.small_mlps import SmallMlps
from anydecode.models.transformer import Executor, Transformer


def readable_executor(
    backend: str | None = None, threads: int | None = 1
) -> Callable[[Network], Executor]:
    """As `choose_executor`, but the network keeps its weights, which the oracles read."""
    choose = choose_executor(backend, threads)

    def execute(network: Network) -> Executor:
        matrices, table = list(network.matrices()), network.weights.position_table
        matrices += [] if table is None else [table]
        data = [weight.data for weight in matrices]
        executor = choose(network)
        for weight, array in zip(matrices, data, strict=True):
            weight.data = array
        return executor

    return execute


def tiny_model(
    *, backend: str | None = None, threads: int | None = 1, **options: Any
) -> Transformer:
    """`tiny_network` as a model. Its weights can be read whatever the backend."""
    return Transformer(
        tiny_network(**options), name="tiny", executor=readable_executor(backend, threads)
    )


def tiny_network(**options: Any) -> Network:
    """`tiny_checkpoint` as a network."""
    return load_network(tiny_checkpoint(**options))


def tiny_checkpoint(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 2048,
    seed: int = 0,
    residual: float = 1.0,
    vocabulary: int = BYTE_VOCABULARY,
) -> Checkpoint:
    """A random Llama, over bytes by default. Its query weights are large, so that attention
    concentrates on few positions. `residual` is a factor of what layers add to hidden states: with
    a small one, the next token depends mostly on the last."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) * (spread * columns**-0.5)

    head = hidden // heads
    tensors = {
        "model.embed_tokens.weight": random.standard_normal((vocabulary, hidden), np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden, 3.0),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": matrix(hidden, hidden, 3.0),
            "self_attn.k_proj": matrix(kv_heads * head, hidden),
            "self_attn.v_proj": matrix(kv_heads * head, hidden),
            "self_attn.o_proj": matrix(hidden, hidden, residual),
            "mlp.gate_proj": matrix(2 * hidden, hidden),
            "mlp.up_proj": matrix(2 * hidden, hidden),
            "mlp.down_proj": matrix(hidden, 2 * hidden, residual),
            "input_layernorm": np.ones(hidden, np.float32),
            "post_attention_layernorm": np.ones(hidden, np.float32),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": one for name, one in shapes.items()}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return Checkpoint("tiny", Path("tiny"), config, tensors)


def eagle_checkpoint(target: Network, *, seed: int = 0, layers: int = 1) -> Checkpoint:
    """A random drafter in the layout of EAGLE and EAGLE-2, which often agrees with a target of
    small `residual`: it passes its token's embedding on."""
    hidden = target.spec.hidden_size
    matrix = random_matrices(seed)
    tensors = {
        "fc.weight": np.hstack([np.eye(hidden, dtype=np.float32), 0.2 * matrix(hidden, hidden)]),
        "fc.bias": 0.1 * matrix(1, hidden)[0],
    }
    for layer in range(layers):
        tensors |= layer_tensors(f"layers.{layer}", hidden, hidden, matrix)
        if layer:
            tensors[f"layers.{layer}.input_layernorm.weight"] = 1 + 0.1 * matrix(1, hidden)[0]
    config = {**drafter_config(target), "num_hidden_layers": layers}
    return Checkpoint("eagle", Path("eagle"), config, tensors)


def speculators_eagle_checkpoint(
    target: Network, *, seed: int = 0, layernorms: bool = False
) -> Checkpoint:
    """`eagle_checkpoint` in the layout of speculators; `layernorms` adds its further norms."""
    plain, matrix = eagle_checkpoint(target, seed=seed), random_matrices(seed + 1)
    hidden = target.spec.hidden_size
    tensors = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): value
        for name, value in plain.tensors.items()
    }
    if layernorms:
        for name in ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm"):
            tensors[f"{name}.weight"] = 1 + 0.5 * matrix(1, hidden)[0]
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "transformer_layer_config": {**plain.config, "architectures": None},
        "fusion_bias": True,
        "layernorms": layernorms,
    }
    return Checkpoint("eagle", Path("eagle"), config, tensors)


def eagle3_checkpoint(
    target: Network, *, seed: int = 0, has_all_tokens: bool = False, **flags: Any
) -> Checkpoint:
    """A random drafter in the layout of EAGLE-3, with a head for four of five tokens or for all,
    and a projection of the inputs of three layers. `flags` are keys of its config, with their
    tensors.

    Its queries equal its keys, so that a row attends mostly to itself, and its values are the
    token's embedding: it often agrees with a target of small `residual`.
    """
    hidden, vocabulary = target.spec.hidden_size, np.arange(target.spec.vocab_size)
    head = vocabulary[vocabulary % 5 > 0]
    matrix = random_matrices(seed)
    scale = 0.3 * matrix(1, hidden)[0]
    tensors = {
        "fc.weight": np.hstack(
            [
                0.2 * matrix(hidden, hidden),
                0.2 * matrix(hidden, hidden),
                0.5 * np.eye(hidden, dtype=np.float32),
            ]
        ),
        **layer_tensors("midlayer", 2 * hidden, hidden, matrix),
        "midlayer.input_layernorm.weight": 1 + scale,
        "midlayer.hidden_norm.weight": 1 - scale,
        "norm.weight": 1 + scale[::-1],
        "lm_head.weight": target.weights.head.data[head].copy(),
        "d2t": head - np.arange(len(head)),
        "t2d": vocabulary % 5 > 0,
    }
    query = 2 * matrix(hidden, 2 * hidden)
    tensors |= {
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": query,
    }
    one = np.eye(hidden, dtype=np.float32)
    value = np.hstack([one, np.zeros_like(one)]) + 0.1 * matrix(hidden, 2 * hidden)
    tensors |= {
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": 2 * one,
    }
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * matrix(1, 3 * hidden)[0]
    if flags.get("fc_norm"):
        for tap in range(3):
            tensors[f"fc_norm.{tap}.weight"] = 1 + 0.1 * matrix(1, hidden)[0]
    own_head: dict[str, Any] = {"draft_vocab_size": len(head)}
    if has_all_tokens:
        own_head = {}
        tensors["lm_head.weight"] = target.weights.head.data.copy()
        del tensors["d2t"], tensors["t2d"]
    config = {
        **drafter_config(target),
        **own_head,
        "num_key_value_heads": 4,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, target.spec.num_layers - 1]},
        **flags,
    }
    return Checkpoint("eagle3", Path("eagle3"), config, tensors)


def early_exit_checkpoint(
    target: Network, *, seed: int = 0, after: int = 2, has_mlp: bool = True, sharpness: float = 1.0
) -> Checkpoint:
    """A random layer and norm behind the first `after` layers of the target, with a head for four
    of five tokens. What the layer adds is small, so that it often agrees with the target. Without
    an MLP it is an adapter as Kangaroo's. The logits are multiplied by `sharpness`."""
    hidden, vocabulary = target.spec.hidden_size, np.arange(target.spec.vocab_size)
    head = vocabulary[vocabulary % 5 > 0]
    matrix = random_matrices(seed)
    tensors = {
        **layer_tensors("exit_layer", hidden, hidden, matrix),
        "exit_layer.input_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
        "exit_norm.weight": sharpness * (1 + 0.3 * matrix(1, hidden)[0]),
        "d2t": head - np.arange(len(head)),
        "t2d": vocabulary % 5 > 0,
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"exit_layer.{name}.weight"] *= 0.3
    if not has_mlp:
        of_mlp = ("exit_layer.mlp", "exit_layer.post_attention")
        tensors = {name: one for name, one in tensors.items() if not name.startswith(of_mlp)}
    config = {
        **drafter_config(target),
        "draft_vocab_size": len(head),
        "exit_after": after,
    }
    return Checkpoint("early exit", Path("early-exit"), config, tensors)


def early_exit_model() -> LLM:
    """An engine over a tiny model and an early exit of it."""
    return with_drafter(partial(early_exit_checkpoint, sharpness=2.0), cache_positions=4096)


def routed_model(body: str = "mlp") -> LLM:
    """An engine over a tiny model with random exit routers behind every second layer, of a `body`
    of `anydecode train depth --recipe tide`."""
    model = tiny_model(layers=16, residual=0.3)
    add_routers(model, range(2, 16, 2), body)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096)


def add_routers(model: Any, exits: Seq[int], body: str = "mlp") -> None:
    """Give a model random exit routers behind these numbers of layers; see `routed_model`."""
    random = np.random.default_rng(3)
    hidden = model.spec.hidden_size
    down = {one: random.standard_normal((8, hidden), np.float32) / 2 for one in exits}
    up = {one: random.standard_normal(8, np.float32) for one in exits}
    fingerprint, block, mamba = model_fingerprint(model.network), None, None

    def parts(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[int, np.ndarray]]:
        return {
            name: {one: random.standard_normal(shape, np.float32) for one in exits}
            for name, shape in shapes.items()
        }

    if body == "block":
        shapes = {"norm": (hidden,), "gate": (8, hidden), "up": (8, hidden), "down": (hidden, 8)}
        block = SmallMlps(**parts(shapes), fingerprint=fingerprint)
    elif body == "mamba":
        shapes = {
            "norm": (hidden,), "in_proj": (12, hidden), "conv": (6, 4), "conv_bias": (6,),
            "x_proj": (2 + 2 * 5, 6), "dt_proj": (6, 2), "dt_bias": (6,), "a_log": (6, 5),
            "skip": (6,), "out_proj": (hidden, 6),
        }  # fmt: skip
        found = parts(shapes)
        for name in ("in_proj", "x_proj", "out_proj"):  # so that results are as large as states
            found[name] = {
                one: matrix / np.sqrt(np.float32(matrix.shape[1]))
                for one, matrix in found[name].items()
            }
        mamba = MambaBlocks(**found)
    model.exit_routers = ExitRouters(down, up, fingerprint, "token 1", block, mamba)


def predicting_model(**options: Any) -> LLM:
    """An engine over a tiny model with random exit predictors behind every layer, and its first
    four layers as the draft model; `options` are those of `LLM`."""
    model, draft = (tiny_model(layers=layers, residual=0.3) for layers in (16, 4))
    random = np.random.default_rng(8)
    scales = np.repeat(np.array([0.25, 0.5, 4.0], np.float32), NUM_CANDIDATES)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    predictors = {
        exit: Predictor(matrix(8, NUM_FEATURES) * scales, matrix(8), matrix(8), -1.0)
        for exit in range(1, 16)
    }
    always = frozenset((5, 9, 12))
    model.exit_predictors = ExitPredictors(predictors, always, model_fingerprint(model.network))
    return LLM(model, tokenizer=ByteTokenizer(), draft=draft, cache_positions=4096, **options)


def layer_routed_model(**options: Any) -> LLM:
    """An engine over a tiny model with random layer routers for all but the outermost layers;
    `options` are those of `LLM`."""
    model = tiny_model(layers=12, residual=0.3)
    random, layers = np.random.default_rng(5), list(range(1, 11))
    weight = random.standard_normal((len(layers), model.spec.hidden_size), np.float32) / 4
    bias = random.standard_normal(len(layers), np.float32) / 4
    model.layer_routers = LayerRouters(layers, weight, bias, model_fingerprint(model.network))
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096, **options)


def accelerated_model(
    *,
    residual: float = 0.1,
    vocabulary: int = BYTE_VOCABULARY,
    cache_positions: int = 4096,
    drafting: str = "fixed",
    **options: Any,
) -> LLM:
    """An engine over a tiny model with random accelerators of its second to fourth layers, which
    add little, so that the accelerated stream often agrees with the model; `options` are those of
    `LLM`."""
    model = tiny_model(layers=8, residual=residual, vocabulary=vocabulary)
    add_accelerators(model, range(1, 4))
    given: dict[str, Any] = {"cache_positions": cache_positions, "drafting": drafting, **options}
    return LLM(model, tokenizer=ByteTokenizer(), **given)


def add_accelerators(model: Any, layers: Seq[int], rank: int = 6) -> None:
    """Give a model random accelerators of these layers; see `accelerated_model`."""
    matrix, hidden = random_matrices(7), model.spec.hidden_size
    shapes = {one: model.spec.layers[one].attention for one in layers}
    sizes = {one: shape.num_heads * shape.head_dim for one, shape in shapes.items()}
    model.accelerators = Accelerators(
        query_down={one: 3 * matrix(rank, hidden) for one in layers},
        query_up={one: 3 * matrix(size, rank) for one, size in sizes.items()},
        output_down={one: matrix(rank, size) for one, size in sizes.items()},
        output_up={one: 0.3 * matrix(hidden, rank) for one in layers},
        mlp_down={one: matrix(rank, hidden) for one in layers},
        mlp_up={one: 0.3 * matrix(hidden, rank) for one in layers},
        fingerprint=model_fingerprint(model.network),
    )


def longspec_checkpoint(target: Network, *, seed: int = 0, window: int = 7) -> Checkpoint:
    """A random draft layer of LongSpec with a head for four of five tokens. What it adds to a
    token's embedding is small, so that it often agrees with a target of small `residual`."""
    hidden, vocabulary = target.spec.hidden_size, np.arange(target.spec.vocab_size)
    head = vocabulary[vocabulary % 5 > 0]
    matrix = random_matrices(seed)
    layer = layer_tensors("layer", hidden, hidden, matrix)
    tensors = {name.removeprefix("layer."): tensor for name, tensor in layer.items()}
    tensors |= {
        "cross_attn.q_proj.weight": 3 * matrix(hidden, hidden),
        "cross_attn.o_proj.weight": 0.4 * matrix(hidden, hidden),
        "input_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
        "cross_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
        "norm.weight": 1 + 0.3 * matrix(1, hidden)[0],
        "d2t": head - np.arange(len(head)),
        "t2d": vocabulary % 5 > 0,
    }
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[name] *= 0.3
    config = {
        **drafter_config(target),
        "draft_vocab_size": len(head),
        "sliding_window": window,
    }
    return Checkpoint("longspec", Path("longspec"), config, tensors)


def random_matrices(seed: int) -> Callable[[int, int], np.ndarray]:
    """Makes matrices `[rows, columns]` of norms of about one."""
    random = np.random.default_rng(seed + 1000)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) * columns**-0.5

    return matrix


def layer_tensors(
    name: str, width: int, hidden: int, matrix: Callable[[int, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """A layer with four heads of queries and two of keys; its attention reads `width` numbers."""
    shapes = {
        "self_attn.q_proj": 3 * matrix(hidden, width),
        "self_attn.k_proj": matrix(hidden // 2, width),
        "self_attn.v_proj": matrix(hidden // 2, width),
        "self_attn.o_proj": 0.5 * matrix(hidden, hidden),
        "mlp.gate_proj": matrix(2 * hidden, hidden),
        "mlp.up_proj": matrix(2 * hidden, hidden),
        "mlp.down_proj": 0.5 * matrix(hidden, 2 * hidden),
        "post_attention_layernorm": 1 + 0.1 * matrix(1, hidden)[0],
    }
    return {f"{name}.{part}.weight": tensor for part, tensor in shapes.items()}


def drafter_config(target: Network) -> dict[str, Any]:
    """The config of a drafter of one layer."""
    hidden = target.spec.hidden_size
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.spec.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": target.spec.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }


def with_drafter(
    *drafters: Callable[[Network], Checkpoint],
    backend: str | None = None,
    layers: int = 4,
    residual: float = 0.15,
    vocabulary: int = BYTE_VOCABULARY,
    drafting: str = "fixed",
    **options: Any,
) -> LLM:
    """An engine over a tiny model with drafters of it; `options` are those of `LLM`. By default a
    request beside others drafts as much as one alone, so that both show the whole method."""
    target = tiny_model(layers=layers, residual=residual, backend=backend, vocabulary=vocabulary)
    packer = getattr(target.executor, "packer", None)
    drafts = []
    for drafter in drafters:
        checkpoint = drafter(target.network)
        load = find_loader(checkpoint)  # None: a whole language model
        network = load(checkpoint, target.network, None) if load else load_network(checkpoint)
        executor = choose_executor(backend, 1, packer=packer)
        drafts.append(drafter_model(network, name=checkpoint.name, executor=executor))
    return LLM(target, tokenizer=ByteTokenizer(), draft=drafts, drafting=drafting, **options)


def tiny_llm(**options: Any) -> LLM:
    """An engine over `tiny_model`; `options` are those of `LLM`."""
    return LLM(tiny_model(), tokenizer=ByteTokenizer(), **options)
