"""A `custom_generate` folder of `transformers` as a decoder.

from anydecode.integrations.custom_generate import CustomGenerate
llm = LLM(model, tokenizer=tokenizer)  # a model of transformers
llm.generate("Once", decoder=CustomGenerate("path/to/folder", trust_remote_code=True))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.generation import GenerationMixin

from anydecode.api.text import OutputProcessor
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError, one_line
from anydecode.models.hf import HuggingFaceModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class CustomGenerate(Decoder):
    """Runs the code of a local folder in the layout of `transformers`'
    `generate(custom_generate=...)`: `custom_generate/generate.py` with a function `generate`, and
    optionally `custom_generate/requirements.txt`.

    The function is called as `transformers` calls it, with one prompt, the maximum number of new
    tokens, and `do_sample` with the temperature. It replaces the decoding, so there is no claim of
    exactness, and its tokens arrive all at once: until it returns, the engine runs nothing else,
    and the request cannot be cancelled. The rules of the request (stop strings and tokens) end the
    text afterwards.

    Python only: the class is no catalogue key, so that no request to a server can name a folder.

    Args:
        folder: The folder that contains `custom_generate/`.
        trust_remote_code: Must be True: the folder's code runs with the rights of this process.
        **arguments: Further arguments of the folder's function, such as `top_k=40`.

    Raises:
        InvalidRequestError: There is no such folder or file, or its code is not trusted.
    """

    requirements = Requirements(can_sample=False)

    def __init__(
        self, folder: str | Path, *, trust_remote_code: bool = False, **arguments: Any
    ) -> None:
        self.folder = Path(folder)
        self.arguments = arguments
        if not (self.folder / "custom_generate" / "generate.py").is_file():
            raise InvalidRequestError(
                f"{self.folder} has no custom_generate/generate.py; pass a local folder that does"
            )
        if trust_remote_code is not True:
            raise InvalidRequestError(
                f"{self.folder} contains code that would run here: read it, then pass"
                " trust_remote_code=True"
            )

    @property
    def exactness(self) -> str:
        return "lossy"

    def prepare(self, sequence: Sequence) -> None:
        """Check that the request has no option that the folder's function would not get.

        Raises:
            UnsupportedCombinationError: It has one.
        """
        if not sequence.sampler.is_temperature_only:
            raise UnsupportedCombinationError(
                "CustomGenerate supports temperature only of the sampling options: pass others, in"
                " the words of transformers, as CustomGenerate(folder, top_p=...)"
            )
        if sequence.compute_logprobs is not None:
            raise UnsupportedCombinationError("CustomGenerate does not support logprobs")

    def decode(self, sequence: Sequence) -> Decoding:
        model = sequence.model()
        if not isinstance(model, HuggingFaceModel):
            raise UnsupportedCombinationError(
                f"CustomGenerate needs a model of transformers, and {model.name} is opened"
                " natively: LLM(AutoModelForCausalLM.from_pretrained(...), tokenizer=...)"
            )
        tokens = self._generate(model.model, sequence)
        sequence.emit(tokens)
        if not sequence.finished:  # the function ended the text by a rule of its own
            assert isinstance(sequence.stop_checker, OutputProcessor)
            sequence.stop_checker.end("stop")
            sequence.finish_reason = "stop"
        yield from ()

    def _generate(self, model: Any, sequence: Sequence) -> list[int]:
        """The new tokens, as the folder's function returns them."""
        folder = str(self.folder.resolve())
        try:
            model.load_custom_generate(folder, trust_remote_code=True)
        except (ImportError, OSError, ValueError) as error:  # missing packages, say
            raise InvalidRequestError(one_line(error)) from error
        prompt = torch.tensor([sequence.prompt], device=model.device)
        options: dict[str, Any] = {"max_new_tokens": sequence.remaining, "do_sample": False}
        if not sequence.sampler.is_greedy:
            options |= {"do_sample": True, "temperature": sequence.sampler.temperature}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed((sequence.noise.seed + sequence.noise.stream) % (1 << 63))
            output = GenerationMixin.generate(
                model,
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                custom_generate=folder,
                trust_remote_code=True,
                **{**options, **self.arguments},
            )
        ids = getattr(output, "sequences", output)
        count = prompt.shape[1]
        is_row = torch.is_tensor(ids) and ids.ndim == 2 and len(ids) == 1
        if not is_row or not torch.equal(ids[:, :count].to(prompt.device), prompt):
            raise InvalidRequestError(
                f"the function of {self.folder} must return one row of token ids that begins with"
                " the prompt"
            )
        new: list[int] = ids[0, count:].tolist()
        return new
