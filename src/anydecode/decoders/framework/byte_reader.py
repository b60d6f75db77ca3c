"""A model's distribution of the next byte of a text, whatever its tokens.

The tokens of a text that ends at some byte are not certain: the last token may go on. The reader
keeps every sequence of tokens that the text may be the beginning of, with its probability. The
probability of a byte is that of all tokens which go on with it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np

from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.decoders.framework.written_tokens import is_written
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.candidates import log_sum_exp
from anydecode.scoring.score import ActionResult, DecoderAction, ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: The index of the end of the text in a distribution of bytes.
END = 256
#: Beginnings of tokens whose continuations are kept.
_NUM_BEGINNINGS = 256

Path = tuple[int, ...]
Reading = Generator[DecoderAction, ActionResult, None]


class ByteVocabulary:
    """The tokens of one model that are written as bytes.

    Args:
        tokenizer: The tokenizer.
        size: The width of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab: Vocabulary = vocabulary(tokenizer, size)
        self.end_tokens = np.array(
            sorted(token for token in tokenizer.eos_ids if token < size), np.int64
        )
        #: `_longer`, of the last few beginnings.
        self.longer = lru_cache(_NUM_BEGINNINGS)(self._longer)

    def _longer(self, beginning: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that are longer than `beginning` and start with it, and the byte of each that
        follows it, both int64."""
        vocab = self.vocab
        tokens: Iterator[int] | Seq[int] = (
            vocab.tokens_with_prefix(beginning) if beginning else range(vocab.size)
        )
        ids = [token for token in tokens if len(vocab.token_bytes[token]) > len(beginning)]
        following = [vocab.token_bytes[token][len(beginning)] for token in ids]
        return np.array(ids, np.int64), np.array(following, np.int64)


class ByteReader:
    """Reads a text byte by byte.

    `trunk` are the tokens that are certain. `paths` are the sequences of whole tokens behind them,
    each of which may be followed by a token that goes beyond the text, with the number of bytes
    that they cover; `tail` are the bytes behind the trunk.

    Args:
        sequence: The sequence whose model reads.
        runner: The model.
        trunk: The first tokens, not empty.
    """

    def __init__(self, sequence: Sequence, runner: str, trunk: Seq[int]) -> None:
        self.runner = runner
        self.branch = sequence.fork()
        self.restart(trunk)
        spec = self.branch.model(runner).spec
        self.tokens = ByteVocabulary(sequence.tokenizers[runner], spec.vocab_size)

    def restart(self, trunk: Seq[int]) -> None:
        """Read another text, which begins with the tokens `trunk`."""
        self.trunk = list(trunk)
        self.tail = b""
        self.paths: dict[Path, int] = {(): 0}
        self._rows: dict[Path, np.ndarray] = {}
        self.branch.prompt, self.branch.tokens = self.trunk[:1], self.trunk[1:]

    def push(self, byte: int) -> None:
        """Append a byte to the text.

        Raises:
            UnsupportedCombinationError: No token goes on with it.
        """
        self.tail += bytes([byte])
        tokenizer, vocab = self.tokens.tokenizer, self.tokens.vocab
        whole = [
            (*path, token)
            for path, length in self.paths.items()
            for token in vocab.tokens_equal_to(self.tail[length:])
        ]
        written = [path for path in whole if is_written(tokenizer, self.trunk, list(path))]
        for path in written:
            self.paths[path] = len(self.tail)
        self._prune()
        if not self.paths:  # the tokenizer would not write this text
            self.paths = dict.fromkeys(whole, len(self.tail))
        if not self.paths:
            raise UnsupportedCombinationError(
                f"the tokenizer of the {self.runner} model has no token for the byte {byte:#04x}"
            )
        self._commit()

    def request(self) -> ScoreRequest | None:
        """What must be scored before `log_probabilities`; None if nothing must."""
        missing = [path for path in self.paths if path not in self._rows]
        if not missing:
            return None
        self.branch.align(self.runner)
        self._tree = TokenTree.merge(missing)
        return self.branch.verify(self._tree, runner=self.runner)

    def receive(self, scores: Scores) -> None:
        """Take the result of `request`."""
        tree = self._tree
        self._rows[()] = _log_softmax(scores.row(0))
        for node in range(len(tree)):
            path = tuple(tree.tokens[parent] for parent in tree.path(node))
            self._rows[path] = _log_softmax(scores.row(scores.after(node)))

    def log_probabilities(self) -> np.ndarray:
        """The log-probabilities of the next byte, and at `END` of the end of the text, float64
        `[257]`."""
        totals = np.zeros(END + 1)
        weights = {path: self._weight(path) for path in self.paths}
        largest = max(weights.values())
        for path, length in self.paths.items():
            row = self._rows[path] + (weights[path] - largest)
            ids, following = self.tokens.longer(self.tail[length:])
            totals[:END] += np.bincount(following, np.exp(row[ids]), END)
            if length == len(self.tail):
                totals[END] += float(np.exp(row[self.tokens.end_tokens]).sum())
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.log(totals) - np.log(totals.sum())
        return logs

    def release(self) -> None:
        """Free the memory."""
        self.branch.release()

    def _weight(self, path: Path) -> float:
        """The log-probability of a path after the trunk."""
        rows = (self._rows[path[:depth]] for depth in range(len(path)))
        return math.fsum(float(row[token]) for row, token in zip(rows, path, strict=True))

    def _prune(self) -> None:
        """Drop the paths behind which no token goes beyond the text."""
        self.paths = {
            path: length
            for path, length in self.paths.items()
            if length == len(self.tail) or self.tokens.vocab.has_longer(self.tail[length:])
        }

    def _commit(self) -> None:
        """Move to the trunk the tokens that all paths begin with, and drop rows that no path
        needs."""
        while () not in self.paths and len({path[0] for path in self.paths}) == 1:
            [first] = {path[0] for path in self.paths}
            size = len(self.tokens.vocab.token_bytes[first])
            self.trunk.append(first)
            self.branch.tokens.append(first)
            self.tail = self.tail[size:]
            self.paths = {path[1:]: length - size for path, length in self.paths.items()}
            self._rows = {path[1:]: row for path, row in self._rows.items() if path[:1] == (first,)}
        needed = {path[:depth] for path in self.paths for depth in range(len(path) + 1)}
        self._rows = {path: row for path, row in self._rows.items() if path in needed}


def next_byte(readers: Seq[ByteReader]) -> Generator[DecoderAction, ActionResult, list[np.ndarray]]:
    """The `log_probabilities` of all readers, whose models run at the same time."""
    waiting = [(reader, request) for reader in readers if (request := reader.request())]
    if waiting:
        results = yield [request for _, request in waiting]
        for (reader, _), scores in zip(waiting, results, strict=True):
            reader.receive(scores)
    return [reader.log_probabilities() for reader in readers]


def _log_softmax(row: np.ndarray) -> np.ndarray:
    logits = row.astype(np.float64)
    logs: np.ndarray = logits - log_sum_exp(logits)
    return logs
