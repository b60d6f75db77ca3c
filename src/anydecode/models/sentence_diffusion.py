"""A diffusion model of sentence embeddings and a generator of soft prompts (Lovelace et al.,
"Diffusion Guided Language Modeling", arXiv:2408.04220), and classifiers of such embeddings.

Everything is computed in float64 for one text at a time, so that results do not depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.exit_files import check_model
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: The file of a model's folder that has its diffusion model.
FILE_NAME = "sentence_diffusion.safetensors"
#: Number of sines, and of cosines, by which networks read the noise level.
NUM_WAVES = 16
#: The noise level is multiplied by this before.
LEVEL_SCALE = 1000.0

Pullback = Callable[[np.ndarray], np.ndarray]


def level_features(level: float) -> np.ndarray:
    """What networks read of the share of the signal's variance, float64 `[2 * NUM_WAVES]`."""
    rates = 10_000.0 ** (-np.arange(NUM_WAVES) / (NUM_WAVES - 1))
    angles = LEVEL_SCALE * level * rates
    return np.concatenate([np.sin(angles), np.cos(angles)])


@dataclass(frozen=True, eq=False)
class ResidualMlp:
    """A network of linear layers: last(h), where h = first(x), and each block adds
    down(silu(up(h))) to h.

    Attributes:
        tensors: float64, by the names `first.weight` `[width, inputs]`, `blocks.0.up.weight`
            `[hidden, width]`, `blocks.0.down.weight` `[width, hidden]`, `last.weight`
            `[outputs, width]`, and so on, with the biases.
    """

    tensors: Mapping[str, np.ndarray]

    @property
    def num_blocks(self) -> int:
        return sum(name.endswith("up.weight") for name in self.tensors)

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs `[outputs]` of inputs `[inputs]`."""
        return self.linearized(inputs)[0]

    def linearized(self, inputs: np.ndarray) -> tuple[np.ndarray, Pullback]:
        """The outputs, and a function from the gradient of a number by them to that by the
        inputs."""
        state, gates = self._linear("first", inputs), []
        for block in range(self.num_blocks):
            inner = self._linear(f"blocks.{block}.up", state)
            gate = 0.5 * (1 + np.tanh(0.5 * inner))
            gates.append(gate * (1 + inner * (1 - gate)))
            state = state + self._linear(f"blocks.{block}.down", inner * gate)

        def pull_back(gradient: np.ndarray) -> np.ndarray:
            gradient = gradient @ self.tensors["last.weight"]
            for block in reversed(range(self.num_blocks)):
                inner = (gradient @ self.tensors[f"blocks.{block}.down.weight"]) * gates[block]
                gradient = gradient + inner @ self.tensors[f"blocks.{block}.up.weight"]
            result: np.ndarray = gradient @ self.tensors["first.weight"]
            return result

        return self._linear("last", state), pull_back

    def check(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether all tensors are there, fit together, and have so many inputs and outputs."""
        try:
            is_complete = len(self.tensors) == 4 + 4 * self.num_blocks
            return is_complete and self(np.zeros(num_inputs)).shape == (num_outputs,)
        except (KeyError, ValueError):
            return False

    def _linear(self, name: str, inputs: np.ndarray) -> np.ndarray:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        outputs: np.ndarray = weight @ inputs + bias
        return outputs


@dataclass(frozen=True, eq=False)
class SentenceDiffusion:
    """What was trained for one language model and one sentence encoder.

    Embeddings are normed: less their mean, divided by their standard deviation. A noisy one is
    sqrt(level) times the embedding plus sqrt(1 - level) times normal noise.

    Attributes:
        denoiser: From a noisy embedding, the prompt's embedding and the level to the velocity,
            sqrt(level) times the noise less sqrt(1 - level) times the embedding.
        prompter: From a noisy embedding and the level to the rows of the soft prompt.
        mean: Of the texts' embeddings, float64 `[embedding_size]`.
        deviation: The same, all above 0.
        unconditional: What the denoiser reads in place of the prompt's embedding without a prompt,
            float64 `[embedding_size]`.
        fingerprint: That of the language model (`model_fingerprint`).
    """

    denoiser: ResidualMlp
    prompter: ResidualMlp
    mean: np.ndarray
    deviation: np.ndarray
    unconditional: np.ndarray
    fingerprint: str

    @property
    def embedding_size(self) -> int:
        return len(self.mean)

    def normed(self, embedding: np.ndarray) -> np.ndarray:
        """The normed embedding."""
        normed: np.ndarray = (embedding - self.mean) / self.deviation
        return normed

    def sentence(self, normed: np.ndarray) -> np.ndarray:
        """The embeddings, of length 1, of normed ones `[..., embedding_size]`."""
        raw = normed * self.deviation + self.mean
        sentence: np.ndarray = raw / np.linalg.norm(raw, axis=-1, keepdims=True)
        return sentence

    def soft_prompt(self, noisy: np.ndarray, level: float, hidden_size: int) -> np.ndarray:
        """The soft prompt, float32 `[rows, hidden_size]`."""
        rows = self.prompter(np.concatenate([noisy, level_features(level)]))
        return rows.astype(np.float32).reshape(-1, hidden_size)

    def num_rows(self, hidden_size: int) -> int:
        """The length of the soft prompt."""
        return len(self.prompter.tensors["last.bias"]) // hidden_size

    def check(self, network: Network) -> None:
        """Raise `InvalidRequestError` unless it was trained for `network`."""
        size, total = network.spec.hidden_size, len(self.prompter.tensors["last.bias"])
        check_model(self.fingerprint, network, "parts of dglm", "dglm")
        if not total or total % size:
            raise InvalidRequestError(
                f"the soft prompt of dglm has {total} numbers, which are no rows of {size}"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        vectors = {
            "mean": self.mean, "deviation": self.deviation, "unconditional": self.unconditional,
        }  # fmt: skip
        for name, network in (("denoiser", self.denoiser), ("prompter", self.prompter)):
            vectors |= {f"{name}.{part}": tensor for part, tensor in network.tensors.items()}
        _write(path, vectors, {"fingerprint": self.fingerprint})

    @staticmethod
    def load(path: Path) -> SentenceDiffusion:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or its tensors do not fit together.
        """
        tensors, facts = read_tensors(path, "parts of dglm", dtype=np.float64)

        def network(name: str) -> ResidualMlp:
            start = f"{name}."
            return ResidualMlp(
                {
                    part.removeprefix(start): tensor
                    for part, tensor in tensors.items()
                    if part.startswith(start)
                }
            )

        vectors = [tensors.get(n, np.zeros(0)) for n in ("mean", "deviation", "unconditional")]
        loaded = SentenceDiffusion(
            network("denoiser"),
            network("prompter"),
            vectors[0],
            vectors[1],
            vectors[2],
            facts.get("fingerprint", ""),
        )
        size = loaded.embedding_size
        prompt = loaded.prompter.tensors.get("last.bias", np.zeros(0))
        if not (
            size
            and loaded.mean.shape == loaded.deviation.shape == loaded.unconditional.shape == (size,)
            and (loaded.deviation > 0).all()
            and loaded.denoiser.check(2 * size + 2 * NUM_WAVES, size)
            and loaded.prompter.check(size + 2 * NUM_WAVES, prompt.size)
        ):
            raise CheckpointError(f"parts of dglm {path}: the tensors do not fit together")
        return loaded


@dataclass(frozen=True, eq=False)
class EmbeddingClassifier:
    """A logistic regression on sentence embeddings of length 1.

    Attributes:
        weight: float64 `[embedding_size]`.
        bias: The logit of an embedding of zeros.
    """

    weight: np.ndarray
    bias: float

    def logits(self, embeddings: np.ndarray) -> np.ndarray:
        """The logits `[...]` that embeddings `[..., embedding_size]` have the attribute."""
        logits: np.ndarray = embeddings @ self.weight + self.bias
        return logits

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        _write(path, {"weight": self.weight, "bias": np.array([self.bias])}, {})

    @staticmethod
    def load(path: Path) -> EmbeddingClassifier:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        tensors, _ = read_tensors(path, "classifier of embeddings", dtype=np.float64)
        weight, bias = tensors.get("weight", np.zeros(())), tensors.get("bias", np.zeros(()))
        if weight.ndim != 1 or bias.shape != (1,):
            raise CheckpointError(f"classifier of embeddings {path}: it has other tensors")
        return EmbeddingClassifier(weight, float(bias[0]))


def _write(path: Path, tensors: Mapping[str, np.ndarray], facts: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(rounded, path, metadata=facts)
