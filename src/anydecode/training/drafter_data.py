"""What drafters are trained on: answers of the model to prompts that it wrote itself, and its
hidden states at their tokens, in files to which more can be added."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.files import read_json
from anydecode.training.checkpoint import save_json
from anydecode.training.generated import read_states, run_requests, without_loop
from anydecode.training.own_answers import prompts_to_answer

#: Least number of prompts that are written, and then answered, together.
CHUNK = 64
#: Every second answer is greedy, the others are sampled at a temperature from this range.
TEMPERATURES = (0.6, 1.0)
#: Minimum number of tokens of an answer.
SHORTEST = 8
#: Number of the first texts that are not trained on.
NUM_HELD_OUT = 64
#: States beyond the largest float16 are stored as that.
_LARGEST = float(np.finfo(np.float16).max)
Report = Callable[[float], None]


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, as tokens."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        """Both."""
        return self.prompt + self.answer

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class DraftBatch:
    """Texts of similar lengths, padded.

    Attributes:
        tokens: int64 `[batch, length]`.
        taps: The states that the drafter reads, side by side: float32 `[batch, length, taps *
            hidden_size]`.
        final: The last states after the final norm, float32 `[batch, length, hidden_size]`.
        is_answer: bool `[batch, length]`: whether the next token belongs to the answer.
    """

    tokens: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    is_answer: torch.Tensor


class Writer(Protocol):
    """A model that writes texts to learn from.

    Attributes:
        chunk: Most prompts that are written, and then answered, together.
    """

    @property
    def chunk(self) -> int: ...

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """At most `count` prompts, as tokens."""
        ...

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        tokens: int,
        random: Random,
    ) -> list[list[int]]:
        """An answer of at most `tokens` tokens to each of `prompts`."""
        ...


class StateComputer(Protocol):
    """A model that computes its states when they are needed."""

    def states(self, tokens: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """The states after each of `layers` numbers of layers, and the last ones after the final
        norm: float32 `[batch, length, hidden_size]` each.

        Args:
            tokens: int64 `[batch, length]`; what follows a text's end does not matter.
            layers: Numbers of layers.
        """
        ...


class EngineWriter:
    """The model in the engine."""

    chunk = CHUNK

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        return prompts_to_answer(self.llm, count, seed, has_long=True)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        tokens: int,
        random: Random,
    ) -> list[list[int]]:
        requests = [
            self.llm.request(
                list(prompt),
                max_tokens=tokens,
                seed=random.randrange(2**31),
                temperature=temperature,
            )
            for prompt, temperature in zip(prompts, temperatures, strict=True)
        ]
        return [one.tokens for one in run_requests(self.llm, requests)]


def _described(source: dict[str, Any]) -> str:
    """The model and the format of its weights."""
    return f"{source.get('model')} (dtype {source.get('dtype') or 'as stored'})"


class DrafterData:
    """Texts and states in a folder.

    `texts.jsonl` has one text per line; `states.f16` the states of all their tokens, in order:
    `[tokens, taps + 1, hidden_size]`, those of each tap and the last ones after the final norm;
    `source.json` tells what they are from.

    Args:
        folder: The folder, which need not exist.
        source: The name of the model and its weight format.
        taps: Numbers of layers, whose states are read. A folder that exists may have others: it
            keeps them, and if it lacks some, all its states are collected anew.
        hidden_size: Of the model.

    Raises:
        InvalidRequestError: The folder has data from another source.
    """

    def __init__(
        self, folder: Path, source: dict[str, Any], taps: Sequence[int], hidden_size: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.taps, self.hidden_size = tuple(taps), hidden_size
        source = {**source, "taps": list(taps), "hidden_size": hidden_size}
        source_file = folder / "source.json"
        self._texts_file, self._states_file = folder / "texts.jsonl", folder / "states.f16"
        if source_file.is_file():
            stored = read_json(source_file)
            kept = stored.get("taps", [])
            if stored != {**source, "taps": kept}:
                raise InvalidRequestError(
                    f"{folder} has texts and states of {_described(stored)}, not of"
                    f" {_described(source)}; give another folder"
                )
            added = [tap for tap in dict.fromkeys(taps) if tap not in kept]
            self.taps = (*kept, *added)
            source["taps"] = list(self.taps)
            if added:
                self._states_file.unlink(missing_ok=True)
        save_json(source_file, source)
        self._columns = [self.taps.index(tap) for tap in taps]
        self.texts: list[Text] = []
        self._num_chunks = 0
        self._starts = [0]
        if self._texts_file.is_file():
            self._read_texts()

    def _read_texts(self) -> None:
        lines = self._texts_file.read_text("utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            # The write of a chunk was cut off. It belongs to the chunk of the line before or to the
            # next one: both are written anew.
            chunks = [json.loads(line)["chunk"] for line in lines[:-1]]
            lines = lines[: chunks.index(chunks[-1])] if chunks else []
            self._texts_file.write_text("".join(lines), "utf-8")
        for line in lines:
            entry = json.loads(line)
            self.texts.append(Text(entry["prompt"], entry["answer"]))
            self._num_chunks = entry["chunk"] + 1

    def generate(
        self,
        writer: Writer,
        count: int,
        tokens: int,
        seed: int,
        report: Report = lambda done: None,
    ) -> None:
        """Add texts until there are `count`. Calls `report(fraction)`.

        Args:
            writer: The model.
            count: Number of texts.
            tokens: Maximum number of tokens of an answer. It ends earlier where it begins to repeat
                itself: a drafter that is trained on loops predicts only these.
            seed: Random seed.
        """
        while len(self.texts) < count:
            chunk = self._num_chunks
            # Short and repeated prompts are left out, and answers that are too short.
            prompts = min(writer.chunk, max(CHUNK, 2 * (count - len(self.texts))))
            added = self._generate_chunk(writer, prompts, tokens, f"{seed}/{chunk}")
            if not added and not self.texts:
                raise InvalidRequestError("the model writes no prompts to answer")
            lines = [
                json.dumps({"chunk": chunk, "prompt": text.prompt, "answer": text.answer}) + "\n"
                for text in added
            ]
            with self._texts_file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
            self.texts += added
            self._num_chunks += 1
            report(min(1.0, len(self.texts) / count))

    @staticmethod
    def _generate_chunk(writer: Writer, count: int, tokens: int, name: str) -> list[Text]:
        random = Random(name)
        prompts = writer.prompts(count, random.randrange(2**31))
        temperatures = [
            0.0 if index % 2 else random.uniform(*TEMPERATURES) for index in range(len(prompts))
        ]
        answers = map(without_loop, writer.answers(prompts, temperatures, tokens, random))
        return [
            Text(prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) >= SHORTEST
        ]

    def limit(self, count: int) -> None:
        """Leave out all texts but the first `count`: other runs may have added some."""
        del self.texts[count:], self._starts[count + 1 :]

    def collect(self, llm: LLM, report: Report = lambda done: None) -> None:
        """Store the states of all texts that have none yet. Calls `report(fraction)`."""
        depth = llm.model.spec.num_layers
        starts = self.starts
        size = self._row_size * 2
        done = 0
        if self._states_file.is_file():
            stored = self._states_file.stat().st_size // size
            done = max(index for index, start in enumerate(starts) if start <= stored)
        with self._states_file.open("ab") as file:
            file.truncate(starts[done] * size)
            report(done / len(self.texts))
            for index in range(done, len(self.texts)):
                *taps, last = read_states(llm, self.texts[index].tokens, (*self.taps, depth))
                rows = np.stack([*taps, llm.model.normed(last)], 1)  # type: ignore[attr-defined]
                file.write(rows.clip(-_LARGEST, _LARGEST).astype(np.float16).tobytes())
                report((index + 1) / len(self.texts))

    @property
    def starts(self) -> list[int]:
        """The first row of each text's states, and the number of all rows."""
        for text in self.texts[len(self._starts) - 1 :]:
            self._starts.append(self._starts[-1] + len(text))
        return self._starts

    @property
    def _row_size(self) -> int:
        return (len(self.taps) + 1) * self.hidden_size

    def vocabulary(self, size: int, num_tokens: int) -> list[int]:
        """The `size` most frequent tokens of the answers that are trained on, ascending; the first
        others where these have fewer. At most `num_tokens`."""
        counts = Counter(token for text in self.texts[NUM_HELD_OUT:] for token in text.answer)
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        others = (token for token in range(num_tokens) if token not in counts)
        return sorted([*ranked, *others][:size])

    def unused_token(self, num_tokens: int) -> int:
        """The first token that no text has; the last of `num_tokens` if there is none."""
        used = {token for text in self.texts for token in text.tokens}
        return next((token for token in range(num_tokens) if token not in used), num_tokens - 1)

    def coverage(self, vocabulary: Sequence[int]) -> float:
        """The fraction of the held-out answers' tokens that are in `vocabulary`."""
        kept = set(vocabulary)
        tokens = [token for text in self.texts[:NUM_HELD_OUT] for token in text.answer]
        return sum(token in kept for token in tokens) / max(1, len(tokens))

    def batches(self, indices: Sequence[int], size: int) -> list[list[int]]:
        """`indices` of texts in groups of `size` of similar lengths, which are in the order of
        `indices` otherwise."""
        groups = []
        for start in range(0, len(indices), 8 * size):
            window = sorted(indices[start : start + 8 * size], key=lambda one: len(self.texts[one]))
            groups += [window[first : first + size] for first in range(0, len(window), size)]
        return groups

    def load(self, indices: Sequence[int], target: StateComputer | None = None) -> DraftBatch:
        """The texts `indices` with their states: those of the file, or what `target` computes, on
        its device."""
        length = max(len(self.texts[index]) for index in indices)
        tokens = torch.zeros(len(indices), length, dtype=torch.long)
        is_answer = torch.zeros(len(indices), length, dtype=torch.bool)
        for row, index in enumerate(indices):
            text = self.texts[index]
            tokens[row, : len(text)] = torch.tensor(text.tokens)
            is_answer[row, len(text.prompt) - 1 : len(text) - 1] = True
        if target is not None:
            *taps, final = target.states(tokens, [self.taps[column] for column in self._columns])
            joined = torch.cat(taps, -1) if taps else final[..., :0]
            return DraftBatch(tokens.to(final.device), joined, final, is_answer.to(final.device))
        rows = self._stored(indices, length)
        return DraftBatch(tokens, rows[:, :, :-1].flatten(2), rows[:, :, -1], is_answer)

    def _stored(self, indices: Sequence[int], length: int) -> torch.Tensor:
        """The stored states, float32 `[texts, length, taps + 1, hidden_size]`."""
        shape = (self.starts[-1], len(self.taps) + 1, self.hidden_size)
        columns = [*self._columns, len(self.taps)]
        states = np.memmap(self._states_file, np.float16, "r", shape=shape)
        rows = torch.zeros(len(indices), length, len(columns), self.hidden_size)
        for row, index in enumerate(indices):
            start, size = self.starts[index], len(self.texts[index])
            rows[row, :size] = torch.from_numpy(states[start : start + size, columns]).float()
        return rows
