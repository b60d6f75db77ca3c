"""One page per catalogue key, and an index by family, generated from the catalogue."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from anydecode import catalogue
from anydecode.catalogue import FAMILIES, Card
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.checks import measures_of
from anydecode.decoders.decoder import Decoder
from anydecode.sampling.preset import SamplerPreset

TITLES = {
    "speculative": "Speculative decoding",
    "depth": "Early exit",
    "diffusion": "Diffusion",
    "constraint": "Constraints",
    "sampling": "Sampling",
    "search": "Search",
    "alignment": "Guidance",
    "serving": "Serving and memory",
}
CHECKED = {
    "token-exact": "the tokens equal those of plain decoding at temperatures 0 and 0.8",
    "greedy-exact": "the tokens equal those of plain decoding at temperature 0",
    "distribution-exact": "a chi-square test compares samples with the model's distribution; at"
    " temperature 0 the tokens equal those of plain decoding",
}
#: Pages with measurements, whose tables have a method in the first column.
MEASURED = ("performance.md", "diffusion.md")


def on_config(config: Any) -> Any:
    """Add the pages to the navigation."""
    pages: list[Any] = ["methods/index.md", {"What works with what": "methods/matrix.md"}]
    for family in FAMILIES:
        keys = [{card.key: page_of(card.key)} for card in catalogue.cards(family)]
        pages.append({TITLES[family]: keys})
    for item in config.nav:
        if "Methods" in item:
            item["Methods"] = pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """Generate the pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "methods/index.md", content=index()))
    figures = measured(Path(config.docs_dir))
    for card in catalogue.cards():
        content = method_page(card, figures.get(card.key, []))
        files.append(File.generated(config, page_of(card.key), content=content))
    return files


def page_of(key: str) -> str:
    """The address of a method's page."""
    return f"methods/{key.replace('+', 'p')}.md"


def index() -> str:
    """All methods by family."""
    lines = [
        "# Methods",
        "",
        f"{len(catalogue.cards())} methods, by family. `anydecode methods` prints this list, and"
        " `anydecode certify KEY` tests a method's claim on your machine.",
        "",
    ]
    for family in FAMILIES:
        lines += [f"## {TITLES[family]}", "", "| method | claim | |", "|---|---|---|"]
        for card in catalogue.cards(family):
            link = page_of(card.key).removeprefix("methods/")
            summary = f"*Partial.* {card.summary}" if card.missing else card.summary
            lines.append(f"| [`{card.key}`]({link}) | {card.exactness} | {summary} |")
        lines.append("")
    return "\n".join(lines)


def method_page(card: Card, figures: list[str]) -> str:
    """The page of one method."""
    build = catalogue.entries()[card.key].build
    needs = ", ".join(card.needs) or "nothing beyond the model"
    lines = [
        f"# {card.key}",
        "",
        card.summary,
        "",
        f"- **Claim:** {card.exactness}: {catalogue.CLAIMS[card.exactness]}.",
        *([f"- **Selected by:** {coded(card.use)}"] if card.use else []),
        f"- **Needs:** {needs}.",
        f"- **Works with:** {works_with(card)}",
        f"- **Paper:** {linked(card.paper)}",
        f"- **Code:** `src/{build.__module__.replace('.', '/')}.py`",
        "",
        *usage(card),
        *parameters(card.key),
    ]
    if card.missing:
        lines += [
            "## Not implemented",
            "",
            "This method is partial. Of the paper's idea, it lacks:",
        ]
        lines += ["", *(f"- {escaped(one)}" for one in card.missing), ""]
    if card.deviations:
        lines += ["## Differences from the paper", ""]
        lines += [f"- {escaped(one)}" for one in card.deviations] + [""]
    lines += certificate(card)
    if card.measured or figures:
        results = [*(f"- {escaped(one)}" for one in card.measured), ""] if card.measured else []
        lines += ["## Measured", "", *results, *figures]
    lines += ["## Citation", "", "```bibtex", card.citation or card.paper, "```", ""]
    return "\n".join(lines)


def works_with(card: Card) -> str:
    """What the card promises, with a link to what was found."""
    promised = f"{', '.join(card.works_with)}. " if card.works_with else ""
    return f"{promised}See [What works with what](matrix.md)."


def linked(paper: str) -> str:
    """A paper with links to arXiv."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def escaped(text: str) -> str:
    """Text without markup."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def coded(use: str) -> str:
    """What selects a method, as code."""
    return " or ".join(f"`{one}`" for one in use.split(" or "))


def usage(card: Card) -> list[str]:
    """How a request selects the method."""
    kind = catalogue.kind_of(card.key)
    option = None
    if kind is not None and issubclass(kind, Decoder):
        option = "decoder"
    elif kind is not None and issubclass(kind, SamplerPreset):
        option = "sampler"
    if option is None:
        return []
    models = models_for(card) if option == "decoder" else ""
    command = f'anydecode generate{models} --{option} {card.key} --prompt "..."'
    call = f'llm.generate("...", {option}="{card.key}")'
    return ["```sh", command, "```", "", "```python", call, "```", ""]


def models_for(card: Card) -> str:
    """The options that select models of the package on which the decoder runs."""
    decoder = catalogue.build(card.key)
    models = ""
    if decoder.requirements.causal is False:
        models = " --model " + ("tiny-blocks" if "block" in card.needs[0] else "tiny-diffusion")
    if decoder.requirements.drafts_blocks or decoder.requirements.drafts_exit:
        models += " --model MODEL --draft DRAFTER"
    elif "draft" in decoder.requirements.runners:
        models += " --draft " + (
            "self:int4" if decoder.requirements.draft_causal else "tiny-diffusion"
        )
    return models


def parameters(key: str) -> list[str]:
    """The table of the parameters that follow the key, as in `key:name=value`."""
    rows = []
    for one in catalogue.parameters(key):
        kind = one.type.replace(" | ", " or ")
        value = f"`{one.default}`" if one.default else "required"
        remote = escaped(one.remote) or "not allowed"
        cells = (f"`{one.name}`", kind, value, one.bounds, remote, escaped(one.description))
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    return [
        "## Parameters",
        "",
        "They follow the key: `key:name=value,name=value`. Other numbers than those in the column"
        " *allowed* are refused. Requests to a server may set those with"
        " values in the column *requests*; `anydecode serve --allow-decoder` allows more.",
        "",
        "| name | type | default | allowed | requests | |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def certificate(card: Card) -> list[str]:
    """What `anydecode certify` checks."""
    lines = ["## Certificate", "", "```sh", f"anydecode certify {card.key}", "```", ""]
    kind = catalogue.kind_of(card.key)
    if kind is not None and issubclass(kind, Decoder):
        checked = f"{CHECKED[card.exactness]}, and " if card.exactness in CHECKED else ""
        lines.append(
            f"- **claim**: {checked}requests in a batch, and requests that are restarted at random"
            " yields, give the tokens of the request alone."
        )
    elif kind is not None and issubclass(kind, SamplerPreset):
        lines.append(
            "- **claim**: the engine's distribution equals that of an oracle, and every token-exact"
            " decoder generates the tokens of plain decoding under the rule."
        )
    oracle = load_oracle_tests()[card.key]
    lines.append(f"- **oracle test**: {escaped(' '.join((inspect.getdoc(oracle) or '').split()))}")
    lines += [f"    - {escaped(name)}" for name in check_names(oracle)]
    for one in measures_of(card.key):
        lines.append(
            f"- **measure**: {escaped(one.name)}: at most {one.margin:g}, over {one.samples}"
            " samples."
        )
    return [*lines, ""]


def check_names(oracle: Any) -> list[str]:
    """The names of the checks in the source of an oracle test; `...` stands for inserted values."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(oracle)))
    except (OSError, TypeError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check" and node.args:
            name = literal(node.args[0])
            if name and name not in names:
                names.append(name)
    return names


def literal(node: ast.expr) -> str:
    """The text of a string or f-string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) or "..." for value in node.values)
    return ""


def measured(folder: Path) -> dict[str, list[str]]:
    """The rows of the tables of `MEASURED` by the method that they are about."""
    found: dict[str, list[str]] = {}
    for name in MEASURED:
        heading, header = "", []
        for line in (folder / name).read_text().splitlines():
            if line.startswith("#"):
                heading, header = line.lstrip("# "), []
            elif not line.startswith("|"):
                header = []
            elif len(header) < 2:
                header.append(line)
            else:
                key = re.match(r"\|[^|]*?`([^`:]+)[^`]*`", line)
                if key is None or key[1] not in catalogue.entries():
                    continue
                tables = found.setdefault(key[1], [])
                title = f"[{heading}](../{name}#{slug(heading)}):"
                if title not in tables:
                    tables += [title, "", *header, line, ""]
                else:
                    at = len(tables) - tables[::-1].index("") - 1
                    tables.insert(at, line)
    return found


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
