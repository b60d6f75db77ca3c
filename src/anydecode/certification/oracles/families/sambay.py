"""Oracle test of sambay (arXiv:2507.06607): logits against a plain forward pass in float64, texts
against plain decoding, and the layers that the rows of prompts run through."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, Restarts, equal_tokens, oracle_test
from anydecode.certification.oracles.transformer import softmax
from anydecode.certification.tiny import readable_executor
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.kernels.host import to_host
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.families.table import FAMILIES
from anydecode.models.scripted import ByteTokenizer

TEXT = "abacadabacbadcabdacebacabdabcabacdabbacadaeabacbadcabda"
LAYERS = 12


class Forward:
    """The model over a whole text, one sublayer after the other, from its tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tensors: dict[str, Any] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }

    def logits(self, tokens: list[int]) -> np.ndarray:
        """The logits of every position."""
        get, count = self.tensors, self.config["num_hidden_layers"]
        x = get["model.embed_tokens.weight"][tokens]
        memory = shared = None
        for layer in range(count):
            name = f"model.layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            if layer % 2 == 0 and layer <= count // 2:
                y, memory = self._mamba(y, f"{name}.attn")
            elif layer % 2 == 0:
                gate = y @ get[f"{name}.attn.in_proj.weight"].T
                y = (_silu(gate) * memory) @ get[f"{name}.attn.out_proj.weight"].T
            else:
                window = self.config["sliding_window"] if layer < count // 2 else len(tokens)
                y, keys = self._attention(y, layer, shared, window)
                shared = keys if layer == count // 2 + 1 else shared
            x = x + y
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = np.split(y @ get[f"{name}.mlp.fc1.weight"].T, 2, -1)
            x = x + (_silu(gate) * up) @ get[f"{name}.mlp.fc2.weight"].T
        y = self._norm(x, "model.final_layernorm")
        logits: np.ndarray = y @ get["model.embed_tokens.weight"].T + get["lm_head.bias"]
        return logits

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        result: np.ndarray = normed * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
        return result

    def _mamba(self, x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        get = self.tensors
        values, gate = np.split(x @ get[f"{name}.in_proj.weight"].T, 2, -1)
        kernel = get[f"{name}.conv1d.weight"][:, 0]
        padded = np.concatenate([np.zeros((3, values.shape[1])), values])
        parts = [padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(4)]
        values = _silu(sum(parts) + get[f"{name}.conv1d.bias"])
        size = self.config["mamba_d_state"]
        steps = values @ get[f"{name}.x_proj.weight"].T
        rank = steps.shape[1] - 2 * size
        steps, keys, queries = np.split(steps, [rank, rank + size], -1)
        steps = np.log1p(
            np.exp(steps @ get[f"{name}.dt_proj.weight"].T + get[f"{name}.dt_proj.bias"])
        )
        decay = -np.exp(get[f"{name}.A_log"])
        state, out = np.zeros(decay.shape), np.empty_like(values)
        for row in range(len(x)):
            change = (steps[row] * values[row])[:, None] * keys[row]
            state = state * np.exp(steps[row][:, None] * decay) + change
            out[row] = state @ queries[row] + get[f"{name}.D"] * values[row]
        return (out * _silu(gate)) @ get[f"{name}.out_proj.weight"].T, out

    def _attention(
        self, x: np.ndarray, layer: int, shared: Any, window: int
    ) -> tuple[np.ndarray, Any]:
        """Two softmax maps per pair of heads, whose difference weighs pairs of values."""
        get, name = self.tensors, f"model.layers.{layer}.attn"
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = x.shape[1] // heads
        qkv = x @ get[f"{name}.Wqkv.weight"].T + get[f"{name}.Wqkv.bias"]
        q = qkv[:, : heads * dim].reshape(len(x), heads, dim)
        if qkv.shape[1] > heads * dim:
            k, v = np.split(qkv[:, heads * dim :], 2, -1)
            shared = k.reshape(len(x), kv_heads, dim), v.reshape(len(x), kv_heads, dim)
        k, v = shared
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        hidden = np.where((distance >= 0) & (distance < window), 0.0, -np.inf)
        inner = f"{name}.inner_cross_attn"
        first, second = (
            exp(get[f"{inner}.lambda_q{i}"] @ get[f"{inner}.lambda_k{i}"]) for i in (1, 2)
        )
        start = 0.8 - 0.6 * exp(-0.3 * layer)
        out = []
        for pair in range(heads // 2):
            group = pair // (heads // kv_heads)
            maps = [
                softmax(q[:, 2 * pair + i] @ k[:, 2 * group + i].T * dim**-0.5 + hidden)
                for i in (0, 1)
            ]
            weights = maps[0] - (first - second + start) * maps[1]
            mixed = weights @ np.concatenate([v[:, 2 * group], v[:, 2 * group + 1]], -1)
            scale = np.sqrt((mixed**2).mean(-1, keepdims=True) + 1e-5)
            out.append(mixed / scale * get[f"{inner}.subln.weight"] * (1 - start))
        joined = np.concatenate(out, -1)
        return joined @ get[f"{name}.out_proj.weight"].T + get[f"{name}.out_proj.bias"], shared


@oracle_test("sambay")
def sambay() -> Iterator[Check]:
    """Logits, texts, and the rows of the second half."""
    family = catalogue.build("sambay")
    yield Check("the key builds the family of phi4flash", FAMILIES["phi4flash"] is family)
    checkpoint = sambay_checkpoint()
    yield from _logits(checkpoint)
    yield from _texts(checkpoint)
    yield from _prefill(checkpoint)


def _open(checkpoint: Checkpoint, **options: Any) -> LLM:
    model = build_model(checkpoint, executor=readable_executor())
    return LLM(model, tokenizer=ByteTokenizer(), **{"cache_positions": 2048, **options})


def _logits(checkpoint: Checkpoint) -> Iterator[Check]:
    with _open(checkpoint) as llm:
        tokens = llm.encode(TEXT)
        scored = llm.generate(TEXT, max_tokens=1, prompt_logprobs=20)
        expected = Forward(checkpoint).logits(tokens)
        error = 0.0
        logs = (
            expected - np.log(np.exp(expected - expected.max(-1, keepdims=True)).sum(-1))[:, None]
        )
        logs -= expected.max(-1, keepdims=True)
        for position, one in enumerate(scored.prompt_logprobs or ()):
            if one is not None:
                row = logs[position - 1]
                error = max(error, max(abs(row[token] - value) for token, value in one.top))
    yield Check("log-probabilities equal a plain forward pass's", error < 5e-3, f"{error:.1e}")


def _texts(checkpoint: Checkpoint) -> Iterator[Check]:
    """The same text alone, in batches and chunks, from a prefix cache, restarted, and drafted."""
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {
            "max_tokens": 24, "temperature": temperature, "seed": 11, "ignore_eos": True,
        }  # fmt: skip
        with _open(checkpoint, prefix_cache=False) as llm:
            plain = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        oracle = Forward(checkpoint)
        if not temperature:
            with _open(checkpoint) as llm:
                prompt = llm.encode(PROMPTS[0])
            text = list(prompt)
            for _ in range(24):
                text.append(int(oracle.logits(text)[-1].argmax()))
            yield equal_tokens("equals the oracle's greedy text", plain[:1], [text[len(prompt) :]])
        for name, decoder, engine in (
            ("in batches", "autoregressive", {}),
            ("in chunks of 7 rows", "autoregressive", {"row_budget": 7}),
            ("with multi-step", "multi-step", {}),
            ("with stree", "stree", {}),
        ):
            with _open(checkpoint, **engine) as llm:
                for turn in ("", ", again"):
                    found = llm.generate(list(PROMPTS), decoder=decoder, **options)
                    where = f"{name}{turn}, T={temperature}"
                    yield equal_tokens(f"text {where}", [one.tokens for one in found], plain)
        with _open(checkpoint) as llm, Restarts(llm.engine, seed=3):
            found = llm.generate(list(PROMPTS), decoder="stree", **options)
            yield equal_tokens(
                f"text restarted, T={temperature}", [one.tokens for one in found], plain
            )


def _prefill(checkpoint: Checkpoint) -> Iterator[Check]:
    """The second half runs for the last row of a prompt alone, and its logits are the same bits."""
    half = LAYERS // 2 + 2
    counts: dict[str, tuple[int, int]] = {}
    logits: dict[str, np.ndarray] = {}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "whole": ({}, {}),
        "in chunks": ({"row_budget": 8}, {}),
        "all rows": ({}, {"prompt_logprobs": 1}),
    }
    for name, (engine, options) in variants.items():
        with _open(checkpoint, **engine) as llm:
            model: Any = llm.engine.runners["target"].model
            run, passes = model.run, list[tuple[np.ndarray, np.ndarray]]()

            def recording(
                rows: Any, cache: Any, spec: Any, run: Any = run, to: Any = passes
            ) -> Any:
                output = run(rows, cache, spec)
                to.append((rows.stop.copy(), to_host(output.logits).copy()))
                return output

            model.run = recording
            llm.generate(TEXT, max_tokens=1, **options)
            length = len(llm.encode(TEXT))
            stops = np.concatenate([stop for stop, _ in passes])
            counts[name] = int((stops == half).sum()), int((stops == LAYERS).sum())
            logits[name] = passes[-1][1][-1]
            caches = llm.engine.runners["target"].pool.cache
            sizes = [keys.size for keys in caches.keys]
    for name in ("whole", "in chunks"):
        yield Check(
            f"one row of a prompt runs through the second half, {name}",
            counts[name] == (length - 1, 1),
            f"{counts[name][1]} of {length}",
        )
        yield Check(
            f"its logits have the bits of a pass over all layers, {name}",
            counts["all rows"] == (0, length) and np.array_equal(logits[name], logits["all rows"]),
        )
    own = [layer for layer, size in enumerate(sizes) if size]
    expected = [layer for layer in range(half) if layer % 2]
    yield Check("the second half has no cache", own == expected, f"layers {own}")


def _silu(x: np.ndarray) -> np.ndarray:
    silu: np.ndarray = x / (1 + np.exp(-x))
    return silu
