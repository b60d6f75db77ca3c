"""The page that says what each decoder works with: asked of the engine, with scripted models."""

from __future__ import annotations

from typing import Any

from anydecode import LLM, Regex, catalogue
from anydecode.catalogue import Card
from anydecode.certification.certify import small_model
from anydecode.decoders.decoder import Decoder
from anydecode.errors import AnydecodeError

#: By column: the options of a request, and the names in `Card.works_with` that promise it.
COLUMNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "truncation": ({"top_p": 0.9, "temperature": 0.8}, ("samplers",)),
    "penalties": ({"repetition_penalty": 1.2, "temperature": 0.8}, ("samplers",)),
    "mirostat": ({"mirostat": 2, "temperature": 0.8}, ("samplers",)),
    "constraint": ({"constraint": Regex("[ab]+")}, ("constraints",)),
    "guidance": ({"guidance_scale": 1.5, "negative_prompt": "b"}, ("guidance",)),
    "log-probs": ({"logprobs": 1}, ("logprobs",)),
    "segments": ({"segment": 2}, ()),
    "n samples": ({"n": 2, "temperature": 0.8}, ()),
}
PROMPT = "abcabcabcabc"


def on_files(files: Any, config: Any) -> Any:
    """Generate the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "methods/matrix.md", content=page(answers())))
    return files


def decoders() -> list[Card]:
    """The cards of all decoders."""
    return [
        card
        for card in catalogue.cards()
        if issubclass(catalogue.kind_of(card.key) or object, Decoder)
    ]


def answers() -> dict[str, dict[str, str]]:
    """By decoder and column: why the request is refused; empty if it runs."""
    found: dict[str, dict[str, str]] = {}
    for card in decoders():
        with small_model(card, catalogue.build(card.key).requirements)[1]() as llm:
            found[card.key] = {
                column: refusal(llm, card.key, options) for column, (options, _) in COLUMNS.items()
            }
    return found


def refusal(llm: LLM, key: str, options: dict[str, Any]) -> str:
    """The message with which a short request is refused; empty if it runs."""
    try:
        llm.generate(PROMPT, decoder=key, max_tokens=4, seed=1, **options)
    except AnydecodeError as error:
        return " ".join(str(error).split())
    return ""


def page(found: dict[str, dict[str, str]]) -> str:
    """The matrix, with the messages below."""
    lines = [
        "---",
        "hide: [toc]",
        "---",
        "",
        "# What works with what",
        "",
        "Each cell was asked of the engine when this page was built: a short request with the"
        " decoder and the option, on small scripted models. A number refers to the message with"
        " which the request is refused. Nothing is ignored silently: a combination either works or"
        " is refused in one line.",
        "",
        "Batches, schedules, the prefix cache, the formats of the key-value cache and streams"
        " belong to the engine, and no decoder has code for them. The certificates test batches and"
        " restarts for every decoder.",
        "",
        '<div class="matrix" markdown>',
        "",
        f"| decoder | model | {' | '.join(COLUMNS)} |",
        f"|---|---|{':-:|' * len(COLUMNS)}",
    ]
    notes: list[str] = []
    for card in decoders():
        row = []
        for column in COLUMNS:
            message = found[card.key][column].replace(repr(card.key), "this decoder")
            if not message:
                row.append("✓")
                continue
            if message not in notes:
                notes.append(message)
            row.append(f"[{notes.index(message) + 1}](#messages)")
        address = card.key.replace("+", "p")
        needs = ", ".join(card.needs) or "causal"
        lines.append(f"| [`{card.key}`]({address}.md) | {needs} | {' | '.join(row)} |")
    lines += ["", "</div>", "", "## Messages", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"
