"""The HTML view of a generation: every token is shown once, in the colour of its drafter."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.trace.html import fragment, page, passes_of
from traces import Reader, make_generation

RECORD = {
    "position": 3,
    "drafted": [11, 12, 13, 14],
    "parents": [-1, 0, 0, -1],
    "sources": ["copy", "past", "copy", "copy"],
    "accepted": [0, 2],
    "tokens": [11, 13, 15],
    "draft_seconds": 0.001,
    "verify_seconds": 0.009,
}


def test_tokens_are_coloured_by_their_drafter() -> None:
    reader = Reader(page(make_generation([RECORD], [10, 11, 13, 15])))
    assert reader.words == [("own", "start"), ("s0", "<b>"), ("s0", "\n"), ("own", "end")]


def test_rejected_drafts_are_shown_where_they_were_rejected() -> None:
    rejected = {**RECORD, "accepted": [], "tokens": [15]}
    html = fragment(make_generation([rejected], [10, 15]))
    text = html[html.index('<div class="text">') : html.index("<h2>Time")]
    assert unescape(re.sub("<[^>]*>", "|", text)).replace("||", "|") == "|start|<b> no|end|"
    assert "0 of 4" in html


def test_each_tree_node_is_shown_once_with_accepted_ones_coloured() -> None:
    html = page(make_generation([RECORD], [10, 11, 13, 15]))
    listed = html[html.index('<ol class="passes">') :]
    chips = [(kind, unescape(text)) for kind, text in
             re.findall(r'class="chip (\w+)"[^>]*>([^<]*)<', listed)]  # fmt: skip
    assert chips == [
        ("own", "start"), ("s0", "<b>"), ("off", " no"), ("s0", "↵"), ("off", "alt"),
        ("own", "end"),
    ]  # fmt: skip


def test_a_wrongly_accepted_node_changes_the_page() -> None:
    wrong = {**RECORD, "accepted": [0, 1]}
    assert page(make_generation([wrong], [10, 11, 13, 15])) != page(
        make_generation([RECORD], [10, 11, 13, 15])
    )


def test_links_resolve_and_nothing_is_fetched() -> None:
    for records in ([RECORD], [{**RECORD, "position": 2}], []):
        html = page(make_generation(records, [10, 11, 13, 15, 15]))
        reader = Reader(html)
        if records:
            assert {link[1:] for link in reader.links} <= set(reader.ids)
        assert not re.search(r"https?:|url\(|@import|src=", html)


def test_tokens_without_a_trace_are_shown() -> None:
    generation = make_generation([RECORD], [10, 11, 13, 15, 10, 10])
    assert [p.tokens for p in passes_of(generation)] == [[10], [11, 13, 15], [10, 10]]
    assert passes_of(make_generation(None, [10]))[0].tokens == [10]


def test_an_answer_that_ends_within_accepted_drafts() -> None:
    generation = make_generation([RECORD], [10, 11])
    assert [p.num_accepted for p in passes_of(generation)] == [0, 1]
    Reader(page(generation))


def generate(decoder: str, **options: object) -> Generation:
    with LLM(ScriptedModel(vocab_size=263, seed=5), tokenizer=ByteTokenizer()) as llm:
        return llm.generate("one two one two one", decoder=decoder, trace=True, max_tokens=30,
                            ignore_eos=True, **options)  # fmt: skip


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt-lookup", "suffix", "auto"])
def test_a_real_trace_shows_each_token_once(decoder: str) -> None:
    generation = generate(decoder)
    assert [token for p in passes_of(generation) for token in p.tokens] == generation.tokens
    reader = Reader(page(generation))
    shown = "".join(text for _, text in reader.words)
    assert shown == "".join(map(generation.token_text, generation.tokens)).replace("\r", "\n")


def test_notebooks_render_answers_with_and_without_a_trace() -> None:
    traced = generate("prompt-lookup")
    with LLM(ScriptedModel(vocab_size=263, seed=5), tokenizer=ByteTokenizer()) as llm:
        plain = llm.generate("a", max_tokens=5, ignore_eos=True)
    for generation, headings in (
        (traced, ["Text", "Time per pass", "Passes"]),
        (plain, ["Text"]),
    ):
        html = generation._repr_html_()
        Reader(html)  # well-formed
        assert re.findall("<h2>(.*?)</h2>", html) == headings
        assert "<html" not in html  # a fragment, for a cell


def test_the_trace_option_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from anydecode.cli import options
    from anydecode.cli.main import app

    def load(*args: object) -> LLM:
        return LLM(ScriptedModel(vocab_size=263, seed=5), tokenizer=ByteTokenizer())

    monkeypatch.setattr(options, "load", load)
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path))
    file = tmp_path / "out.html"
    arguments = ["generate", "one two one two", "-d", "auto", "-n", "9", "--trace", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    Reader(file.read_text(encoding="utf-8"))
