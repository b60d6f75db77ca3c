"""Causal models that judge by the answer "yes" or "no" whether a document is relevant: the
Qwen3-Reranker (Zhang et al., arXiv:2506.05176)."""

from __future__ import annotations

from dataclasses import dataclass

from anydecode.models.checkpoint import Checkpoint
from anydecode.models.files import folder_name, read_text

_SYSTEM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
#: How these repositories call themselves: their configs are those of any Qwen3.
_TITLE = "qwen3-reranker"


@dataclass(frozen=True)
class JudgePrompt:
    """The prompt that asks for the answer."""

    def texts(self, query: str, document: str, instruction: str | None) -> tuple[str, str, str]:
        """What is before, in and after the user's part of the prompt. Each is tokenised alone."""
        wanted = _INSTRUCTION if instruction is None else instruction
        middle = f"<Instruct>: {wanted}\n<Query>: {query}\n<Document>: {document}"
        return _SYSTEM, middle, _ANSWER


@dataclass(frozen=True)
class YesNo(JudgePrompt):
    """The tokens of the two answers."""

    yes_id: int
    no_id: int


def read_yes_no(checkpoint: Checkpoint) -> YesNo | None:
    """The answers of a Qwen3-Reranker, known by the name of its folder or the title of its README;
    None for other models."""
    if checkpoint.config.get("model_type") != "qwen3" or checkpoint.tokenizer is None:
        return None
    readme = checkpoint.path / "README.md"
    is_named = _TITLE in folder_name(checkpoint.path).lower()
    if not is_named and readme.is_file():
        lines = read_text(readme).lower().splitlines()
        is_named = any(line.startswith("#") and _TITLE in line for line in lines)
    if not is_named:
        return None
    ids = [checkpoint.tokenizer.encode(word, special=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in ids):
        return None
    return YesNo(ids[0][0], ids[1][0])
