"""Regular expressions, grammars and choices: constraints compiled by the mask engine directly."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
from anydecode.constraints.forced_loops import may_force_endlessly
from anydecode.constraints.guidance_engine import (
    GuidanceState,
    library,
    tokenizer_binding,
)
from anydecode.constraints.lark_tokens import is_terminal, tokens
from anydecode.errors import ConstraintError, one_line
from anydecode.models.tokenizer import Tokenizer

#: Engines that compute masks.
ENGINES = ("llguidance", "xgrammar")
#: Maximum length of a description, in characters.
MAX_CHARACTERS = 1 << 20
#: Maximum number of rules of a grammar: a longer chain overflows the stack of the mask engine.
_MAX_RULES = 1000
#: Maximum number of references to rules. The time of one mask may grow with their cube, as in
#: `b ::= "x" | b | b | ...`: at this number it is up to a second.
_MAX_REFERENCES = 1000
#: With this option masks allow every tokenization of forced text, and no forced text is drafted.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_SURROGATE = re.compile("[\ud800-\udfff]")
_RULE_PATTERN = re.compile(r"^[ \t]*[!?]?[A-Za-z_]", re.MULTILINE)


class _Language(Constraint):
    """A language that both engines can compile. Subclasses have a field `engine`."""

    kind: str
    engine: str

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConstraintError(
                f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}"
            )

    @abstractmethod
    def guidance(self) -> str:
        """The grammar in llguidance's notation."""

    @abstractmethod
    def xgrammar(self) -> tuple[str, str]:
        """The kind of grammar ("regex" or "grammar") and its text, for xgrammar."""

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        if self.engine == "xgrammar":
            from anydecode.constraints.xgrammar_engine import XGrammarState

            return XGrammarState.of(*self.xgrammar(), tokenizer, vocab_size)
        return GuidanceState.of(self.guidance(), tokenizer, vocab_size)

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        if self.engine != "llguidance":
            return False
        return tokenizer_binding(tokenizer, vocab_size).has_template(self.guidance())

    def report(self) -> ConstraintReport:
        return ConstraintReport(self.kind, self.engine, masked=(self.kind,))


@dataclass(frozen=True)
class Regex(_Language):
    """Allows the texts that match a regular expression as a whole.

    Args:
        pattern: The regular expression, without look-around and back-references.
        engine: The library that computes the masks, one of `ENGINES`.
    """

    pattern: str
    engine: str = "llguidance"
    kind = "regex"

    def guidance(self) -> str:
        _check_text("pattern", self.pattern)
        grammar: str = library().LLMatcher.grammar_from_regex(self.pattern)
        return grammar

    def xgrammar(self) -> tuple[str, str]:
        _check_text("pattern", self.pattern)
        return "regex", self.pattern


@dataclass(frozen=True)
class Grammar(_Language):
    """Allows the texts of a context-free grammar.

    Args:
        text: The grammar.
        syntax: "lark" (in llguidance's dialect, first rule `start`) or "gbnf" (llama.cpp's
            notation, first rule `root`).
        engine: The library that computes the masks, one of `ENGINES`; xgrammar reads gbnf only.
    """

    text: str
    syntax: str = "lark"
    engine: str = "llguidance"
    kind = "grammar"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.syntax not in ("lark", "gbnf"):
            raise ConstraintError(f"syntax must be lark or gbnf, not {self.syntax!r}")

    def guidance(self) -> str:
        text = self.lark()
        if may_force_endlessly(text):
            text = _NO_FORCING + text
        grammar: str = library().LLMatcher.grammar_from_lark(text)
        return grammar

    def lark(self) -> str:
        """The grammar in Lark's notation.

        Raises:
            ConstraintError: It is invalid or too large.
        """
        self._check()
        text = self.text
        if self.syntax == "gbnf":
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                text = gbnf_to_lark(self.text)
            except Exception as error:  # the converter raises its own error types
                raise ConstraintError(f"the GBNF grammar is not valid: {one_line(error)}") from None
        names = (token["defined"] or token["reference"] for token in tokens(text))
        references = sum(name is not None and not is_terminal(name) for name in names)
        if references > _MAX_REFERENCES:
            raise ConstraintError(
                f"the grammar refers to rules {references} times; at most {_MAX_REFERENCES} times"
                " are allowed: merge some of them"
            )
        return text

    def _check(self) -> None:
        _check_text("grammar", self.text)
        rules = sum(1 for _ in _RULE_PATTERN.finditer(self.text))
        if rules > _MAX_RULES:
            raise ConstraintError(
                f"the grammar has {rules} rules; at most {_MAX_RULES} are allowed: merge some of"
                " them"
            )

    def xgrammar(self) -> tuple[str, str]:
        if self.syntax != "gbnf":
            raise ConstraintError("engine='xgrammar' supports gbnf grammars only, not lark")
        self._check()
        return "grammar", self.text


#: Maximum number of options that are alternatives of a rule.
_MAX_ALTERNATIVES = 1000


@dataclass(frozen=True, init=False)
class Choice(_Language):
    """Allows one of several texts.

    Args:
        options: The texts, none of them empty.
        engine: The library that computes the masks, one of `ENGINES`.
    """

    options: tuple[str, ...]
    engine: str = "llguidance"
    kind = "choice"

    def __init__(self, options: Sequence[str], engine: str = "llguidance") -> None:
        if (
            not isinstance(options, Iterable)
            or isinstance(options, str)
            or not all(isinstance(option, str) and option for option in options)
        ):
            raise ConstraintError("choices must be a list of strings that are not empty")
        if not options:
            raise ConstraintError("a choice needs at least one option")
        for option in options:
            _check_text("option", option)
        object.__setattr__(self, "options", tuple(options))
        object.__setattr__(self, "engine", engine)
        self.__post_init__()

    def guidance(self) -> str:
        literals = [json.dumps(option, ensure_ascii=False) for option in self.options]
        # The parser follows every alternative of a rule by itself, and has a limit of their number;
        # a terminal is one automaton of all of them.
        rule = "start: OPTION\nOPTION: " if len(literals) > _MAX_ALTERNATIVES else "start: "
        grammar: str = library().LLMatcher.grammar_from_lark(rule + " | ".join(literals))
        return grammar

    def xgrammar(self) -> tuple[str, str]:
        literals = [json.dumps(option, ensure_ascii=False) for option in self.options]
        return "grammar", "root ::= " + " | ".join(literals)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str) or not text:
        raise ConstraintError(f"the {name} must be a string that is not empty")
    if len(text) > MAX_CHARACTERS:
        raise ConstraintError(
            f"the {name} has {len(text)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    if not text.isascii() and _SURROGATE.search(text):
        raise ConstraintError(
            f"the {name} contains a lone surrogate, which is not a valid character"
        )
