"""The tokens of a grammar in Lark's notation, as the mask engine's own lexer reads them.

The checks of a grammar count and look for these tokens. If they divided its text in another way,
for instance at a quote in a comment, they would not see what the engine compiles.

Source: llguidance, `parser/src/lark/lexer.rs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_STRING = r'(?:\\.|[^"\\\n])*'
_REGEX = r"(?:\\.|[^/\\])+"
_NAME = r"!?[_?]?[a-z][a-z0-9_\-]*|_?[A-Z][A-Z0-9_\-]*"
#: What may follow a name in its definition: attributes, a priority. Outside of its strings and
#: expressions, a list of attributes contains no "[".
_HEAD = (
    rf'\s*(?:\[(?:"{_STRING}"|/{_REGEX}/|[^\["/\]\n])*\]\s*)?'
    r"(?:\.\s*-?\d+\s*)?:"
)
#: Strings and expressions without an end, which the engine refuses, are one token too, so that no
#: text is read twice.
_TOKEN = re.compile(
    rf'(?:\#|//)[^\n]*|"{_STRING}(?:"i?)?|<[^<>\s]+>|@[A-Za-z0-9_\-]+'
    rf"|/(?P<regex>{_REGEX})(?:/(?P<flags>[imslux]*))?"
    rf"|(?P<defined>{_NAME}){_HEAD}|(?P<reference>{_NAME})"
    r"|(?P<operator>[*+?&(\[]|\{\s*\d*\s*(?:,\s*\d*\s*)?\}|\{|~\s*\d+|~)"
)


def tokens(grammar: str) -> Iterator[re.Match[str]]:
    """The tokens that matter, in order: groups `regex` with its `flags`, `defined` (the name at the
    begin of a definition), `reference` (another name), and `operator` (a repetition, the begin of a
    group or of braces, an intersection).

    Args:
        grammar: A grammar in the notation of Lark. Its errors are not reported.
    """
    return (token for token in _TOKEN.finditer(grammar) if token.lastgroup is not None)


def is_terminal(name: str) -> bool:
    """Whether a name is that of a terminal and not of a rule."""
    return name.lstrip("_").isupper()
