"""Texts for the decoder `apar` (Liu et al., "APAR: LLMs Can Do Auto-Parallel Auto-Regressive
Decoding", arXiv:2401.06761): answers as trees, and their rows.

An answer with a list, or with several paragraphs, becomes heads and details. Its first row has a
fork token in place of every detail; each detail has a row of its own, behind the answer up to its
fork and the child token. Other answers stay as they are, at most as many as there are trees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from anydecode.errors import InvalidRequestError
from anydecode.training.block_adapter import Pair

#: Minimum number of details of a tree, and of characters of each detail of a list.
MIN_DETAILS, MIN_DETAIL = 3, 10
#: Minimum number of characters of a paragraph without its detail.
MIN_PARAGRAPH = 20
_ITEM = re.compile(r"^([ \t]*\d+\.[ \t]+[^\n:]+:)([^\n]*)", re.MULTILINE)
#: Code, formulas, markup, links and ideographs, and titles that look like ends of sentences.
_EXCLUDED = re.compile(
    r"```|\$\$|[<>=]|---|http|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]|\b(?:mr|mrs|dr)\.", re.I
)


def split_answer(text: str) -> list[tuple[str, str]]:
    """The heads of an answer and their details, which are the answer if they are joined; the last
    detail may be empty. Empty for an answer that is no tree."""
    if _EXCLUDED.search(text):
        return []
    parts = _list_parts(text) or _paragraph_parts(text)
    return parts if sum(bool(detail) for _, detail in parts) >= MIN_DETAILS else []


def _list_parts(text: str) -> list[tuple[str, str]]:
    """Those of a list "1. title: detail"."""
    items = list(_ITEM.finditer(text))
    if not items or min(len(one[2].strip()) for one in items) < MIN_DETAIL:
        return []
    starts = [0, *(one.end() for one in items)]
    parts = [(text[start : one.end(1)], one[2]) for start, one in zip(starts, items, strict=False)]
    return [*parts, (text[starts[-1] :], "")]


def _paragraph_parts(text: str) -> list[tuple[str, str]]:
    """Those of paragraphs: their first sentences, and the others."""
    parts = []
    for paragraph in re.split(r"(?<=\n\n)", text):
        head, point, detail = paragraph.partition(". ")
        rest = detail[len(detail.rstrip("\n")) :]
        if len((head + point).strip()) < MIN_PARAGRAPH:
            return []
        parts += [(head + point, detail.rstrip("\n"))] + ([(rest, "")] if rest else [])
    merged: list[tuple[str, str]] = []
    for head, detail in parts:
        if merged and not merged[-1][1]:
            head = merged.pop()[0] + head
        merged.append((head, detail))
    return merged


def tree_rows(
    prompt: Sequence[int],
    parts: Sequence[tuple[str, str]],
    encode: Callable[[str], list[int]],
    marks: tuple[int, int],
    end: int,
    *,
    is_complete: bool = True,
) -> list[Pair]:
    """The rows of a tree.

    Args:
        prompt: The tokens of the prompt.
        parts: The heads and details.
        encode: The tokens of a text.
        marks: The fork and the child token.
        end: The token at the end of a row.
        is_complete: Whether the answer ends with the last part. Otherwise the end of the last
            detail is not learned, nor what follows it.
    """
    main: list[int] = []
    details: list[Pair] = []
    for head, detail in parts:
        main += encode(head)
        if detail:
            main.append(marks[0])
            details.append(([*prompt, *main, marks[1]], [*encode(detail), end]))
    if is_complete:
        return [(list(prompt), [*main, end]), *details]
    return [(list(prompt), main), *(details[:-1] if parts[-1][1] else details)]


def tree_texts(
    pairs: Sequence[Pair],
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
    marks: tuple[int, int],
    ends: frozenset[int],
) -> list[list[Pair]]:
    """The rows of answers by text, trees and others in turn.

    Raises:
        InvalidRequestError: No answer is a tree.
    """
    trees: list[list[Pair]] = []
    others: list[list[Pair]] = []
    end = min(ends)
    for prompt, answer in pairs:
        is_complete = answer[-1] in ends
        text = decode([token for token in answer if token not in ends])
        if parts := split_answer(text):
            trees.append(tree_rows(prompt, parts, encode, marks, end, is_complete=is_complete))
        else:
            others.append([(prompt, answer)])
    if not trees:
        raise InvalidRequestError(
            f"none of {len(pairs)} answers has a list or paragraphs with {MIN_DETAILS} details:"
            " give prompts that ask for lists, or more answers and tokens"
        )
    texts: list[list[Pair]] = []
    for number, tree in enumerate(trees):
        texts += [tree, *others[number : number + 1]]
    return texts
