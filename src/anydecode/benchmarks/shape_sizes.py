"""The sizes of well-known models, and the tokens of models of random weights, for `anydecode bench
shapes`."""

from __future__ import annotations

from dataclasses import dataclass

#: The standard deviation of random weights, with which hidden states neither vanish nor explode.
STD = 0.02
#: The ids of the tokens at the begin and the end, behind those of single bytes.
BEGIN, END = 256, 257
#: The merge of the tokenizer; readers require one.
MERGE = ("t", "h")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model. With `experts`, each layer has so many MLPs of the size
    `inner` instead of one, of which a token runs through `experts_per_token` (as in Mixtral)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0


SHAPES = {
    "tiny": Shape(256, 2, 4, 2, 64, 512, 512, True),
    "tiny-experts": Shape(256, 2, 4, 2, 64, 256, 512, True, 8, 2),
    "135m": Shape(576, 30, 9, 3, 64, 1536, 49152, True),  # SmolLM2 135M
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256, True),  # Llama 3.2 1B
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, False),  # Llama 3 8B
    "7b-experts": Shape(2048, 16, 16, 16, 128, 1024, 50304, False, 64, 8),  # OLMoE 1B-7B
}


def matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and size `(out_features, in_features)` of every matrix in file order, or `(experts,
    out_features, in_features)`."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"token_embd": (shape.vocabulary, shape.hidden)}
    end, count = ("_exps", (shape.experts,)) if shape.experts else ("", ())
    for layer in range(shape.layers):
        sizes |= {
            f"blk.{layer}.attn_q": (wide, shape.hidden),
            f"blk.{layer}.attn_k": (narrow, shape.hidden),
            f"blk.{layer}.attn_v": (narrow, shape.hidden),
            f"blk.{layer}.attn_output": (shape.hidden, wide),
            f"blk.{layer}.ffn_gate{end}": (*count, shape.inner, shape.hidden),
            f"blk.{layer}.ffn_up{end}": (*count, shape.inner, shape.hidden),
            f"blk.{layer}.ffn_down{end}": (*count, shape.hidden, shape.inner),
        }
    if not shape.tied:
        sizes["output"] = (shape.vocabulary, shape.hidden)
    return sizes


def routers(shape: Shape) -> list[str]:
    """The names of all routers, `[experts, hidden]` in float32."""
    return [f"blk.{layer}.ffn_gate_inp" for layer in range(shape.layers) if shape.experts]


def norms(shape: Shape) -> list[str]:
    """The names of all norm weights, in file order."""
    layers = range(shape.layers)
    names = [f"blk.{layer}.{name}" for layer in layers for name in ("attn_norm", "ffn_norm")]
    return [*names, "output_norm"]


def token_names(count: int) -> list[str]:
    """`count` tokens: one per byte (GPT-2's byte letters), those of begin and end, `th`, and names
    for the other ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + position) for position, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + ["<begin>", "<end>", "th"]
    return tokens + [f"<{number}>" for number in range(len(tokens), count)]
