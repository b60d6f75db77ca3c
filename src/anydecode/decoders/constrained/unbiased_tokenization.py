"""Text behind a prompt that ends inside a token, without tokenisation bias (Phan et al.,
"Understanding and Mitigating Tokenization Bias in Language Models", arXiv:2406.16829, and "Exact
Byte-Level Probabilities from Tokenized Language Models", arXiv:2410.09303).

A prompt's last token tells a model that no longer token stood there, which nobody meant to say. The
prompt's text can begin a longer text in several ways, its covers: tokens within it and a last one
that reaches its end or beyond. Their probabilities add up to that of the text; one is drawn by
them, and decoding goes on behind it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.constrained import constraint_of
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: Tokens before the covers that the tokenizer is shown along with them.
_ANCHOR = 4
#: Most nodes of covers that are scored.
_MOST_NODES = 128


class PromptEnd(Decoder):
    """Says the prompt's last tokens anew, then goes on. `cover` finds the tokens that stand in
    their place; what they say beyond the prompt's text is the beginning of the answer."""

    def prepare(self, sequence: Sequence) -> None:
        if constraint_of(sequence.sampler) is not None or sequence.companion_prompts:
            raise UnsupportedCombinationError(
                f"{self.card.key} changes the prompt's tokens: it takes no constraint and no"
                " second prompt"
            )

    @abstractmethod
    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        """How many of the prompt's tokens stay."""

    @abstractmethod
    def cover(
        self, branch: Sequence, tail: bytes, words: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        """Tokens behind those of `branch` whose bytes begin with `tail`."""

    def decode(self, sequence: Sequence) -> Decoding:
        tokenizer = sequence.tokenizers["target"]
        kept = max(1, self.cut(tokenizer, sequence.prompt))
        tail = b"".join(map(tokenizer.token_bytes, sequence.prompt[kept:]))
        branch = sequence.fork()
        branch.prompt, branch.sampler = sequence.prompt[:kept], sequence.sampler
        branch.tokens, branch.tokenizers = [], sequence.tokenizers
        state: dict[str, Any] = sequence.state.setdefault(self.card.key, {})
        if "cover" not in state:
            size = branch.context().pool.model.spec.vocab_size
            words = vocabulary(tokenizer, size)
            covering = (yield from self.cover(branch, tail, words)) if tail else []
            said = b"".join(words.pieces[token] for token in covering)
            beyond = words.spelled(said[len(tail) :])
            if beyond is None:
                raise UnsupportedCombinationError(
                    f"{self.card.key} needs a tokenizer that can spell every ending of a token"
                )
            state["cover"], state["beyond"] = covering, len(beyond)
            sequence.emit(beyond, notes=[None] * len(beyond))
        branch.tokens = state["cover"] + sequence.tokens[state["beyond"] :]
        if branch.context().length > branch.length - 1:
            branch.truncate(branch.length - 1)
        while not sequence.finished:
            scores = yield branch.score()
            branch.sampler = sequence.sampler
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = branch.sample(sequence.sampler, row, position)
            note = None if sequence.annotate is None else sequence.annotate
            notes = None if note is None else [note(row, token, sequence.sampler)]
            branch.tokens.append(token)
            sequence.emit([token], notes=notes)
        branch.release()


@dataclass(frozen=True)
class Cover:
    """Tokens whose bytes begin with a text and whose last token reaches its end: the node of a tree
    that all but the last lead to, and the last."""

    node: int
    token: int


def covers(
    tokenizer: Tokenizer, words: Vocabulary, before: Seq[int], text: bytes
) -> tuple[TokenTree, list[Cover]]:
    """All covers of `text` behind the tokens `before` that the tokenizer could have written. Nodes
    of the tree lie within the text, or reach exactly to its end."""
    tree = TokenTree()
    found: list[Cover] = []
    waiting: list[tuple[int, list[int], int]] = [(ROOT, [], 0)]
    for node, path, start in waiting:
        for length in range(1, len(text) - start):
            for token in words.spelling(text[start : start + length]):
                if len(tree) < _MOST_NODES and is_written(tokenizer, before, [*path, token]):
                    waiting.append((tree.add(token, node), [*path, token], start + length))
        for token in words.beginning(text[start:]):
            if is_written(tokenizer, before, [*path, token]):
                found.append(Cover(node, token))
                if len(words.pieces[token]) == len(text) - start:
                    tree.add(token, node)
    return tree, found


def is_written(tokenizer: Tokenizer, before: Seq[int], tokens: list[int]) -> bool:
    """Whether the tokenizer splits the text of `tokens` behind `before` into them. True where the
    tokens end within a character, so that there is no text to split."""
    shown = [*before[-_ANCHOR:], *tokens]
    try:
        text = b"".join(map(tokenizer.token_bytes, shown)).decode()
    except UnicodeDecodeError:
        return True
    return tokenizer.encode(text, special=False)[-len(tokens) :] == tokens


def log_probabilities(row: np.ndarray) -> np.ndarray:
    """Natural logarithms of a row's softmax, float64."""
    wide = row.astype(np.float64)
    normal: np.ndarray = wide - log_sum_exp(wide)
    return normal


def next_bytes(
    words: Vocabulary,
    tree: TokenTree,
    found: list[Cover],
    weights: np.ndarray,
    rows: Seq[np.ndarray],
    text: bytes,
) -> np.ndarray:
    """The distribution of the byte that follows `text`, float64 `[257]`, the last for no byte at
    all. `weights` are the logarithms of the covers' probabilities, `rows[0]` is the row before the
    tree's nodes and `rows[n + 1]` that of node n."""
    result = np.zeros(257)
    share = np.exp(weights - log_sum_exp(weights))
    for cover, weight in zip(found, share, strict=True):
        behind = _behind(words, tree, cover, text)
        if behind:
            result[behind[0]] += weight
            continue
        node = tree.child(cover.node, cover.token)
        assert node is not None
        chances = np.exp(log_probabilities(rows[node + 1]))
        for token in np.flatnonzero(chances > 0):
            piece = words.pieces[token]
            result[piece[0] if piece else 256] += weight * chances[token]
    return result


def _behind(words: Vocabulary, tree: TokenTree, cover: Cover, text: bytes) -> bytes:
    """What a cover says beyond `text`."""
    said = sum(len(words.pieces[tree.tokens[node]]) for node in tree.path(cover.node))
    return words.pieces[cover.token][len(text) - said :]


@register(
    Card(
        "unbiased-tokenization",
        "constraint",
        paper="Understanding and Mitigating Tokenization Bias in Language Models"
        " (arXiv:2406.16829); Exact Byte-Level Probabilities from Tokenized Language Models"
        " (arXiv:2410.09303)",
        exactness="lossy",
        summary="Goes on behind a prompt that ends inside a token as the text asks, not as its"
        " tokens do.",
        works_with=("samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "called lossy because plain decoding behind the prompt's own tokens is what it departs"
            " from",
            "a cover is drawn and decoding goes on with whole tokens, which is the same text in"
            " distribution as drawing byte by byte",
            "covers begin at the last space (at most `most` tokens back); tokens before stay",
            "a temperature other than 1 acts on covers as wholes, and truncations do not act on"
            " them",
            "the answer's first tokens are those of the cover's text beyond the prompt",
        ),
    )
)
class UnbiasedTokenization(PromptEnd):
    """Covers reach back to the prompt's last space, and at most `most` tokens. `last_bytes` is the
    distribution of the next byte for the latest request, see `next_bytes`."""

    def __init__(self, most: int = 8) -> None:
        if most < 1:
            raise InvalidRequestError("unbiased-tokenization needs most >= 1")
        self.most = most
        self.last_bytes: np.ndarray | None = None

    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        least = max(1, len(prompt) - self.most)
        for position in range(len(prompt) - 1, least - 1, -1):
            piece, before = map(tokenizer.token_bytes, (prompt[position], prompt[position - 1]))
            if not piece:
                return position + 1
            if piece[:1].isspace() and not before[-1:].isspace():
                return position
        return least

    def cover(
        self, branch: Sequence, tail: bytes, words: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        tree, found = covers(branch.tokenizers["target"], words, branch.prompt, tail)
        if not found:
            return words.spelled(tail) or []
        scores = yield branch.verify(tree)
        rows = [scores.row(number) for number in range(len(tree) + 1)]
        chances = [log_probabilities(row) for row in rows]
        reached = [0.0] * (len(tree) + 1)
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            reached[node + 1] = reached[parent + 1] + float(chances[parent + 1][token])
        weights = np.array(
            [reached[cover.node + 1] + chances[cover.node + 1][cover.token] for cover in found]
        )
        self.last_bytes = next_bytes(words, tree, found, weights, rows, tail)
        branch.truncate(len(branch.prompt))
        chosen = found[_drawn(branch, weights)]
        path = [tree.tokens[node] for node in tree.path(chosen.node)]
        return [*path, chosen.token]


def _drawn(branch: Sequence, weights: np.ndarray) -> int:
    """The place of a cover, drawn by weight; at temperature 0 the likeliest."""
    temperature = branch.sampler.temperature
    if not temperature:
        return int(weights.argmax())
    held = Distribution(None, weights / temperature)
    return held.sample(branch.noise.with_purpose("resample"), len(branch.prompt))
