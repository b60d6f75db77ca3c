"""The views of the web page in a real browser: examples, race, constraints, sampling, decoders and
load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from anydecode import LLM, catalogue  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.models import ServedModel, ServedModels  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from browser import CHROMIUM, DOWN, DRIVER, ENTER, SPACE, Browser  # noqa: E402

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
    ),
]
#: Functions for the scripts below.
AT = "const at = (id) => document.getElementById(id);"
#: Expression: no view runs anything.
IDLE = "[...document.querySelectorAll('.run')].every((one) => one.textContent !== 'Stop')"
STATE = "document.getElementById('constraint-state').innerText"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with LiveServer(llm, Settings(name="scripted", port=0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def only_browser(tmp_path_factory: Any) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    browser.size(1440, 900)
    yield browser
    browser.close()


@pytest.fixture
def browser(only_browser: Browser, url: str) -> Iterator[Browser]:
    """A browser with the page just opened, for a test that leaves no error in the console."""
    only_browser.errors()
    only_browser.do("url", url="about:blank")
    only_browser.do("url", url=url)
    only_browser.until("document.body?.dataset.ready")
    only_browser.script("document.getElementById('tokens').value = 24")
    yield only_browser
    assert [one for one in only_browser.errors() if "status of 400" not in one] == []


def show(browser: Browser, view: str) -> None:
    browser.script(f"location.hash = '{view}'")
    browser.until(f"document.body.dataset.view === '{view}'")


def race(browser: Browser, *choices: tuple[str, str]) -> list[dict[str, Any]]:
    """Race decoders, given with their parameters, and return what each column shows."""
    show(browser, "race")
    for index, (key, parameters) in enumerate(choices):
        browser.script(
            f"if (document.querySelectorAll('article').length <= {index})"
            " document.getElementById('add-racer').click();"
            f"const racer = document.querySelectorAll('article')[{index}];"
            f"racer.querySelector('select').value = '{key}';"
            f"racer.querySelector('input').value = '{parameters}'"
        )
    browser.script("document.getElementById('race-form').requestSubmit()")
    browser.until(f"{IDLE} && document.querySelector('article .facts').childElementCount")
    columns: list[dict[str, Any]] = browser.script(
        "return [...document.querySelectorAll('article')].map((one) => ({"
        " text: one.querySelector('.answer').textContent,"
        " facts: one.querySelector('.facts').innerText,"
        " claim: one.querySelector('.claim').textContent,"
        " against: one.querySelector('.claim').classList.contains('error'),"
        " won: one.classList.contains('won') }))"
    )
    return columns


@pytest.mark.parametrize("index", range(6))
def test_every_example_fills_a_form_and_runs(browser: Browser, index: int) -> None:
    button = f"document.querySelectorAll('#examples button')[{index}]"
    title = browser.script(f"return {button}.querySelector('strong').textContent")
    browser.script(f"{button}.click()")
    browser.until(f"{IDLE} && document.querySelector('.facts button')", 60)
    view = browser.script("return document.body.dataset.view")
    expected = {"JSON Schema": "constraints", "Regular expression": "constraints", "Race": "race"}
    assert view == expected.get(title, "chat")
    if title == "Regular expression":
        text = browser.script("return document.getElementById('constraint-answer').innerText")
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", text)
    if title == "Creative":
        min_p = browser.script("return document.querySelector('[name=min_p]').value")
        assert float(min_p) > 0


@pytest.mark.parametrize("in_turn", [False, True])
def test_token_exact_decoders_race_to_the_same_text(browser: Browser, in_turn: bool) -> None:
    browser.script(f"document.getElementById('in-turn').checked = {str(in_turn).lower()}")
    keys = ["autoregressive", "prompt-lookup", "lookahead", "suffix"]
    columns = race(browser, *((key, "") for key in keys))
    assert len({column["text"] for column in columns}) == 1 and columns[0]["text"]
    verdict = browser.script("return document.getElementById('verdict').innerText")
    assert verdict.startswith("All 4 texts are equal.")
    assert [column["won"] for column in columns].count(True) == 1
    for column in columns[1:]:
        assert column["claim"].startswith("The same text as autoregressive, as claimed.")
        assert catalogue.CLAIMS["token-exact"] in column["claim"]
        for name in ("tokens/s", "tokens per pass", "passes", "first token"):
            assert f"{name}\n" in column["facts"]
    assert browser.script("return document.getElementById('add-racer').disabled")


def test_another_text_of_a_lossy_decoder_is_allowed_and_of_an_exact_one_is_not(
    browser: Browser,
) -> None:
    choices = (("autoregressive", ""), ("beam", ""))
    lossy = race(browser, *choices)[1]
    assert "which the claim allows" in lossy["claim"] and not lossy["against"]
    browser.script(
        "return import('/page/api.js').then(({ server }) => {"
        " server.decoders.find((card) => card.key === 'beam').exactness = 'token-exact'; })"
    )
    false_claim = race(browser, *choices)[1]
    assert "against the claim" in false_claim["claim"] and false_claim["against"]


def test_an_acceptance_rule_replaces_the_claim_of_the_card(browser: Browser) -> None:
    choices = (("autoregressive", ""), ("speculative-sampling", "acceptance=rejection"))
    assert catalogue.CLAIMS["distribution-exact"] in race(browser, *choices)[1]["claim"]


def test_a_column_shows_its_error_and_the_others_finish(browser: Browser) -> None:
    wrong, right, other = race(
        browser, ("lookahead", "window=99"), ("autoregressive", ""), ("suffix", "")
    )
    assert "window is 99; requests to a server may set 1 to 16" in wrong["facts"]
    assert right["text"] == other["text"] != ""
    verdict = browser.script("return document.getElementById('verdict').innerText")
    assert verdict.startswith("Both texts are equal.")


def test_a_race_has_two_to_four_columns(browser: Browser) -> None:
    show(browser, "race")
    shown = "return document.querySelectorAll('article .remove:not([hidden])').length"
    assert browser.script(shown) == 0
    for _ in range(2):
        browser.script("document.getElementById('add-racer').click()")
    assert browser.script(shown) == 4
    browser.script("document.querySelector('.remove').click()")
    assert browser.script(shown) == 3


def test_the_controls_of_a_column_have_its_width(browser: Browser) -> None:
    show(browser, "race")
    ends = (
        "[...document.querySelectorAll('article')].flatMap((one) => [one, ...one.querySelectorAll("
        "'select, input')].map((part) => Math.round(part.getBoundingClientRect().right)))"
    )
    browser.until("document.querySelectorAll('article').length === 2")
    assert len(set(browser.script(f"return {ends}"))) == 2  # one of each column


@pytest.mark.parametrize("width", [1440, 375])
def test_the_columns_of_a_race_show_whole_names(browser: Browser, width: int) -> None:
    browser.size(width, 900)
    race(browser, *((key, "") for key in ("autoregressive", "prompt-lookup", "lookahead")))
    heights = browser.script(
        "return [...document.querySelectorAll('article .facts div:first-child dd')]"
        ".map((one) => one.offsetHeight)"
    )
    assert len(set(heights)) == 1 and heights[0] < 30  # no name is broken into two lines
    select = "document.querySelector('article select')"
    text = (
        f"const style = getComputedStyle({select});"
        "const context = document.createElement('canvas').getContext('2d');"
        "context.font = style.font; return context.measureText('token-recycling').width"
    )
    room = browser.script(f"return {select}.clientWidth")
    browser.size(1440, 900)
    assert browser.script(text) + 40 <= room  # with the padding and the arrow


def test_a_constraint_is_validated_while_it_is_typed(browser: Browser, llm: LLM) -> None:
    show(browser, "constraints")
    browser.until(f"{STATE}.startsWith('Valid')")
    num_tokens = llm.engine.num_tokens
    browser.tab_to("element.id === 'constraint-text'")
    browser.script("document.activeElement.value = ''")
    browser.press('{"type": "objekt"}')
    browser.until(f"{STATE}.startsWith('Not valid')")
    assert "objekt" in browser.script(f"return {STATE}")
    text = "document.getElementById('constraint-text')"
    assert browser.script(f"return {text}.getAttribute('aria-invalid')") == "true"
    browser.script(f"{text}.value = ''")
    browser.press('{"type": "object"}')
    browser.until(f"{STATE}.startsWith('Valid')")
    assert browser.script(f"return {text}.getAttribute('aria-invalid')") == "false"
    assert llm.engine.num_tokens == num_tokens


@pytest.mark.parametrize(
    "kind, text, pattern",
    [("regex", "[ab]{3}", "[ab]{3}"), ("choice", "yes\\nno", "yes|no"),
     ("grammar", 'root ::= "x" | "yy"', "x|yy")],
)  # fmt: skip
def test_every_kind_of_constraint_is_validated_and_holds(
    browser: Browser, kind: str, text: str, pattern: str
) -> None:
    show(browser, "constraints")
    browser.script(
        f"{AT} at('constraint-kind').value = '{kind}';"
        "at('constraint-kind').dispatchEvent(new Event('change'));"
        f"at('constraint-text').value = '{text}';"
        "at('constraint-text').dispatchEvent(new Event('input'));"
        "at('constraint-form').requestSubmit()"
    )
    browser.until(f"{IDLE} && {STATE}.startsWith('Valid')")
    answer = browser.script("return document.getElementById('constraint-answer').innerText")
    assert re.fullmatch(pattern, answer)


def rows(browser: Browser) -> list[tuple[str, str, str]]:
    """The distribution: token, and the probabilities before and after the settings."""
    return [
        tuple(row)
        for row in browser.script(
            "return [...document.querySelectorAll('#distribution tbody tr')]"
            ".map((row) => [...row.children].map((cell) => cell.textContent))"
        )
    ]


def set_sampling(browser: Browser, **values: float) -> None:
    """Type sampling settings, and wait for the chart that they give."""
    before = rows(browser)
    for name, value in values.items():
        browser.script(
            f"const field = document.querySelector('[name={name}]'); field.value = {value};"
            "field.dispatchEvent(new Event('input', { bubbles: true }))"
        )
    for _ in range(200):
        if rows(browser) != before:
            return
        browser.until("true")
    raise AssertionError("the chart has not changed")


def share(text: str) -> float:
    return float(text.removesuffix(" %")) / 100


def test_the_chart_shows_what_temperature_and_top_k_do(browser: Browser) -> None:
    show(browser, "sampling")
    browser.until("document.querySelectorAll('#distribution tbody tr').length")
    set_sampling(browser, temperature=2, top_k=4)
    browser.until("document.getElementById('distribution-order').innerText.includes('top-k')")
    *tokens, others = rows(browser)
    kept = tokens[:4]
    weights = [share(before) ** 0.5 for _, before, _ in kept]
    for weight, (_, _, after) in zip(weights, kept, strict=True):
        assert share(after) == pytest.approx(weight / sum(weights), abs=0.02)
    assert {after for _, _, after in tokens[4:]} == {"removed"} and others[2] == "removed"
    order = browser.script("return document.getElementById('distribution-order').innerText")
    assert order == "Applied in this order: temperature, top-k."
    set_sampling(browser, temperature=0)
    assert [after for _, _, after in rows(browser)][:2] == ["100.0 %", "removed"]


def test_a_setting_out_of_range_is_explained_beside_the_chart(browser: Browser) -> None:
    show(browser, "sampling")
    browser.until("document.querySelectorAll('#distribution tbody tr').length")
    browser.script(
        "const field = document.querySelector('[name=top_p]'); field.value = 7;"
        "field.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.until("document.getElementById('sampling-error').innerText")
    error = browser.script("return document.getElementById('sampling-error').innerText")
    assert error == "top_p must be above 0 and at most 1, not 7"


def test_the_gallery_shows_the_card_behind_a_decoder(browser: Browser) -> None:
    show(browser, "decoders")
    browser.tab_to("element.id === 'gallery-search'")
    browser.press("prompt-lookup")
    card = catalogue.find("prompt-lookup").card
    entry = (
        "[...document.querySelectorAll('.entry')]"
        ".find((one) => one.innerText.includes('prompt-lookup'))"
    )
    browser.until(entry)
    assert browser.script("return document.querySelectorAll('.entry').length") < 10
    browser.tab_to(f"element === {entry}.querySelector('summary')")
    browser.press(ENTER)
    browser.until(f"{entry}.querySelector('.card')")
    text = browser.script(f"return {entry}.innerText")
    for part in (card.summary, card.paper, *card.deviations, catalogue.CLAIMS[card.exactness],
                 "max_ngram", "1 to 32"):  # fmt: skip
        assert part.replace("`", "") in text  # names in backticks are elements <code>
    browser.tab_to("element.textContent === 'Use in chat'")
    browser.press(SPACE)
    browser.until("document.body.dataset.view === 'chat'")
    assert browser.script("return document.getElementById('decoder').value") == "prompt-lookup"
    hint = browser.script("return document.getElementById('decoder-hint').innerText")
    assert "max_ngram: 1 to 32" in hint


def test_the_gallery_says_what_a_partial_decoder_lacks(browser: Browser) -> None:
    show(browser, "decoders")
    browser.script("document.getElementById('gallery-all').click()")
    card = next(card for card in catalogue.cards() if card.missing)
    entry = (
        "[...document.querySelectorAll('.entry')].find((one) =>"
        f" one.querySelector('strong').textContent === '{card.key}')"
    )
    browser.until(entry)
    assert "Partial: " in browser.script(f"return {entry}.innerText")
    browser.script(f"{entry}.open = true")
    browser.until(f"{entry}.querySelector('.card')")
    text = browser.script(f"return {entry}.innerText")
    assert "Partial: not implemented" in text
    for part in card.missing:
        assert part.replace("`", "") in text


def test_every_paper_of_a_card_is_a_link(browser: Browser) -> None:
    show(browser, "decoders")
    browser.script("document.getElementById('gallery-all').click()")
    entry = (
        "[...document.querySelectorAll('.entry')].find((one) =>"
        " one.querySelector('strong').textContent === 'eagle')"
    )
    browser.until(entry)
    browser.script(f"{entry}.open = true")
    browser.until(f"{entry}.querySelector('.card')")
    links = browser.script(f"return [...{entry}.querySelectorAll('a')].map((one) => one.href)")
    numbers = re.findall(r"\d{4}\.\d{4,5}", catalogue.find("eagle").card.paper)
    assert links == [f"https://arxiv.org/abs/{number}" for number in numbers] and len(links) == 3


def test_names_in_the_text_of_a_card_are_code(browser: Browser) -> None:
    show(browser, "decoders")
    assert any("`start`" in text for text in catalogue.find("aggressive").card.deviations)
    browser.script(
        "[...document.querySelectorAll('.entry')].find((one) =>"
        " one.querySelector('strong').textContent === 'aggressive').open = true"
    )
    browser.until("document.querySelector('.card')")
    codes = "[...document.querySelectorAll('.card li code')].map((one) => one.textContent)"
    assert {"start", "size"} <= set(browser.script(f"return {codes}"))
    assert "`" not in browser.script("return document.querySelector('.card').innerText")


def test_the_gallery_lists_what_cannot_run_only_if_asked(browser: Browser) -> None:
    show(browser, "decoders")
    has_llada = "return document.getElementById('gallery').innerText.includes('llada')"
    assert not browser.script(has_llada)
    browser.tab_to("element.id === 'gallery-all'")
    browser.press(SPACE)
    assert browser.script(has_llada)
    browser.script(
        "[...document.querySelectorAll('.unavailable')].find((one) =>"
        " one.innerText.includes('llada')).open = true"
    )
    browser.until("document.querySelector('.unavailable .card')")
    text = browser.script("return document.querySelector('.unavailable .card').innerText")
    assert "needs a diffusion" in text and "Use in chat" not in text


def test_the_load_view_follows_the_load(browser: Browser, llm: LLM) -> None:
    show(browser, "load")
    browser.until("document.querySelectorAll('#charts path[d]').length === 5")
    before = llm.engine.num_tokens
    details = "document.getElementById('load-details').innerText"
    browser.script(
        "fetch('v1/completions', {method: 'POST', headers: {'content-type': 'application/json'},"
        " body: JSON.stringify({prompt: 'a', max_tokens: 64, ignore_eos: true})})"
    )
    browser.until(f"{details}.startsWith('{before + 64} tokens')")
    label = "document.querySelectorAll('#charts svg')[3].getAttribute('aria-label')"
    highest = browser.script(f"return {label}").rsplit("highest ", 1)[1]
    assert browser.script(f"return {label}").startswith("Tokens per second of the last two minutes")
    assert float(highest) > 0


@pytest.mark.parametrize("width", [1400, 390])
def test_the_charts_of_the_load_are_in_line(browser: Browser, width: int) -> None:
    browser.size(width, 900)
    show(browser, "load")
    browser.until("document.querySelectorAll('#charts path[d]').length === 5")
    browser.script(
        "[...document.querySelectorAll('#charts strong')].at(-1).textContent = '1234.5 ms'"
    )
    boxes = browser.script(
        "return [...document.querySelectorAll('#charts figure')].map((one) => [one, "
        "one.querySelector('svg')].map((part) => Math.round(part.getBoundingClientRect().bottom)))"
    )
    heights = browser.script(
        "return [...document.querySelectorAll('#charts strong')].map((one) => one.offsetHeight)"
    )
    browser.size(1440, 900)
    assert len(set(heights)) == 1  # no number is broken into two lines
    assert len({chart - box for box, chart in boxes}) == 1
    axes = browser.script(
        "return [...document.querySelectorAll('#charts .axis')].map((one) => one.innerText)"
    )
    assert [axis.split("\n") for axis in axes] == 5 * [["2 min ago", "1 min ago", "now"]]


def test_the_workers_of_a_fleet_are_shown(
    browser: Browser, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"tasks": 1, "waiting_rows": 2000, "leases": 3, "passes": 4, "rows": 5, "hits": 6}
    workers = [
        {"name": name, "role": "decode", "state": state, "positions": 200, "used": 50, **numbers}
        for name, state in (("decode-10", "silent"), ("decode-2", "ready"))
    ]
    counts = {"tasks": 7, "lost_workers": 1}
    monkeypatch.setattr(
        llm.driver,
        "status",
        lambda: {"workers": [{**one, "scenario": None} for one in workers], "counts": counts},
    )
    show(browser, "load")
    rows = "[...document.querySelectorAll('#fleet tr')].map((one) => one.innerText.split('\\t'))"
    browser.until(f"{rows}.length === 3")
    heads, first, second = browser.script(f"return {rows}")
    assert (first[0], second[0]) == ("decode-2", "decode-10") and "Scenario" not in heads
    shown = ["decode", "ready", "1", "2,000", "25.0 %", "3", "4", "5", "6"]
    assert first[1:] == shown and len(heads) == len(first)
    browser.until(
        "document.getElementById('load-details').innerText.endsWith('tasks 7, lost workers 1.')"
    )
    browser.tab_to("element.matches('#fleet .scroll')")
    monkeypatch.undo()
    browser.until("document.getElementById('fleet').hidden")


def test_a_list_of_decoders_is_used_with_the_keyboard(browser: Browser) -> None:
    show(browser, "race")
    select = "document.querySelector('article select')"
    chosen = browser.script(f"return {select}.value")
    browser.tab_to(f"element === {select}")
    browser.press(DOWN)
    assert browser.script(f"return {select}.value") != chosen
    browser.tab_to("element.textContent === 'Race' && element.matches('button')")
    browser.press(ENTER)
    browser.until(f"{IDLE} && document.querySelector('article .facts button')")


def test_several_models_of_which_one_is_unloaded(only_browser: Browser) -> None:
    def load() -> LLM:
        return scripted_llm(seed=2)

    models = ServedModels(
        load(), Settings(name="a", port=0), [ServedModel("b", load)], reload=load, idle_seconds=2
    )
    details = "document.getElementById('load-details').innerText"
    with LiveServer(models) as server:
        only_browser.do("url", url=server.url)
        only_browser.until("document.body?.dataset.ready")
        names = "[...document.getElementById('model').options].map((one) => one.value)"
        assert only_browser.script(f"return {names}") == ["a", "b"]
        show(only_browser, "load")
        only_browser.until(f"{details}.includes('is not loaded')")
        assert only_browser.script("return document.getElementById('load-error').innerText") == ""
        only_browser.script(
            "const model = document.getElementById('model'); model.value = 'b'; model.onchange()"
        )
        only_browser.until(f"{details}.includes('cache positions')")  # its decoders were listed
    models.close()
    assert only_browser.errors() == []
