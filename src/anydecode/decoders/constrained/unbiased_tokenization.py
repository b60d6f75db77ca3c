"""Decoding after a prompt that ends inside a token, without tokenization bias (Phan et al.,
"Understanding and Mitigating Tokenization Bias in Language Models", arXiv:2406.16829, and "Exact
Byte-Level Probabilities from Tokenized Language Models", arXiv:2410.09303).

A prompt's last token implies to the model that no longer token matches the text there, although the
text can continue in any way. A cover of the prompt's text is a token sequence that starts with the
text and whose last token reaches its end or goes beyond. The probabilities of the covers add up to
that of the text. One cover is sampled by probability, and decoding continues after it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.written_tokens import is_written
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import DecoderAction, Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import ROOT, TokenTree

#: Maximum number of nodes of the tree of covers.
_MAX_NODES = 128


class CoverState(TypedDict, total=False):
    """The chosen tokens, and how many of the answer's tokens they include."""

    cover: list[int]
    beyond: int


class PromptBoundaryDecoder(Decoder):
    """Replaces the prompt's last tokens, then decodes. `cover` selects the tokens that replace
    them; their text beyond the prompt is the start of the answer."""

    def prepare(self, sequence: Sequence) -> None:
        if constraint_of(sequence.sampler) is not None or sequence.companion_prompts:
            raise UnsupportedCombinationError(
                f"{self.card.key} changes the prompt's tokens: it supports no constraint and no"
                " second prompt"
            )
        _, tail = self._parts(sequence)
        vocab = vocabulary(sequence.tokenizers[TARGET], sequence.model().spec.vocab_size)
        if vocab.bytes_within and any(
            vocab.tokenize_greedily(beyond) is None for beyond in texts_beyond(vocab, tail)
        ):
            raise UnsupportedCombinationError(
                f"{self.card.key} continues this prompt behind the middle of a token, and the"
                " tokenizer has no tokens for the rest of some tokens: end the prompt with a whole"
                " word, or use another decoder"
            )

    def _parts(self, sequence: Sequence) -> tuple[int, bytes]:
        """The number of prompt tokens that are kept, and the text of the others."""
        tokenizer, prompt = sequence.tokenizers[TARGET], sequence.prompt
        num_kept = max(1, self.cut(tokenizer, prompt))
        return num_kept, b"".join(map(tokenizer.token_bytes, prompt[num_kept:]))

    @abstractmethod
    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        """The number of prompt tokens to keep."""

    @abstractmethod
    def cover(
        self, branch: Sequence, tail: bytes, vocab: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        """Selects tokens to append to `branch` whose bytes start with `tail`."""

    def decode(self, sequence: Sequence) -> Decoding:
        num_kept, tail = self._parts(sequence)
        branch = sequence.fork()
        branch.prompt, branch.sampler = sequence.prompt[:num_kept], sequence.sampler
        branch.tokens = []
        branch.align(TARGET)  # the whole prompt may be cached, for its log-probabilities
        key: StateKey[CoverState] = StateKey(self.card.key, "cover")
        state = sequence.state.setdefault(key, CoverState())
        if "cover" not in state:
            size = branch.model().spec.vocab_size
            vocab = vocabulary(branch.tokenizers[TARGET], size)
            cover_tokens = (yield from self.cover(branch, tail, vocab)) if tail else []
            text = b"".join(vocab.token_bytes[token] for token in cover_tokens)
            answer_tokens = vocab.tokenize_greedily(text[len(tail) :])
            assert answer_tokens is not None  # `prepare` has looked
            state["cover"], state["beyond"] = cover_tokens, len(answer_tokens)
            sequence.emit(answer_tokens, logprobs=[None] * len(answer_tokens))
        branch.tokens = state["cover"] + sequence.tokens[state["beyond"] :]
        if branch.kv_cache().length > branch.length - 1:
            branch.truncate(branch.length - 1)
        while not sequence.finished:
            scores = yield branch.score()
            branch.sampler = sequence.sampler
            row, position = scores.row(-1), int(scores.positions[-1]) + 1
            token = branch.sample(sequence.sampler, row, position)
            compute_logprobs = (
                None if sequence.compute_logprobs is None else sequence.compute_logprobs
            )
            logprobs = (
                None
                if compute_logprobs is None
                else [compute_logprobs(row, token, sequence.sampler)]
            )
            branch.tokens.append(token)
            sequence.emit([token], logprobs=logprobs)
        branch.release()


@dataclass(frozen=True)
class Cover:
    """A cover: the tree node of all tokens but the last, and the last token."""

    node: int
    token: int


def covers(
    tokenizer: Tokenizer, vocab: Vocabulary, before: Seq[int], text: bytes
) -> tuple[TokenTree, list[Cover]]:
    """Finds all covers of `text` after the tokens `before` that the tokenizer can produce.

    Returns:
        A tree of tokens that lie within the text or end exactly at its end, and the covers.
    """
    tree = TokenTree()
    found_covers: list[Cover] = []
    queue: list[tuple[int, list[int], int]] = [(ROOT, [], 0)]
    for node, path, start in queue:
        for length in range(1, len(text) - start):
            for token in vocab.tokens_equal_to(text[start : start + length]):
                if len(tree) < _MAX_NODES and is_written(tokenizer, before, [*path, token]):
                    queue.append((tree.add(token, node), [*path, token], start + length))
        for token in vocab.tokens_with_prefix(text[start:]):
            if is_written(tokenizer, before, [*path, token]):
                found_covers.append(Cover(node, token))
                if len(vocab.token_bytes[token]) == len(text) - start:
                    tree.add(token, node)
    return tree, found_covers


def texts_beyond(vocab: Vocabulary, text: bytes) -> set[bytes]:
    """What tokens may have beyond the end of `text` in which they begin."""
    return {
        vocab.token_bytes[token][len(text) - start :]
        for start in range(len(text))
        for token in vocab.tokens_with_prefix(text[start:])
    }


def log_probabilities(row: np.ndarray) -> np.ndarray:
    """The log-softmax of a row of logits, float64 `[vocab_size]`."""
    logits = row.astype(np.float64)
    log_probs: np.ndarray = logits - log_sum_exp(logits)
    return log_probs


def next_bytes(
    vocab: Vocabulary,
    tree: TokenTree,
    found_covers: list[Cover],
    weights: np.ndarray,
    rows: Seq[np.ndarray],
    text: bytes,
) -> np.ndarray:
    """Computes the distribution of the byte that follows `text`.

    Args:
        vocab: The token bytes.
        tree: The tree of `covers`.
        found_covers: The covers.
        weights: Logarithms of the covers' probabilities, `[len(found_covers)]`.
        rows: Logits; `rows[0]` before the tree's nodes, `rows[n + 1]` after node n.
        text: The text.

    Returns:
        Probabilities, float64 `[257]`; the last entry is for a token without bytes.
    """
    result = np.zeros(257)
    shares = np.exp(weights - log_sum_exp(weights))
    for cover, weight in zip(found_covers, shares, strict=True):
        remainder = _remainder(vocab, tree, cover, text)
        if remainder:
            result[remainder[0]] += weight
            continue
        node = tree.child(cover.node, cover.token)
        assert node is not None
        probabilities = np.exp(log_probabilities(rows[node + 1]))
        for token in np.flatnonzero(probabilities > 0):
            data = vocab.token_bytes[token]
            result[data[0] if data else 256] += weight * probabilities[token]
    return result


def _remainder(vocab: Vocabulary, tree: TokenTree, cover: Cover, text: bytes) -> bytes:
    """The bytes of a cover beyond `text`."""
    num_path_bytes = sum(
        len(vocab.token_bytes[tree.tokens[node]]) for node in tree.path(cover.node)
    )
    return vocab.token_bytes[cover.token][len(text) - num_path_bytes :]


@register(
    Card(
        "unbiased-tokenization",
        "constraint",
        paper="Understanding and Mitigating Tokenization Bias in Language Models"
        " (arXiv:2406.16829); Exact Byte-Level Probabilities from Tokenized Language Models"
        " (arXiv:2410.09303)",
        exactness="lossy",
        summary="Continues a prompt that ends inside a token according to its text, not its"
        " tokens.",
        works_with=("samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "listed as lossy because it differs from plain decoding after the prompt's own tokens",
            "a cover is sampled and decoding continues with whole tokens, which has the same text"
            " distribution as sampling byte by byte",
            "covers start at the last space (at most `max_tokens` tokens back); tokens before it"
            " are kept",
            "a temperature other than 1 applies to whole covers, and truncations do not apply to"
            " them",
            "the first tokens of the answer are those of the cover's text beyond the prompt",
            "the tree of covers has at most 128 nodes; covers behind further nodes are left out",
            "whether the tokenizer produces a cover is tested after the four tokens before it",
        ),
        remote={"max_tokens": Range(1, 16)},
    )
)
class UnbiasedTokenization(PromptBoundaryDecoder):
    """Samples a cover of the prompt's end, then decodes.

    `last_bytes` is the distribution of the next byte for the latest request (see `next_bytes`).

    Args:
        max_tokens: Maximum number of prompt tokens that a cover replaces; covers start at the
            prompt's last space.
    """

    def __init__(self, max_tokens: int = 8) -> None:
        if max_tokens < 1:
            raise InvalidRequestError(
                f"unbiased-tokenization needs max_tokens >= 1, not {max_tokens}"
            )
        self.max_tokens = max_tokens
        self.last_bytes: np.ndarray | None = None

    def cut(self, tokenizer: Tokenizer, prompt: list[int]) -> int:
        min_kept = max(1, len(prompt) - self.max_tokens)
        for position in range(len(prompt) - 1, min_kept - 1, -1):
            data, before = map(tokenizer.token_bytes, (prompt[position], prompt[position - 1]))
            if not data:
                return position + 1
            if data[:1].isspace() and not before[-1:].isspace():
                return position
        return min_kept

    def cover(
        self, branch: Sequence, tail: bytes, vocab: Vocabulary
    ) -> Generator[DecoderAction, Any, list[int]]:
        tree, found_covers = covers(branch.tokenizers["target"], vocab, branch.prompt, tail)
        if not found_covers:
            return vocab.tokenize_greedily(tail) or []
        scores = yield branch.verify(tree)
        rows = [scores.row(number) for number in range(len(tree) + 1)]
        log_probs = [log_probabilities(row) for row in rows]
        prefix_log_probs = [0.0] * (len(tree) + 1)
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            row, parent_row = scores.after(node), scores.after(parent)
            prefix_log_probs[row] = prefix_log_probs[parent_row] + float(
                log_probs[parent_row][token]
            )
        weights = np.array(
            [
                prefix_log_probs[row] + log_probs[row][cover.token]
                for cover in found_covers
                for row in [scores.after(cover.node)]
            ]
        )
        self.last_bytes = next_bytes(vocab, tree, found_covers, weights, rows, tail)
        branch.truncate(len(branch.prompt))
        chosen = found_covers[_sample_cover(branch, weights)]
        path = [tree.tokens[node] for node in tree.path(chosen.node)]
        return [*path, chosen.token]


def _sample_cover(branch: Sequence, weights: np.ndarray) -> int:
    """The index of a cover, sampled by weight; at temperature 0 the one with the highest."""
    temperature = branch.sampler.temperature
    if not temperature:
        return int(weights.argmax())
    weighted = Distribution(None, weights / temperature)
    return weighted.sample(branch.noise.with_purpose("resample"), len(branch.prompt))
