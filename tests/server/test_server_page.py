"""The web page in a real browser: chat, traces, the canvas, keys, models and accessibility."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.models.scripted import ScriptedModel  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from browser import CHROMIUM, DRIVER, ENTER, TAB, Browser  # noqa: E402

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
    ),
]
VIEWS = ["chat", "race", "constraints", "sampling", "decoders", "load"]
#: Expression: no view runs anything.
IDLE = "[...document.querySelectorAll('.run')].every((one) => one.textContent !== 'Stop')"
#: Expression: the page is no wider than the window.
FITS = "document.documentElement.scrollWidth <= innerWidth"
#: Functions for the scripts below.
AT = "const at = (id) => document.getElementById(id);"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_llm() as llm, LiveServer(llm, Settings(name="scripted", port=0)) as server:
        yield server.url


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"), dark=request.param == "dark")
    browser.theme = request.param  # type: ignore[attr-defined]
    yield browser
    browser.close()


def opened(browser: Browser, url: str, width: int, view: str = "") -> None:
    browser.size(width, 800)
    browser.do("url", url="about:blank")
    browser.do("url", url=f"{url}#{view}")
    browser.until("document.body?.dataset.ready")
    browser.errors()  # of earlier tests, which may have expected some


@pytest.mark.parametrize("width", [1440, 375])
def test_chat_and_trace(browser: Any, url: str, width: int) -> None:
    opened(browser, url, width)
    dark = browser.script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (browser.theme == "dark")
    ground = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")

    browser.script(
        f"{AT} at('tokens').value = 60; at('seed').value = 4;"
        "document.querySelector('[name=temperature]').value = 0.3;"
        "at('decoder').value = 'prompt-lookup'; at('message').value = 'one two one two one';"
        "at('ask').requestSubmit()"
    )
    browser.until(f"document.querySelector('.assistant .facts button') && {IDLE}")
    facts = browser.script("return document.querySelector('.assistant .facts').innerText")
    for name, value in (("decoder", "prompt-lookup"), ("tokens", "60"), ("seed", "4")):
        assert f"{name}\n{value}\n" in facts
    answer = browser.script("return document.querySelector('.assistant .text').innerText")
    announced = browser.script("return document.getElementById('status').textContent")
    assert answer.split() == announced.split() != []
    assert browser.script(f"return {FITS}")
    browser.picture(f"chat-{browser.theme}-{width}")

    browser.script("document.querySelector('.assistant .facts button').click()")
    browser.until("document.querySelector('dialog[open] iframe').srcdoc.includes('prompt-lookup')")
    time.sleep(0.3)  # only for the screenshot
    browser.picture(f"trace-{browser.theme}-{width}")
    assert browser.errors() == []


@pytest.mark.parametrize("width", [1440, 375])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_has_names_for_its_controls_and_enough_contrast(
    browser: Any, url: str, view: str, width: int
) -> None:
    opened(browser, url, width, view)
    browser.script("document.getElementById('settings').open = true")
    shown = browser.script(
        "return [...document.querySelectorAll('main > section:not([hidden])')].map((one) => one.id)"
    )
    assert shown == [view]
    assert browser.script(f"return {FITS}")
    assert browser.script(UNNAMED) == []
    assert browser.script(LOW_CONTRAST) == []
    browser.picture(f"{view}-{browser.theme}-{width}")
    assert browser.errors() == []


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_the_checks_of_names_and_contrast_find_a_fault(browser: Any, url: str) -> None:
    opened(browser, url, 1440)
    browser.script(
        "document.querySelector('main').insertAdjacentHTML('beforeend',"
        " '<input class=fault><p style=\"color:#999\">pale</p>')"
    )
    assert browser.script(UNNAMED) == ['<input class="fault">']
    assert browser.script(LOW_CONTRAST) == ["pale"]


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_the_switch_of_the_theme_overrides_the_system_and_is_kept(browser: Any, url: str) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    opened(browser, url, 800)
    browser.script(
        f"{AT} at('theme').value = 'dark'; at('theme').dispatchEvent(new Event('change'))"
    )
    assert browser.script(ground) == "rgb(20, 23, 27)"
    opened(browser, url, 800)
    assert browser.script(ground) == "rgb(20, 23, 27)"
    browser.script(f"{AT} at('theme').value = ''; at('theme').dispatchEvent(new Event('change'))")
    assert browser.script(ground) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_an_error_is_shown_and_not_added_to_the_chat(browser: Any, url: str) -> None:
    opened(browser, url, 800)
    send = f"{AT} at('message').value = 'x'; at('ask').requestSubmit()"
    browser.script(f"document.querySelector('[name=temperature]').value = -5; {send}")
    browser.until("document.querySelector('.facts .error')")
    error = browser.script("return document.querySelector('.facts .error').innerText")
    assert error == "temperature must be between 0 and 100, not -5"
    browser.script(f"{RECORD} document.querySelector('[name=temperature]').value = 1; {send}")
    browser.until("window.bodies.length")
    assert browser.script("return window.bodies[0].messages.length") == 1


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_the_page_loads_no_external_resources(browser: Any, url: str) -> None:
    opened(browser, url, 800)
    fetched = browser.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert len(fetched) > 10 and all(name.startswith(url) for name in fetched)


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_views_and_a_chat_work_with_the_keyboard_alone(browser: Any, url: str) -> None:
    opened(browser, url, 1440)
    browser.script("document.getElementById('tokens').value = 8")
    browser.press(TAB)
    assert browser.script("return document.activeElement.id") == "skip"
    for view in VIEWS[1:]:
        browser.tab_to(f"element.hash === '#{view}'")
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert browser.script(outline) == "solid"  # the focus is visible
        browser.press(ENTER)
        browser.until(f"document.body.dataset.view === '{view}'")
        browser.until(f"document.activeElement.id === '{view}-title'")
    browser.tab_to("element.hash === '#chat'")
    browser.press(ENTER)
    browser.until("document.activeElement.id === 'chat-title'")
    browser.tab_to("element.id === 'message'")
    browser.press("hello" + ENTER)
    browser.until(f"document.querySelector('.assistant .facts button') && {IDLE}")
    assert browser.script("return document.querySelector('.user .text').innerText") == "hello"


@pytest.mark.parametrize("browser", ["light"], indirect=True)
@pytest.mark.parametrize("view", VIEWS[1:])
def test_a_view_that_the_address_selects_begins_with_the_header(
    browser: Any, url: str, view: str
) -> None:
    opened(browser, url, 375)
    browser.script(f"location.hash = '{view}'")
    browser.until(f"document.activeElement.id === '{view}-title'")
    time.sleep(0.2)  # the browser scrolls to fragments after it has drawn a frame
    assert browser.script("return scrollY") == 0


#: Expression: how far the form covers the end of `element`, in pixels.
COVERED = "element.getBoundingClientRect().bottom - at('ask').getBoundingClientRect().top"


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_the_form_of_the_chat_covers_no_focused_control(browser: Any, url: str) -> None:
    opened(browser, url, 375)
    browser.size(375, 500)
    for number in range(6):
        button = f"document.querySelectorAll('#examples button')[{number}]"
        browser.tab_to(f"element === {button}")
        covered = browser.script(f"{AT} const element = document.activeElement; return {COVERED}")
        assert covered <= 1


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_the_end_of_an_answer_stays_in_view_unless_the_reader_scrolls_away(
    browser: Any, url: str
) -> None:
    opened(browser, url, 375)
    browser.size(375, 600)
    browser.script(
        f"{AT} at('tokens').value = 200; at('message').value = 'x'; at('ask').requestSubmit()"
    )
    browser.until(f"document.querySelector('.assistant .facts button') && {IDLE}")
    covered = f"{AT} const element = document.querySelector('.assistant'); return {COVERED}"
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    grow = f"document.querySelector('.assistant .text').append('\\n'.repeat(9)); return {frame}"
    browser.script(f"return {frame}")
    assert browser.script(covered) <= 1
    browser.script(grow)
    assert browser.script(covered) <= 1
    browser.script("scrollTo(0, 0)")
    browser.script(grow)
    assert browser.script("return scrollY") == 0


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_an_api_key_is_asked_for_and_kept_in_the_tab_only(browser: Any) -> None:
    settings = Settings(name="keyed", port=0, api_keys=("secret",))
    with scripted_llm() as llm, LiveServer(llm, settings) as server:
        opened(browser, server.url, 800)
        problem = "document.getElementById('problem').innerText"
        assert "requires an API key" in browser.script(f"return {problem}")
        browser.script(
            f"{AT} at('key').value = 'secret'; at('key').dispatchEvent(new Event('change'))"
        )
        browser.until("document.getElementById('model-name').innerText === 'keyed'")
        assert browser.script(f"return {problem}") == ""
        stores = "return [sessionStorage, localStorage].map((one) => one.getItem('key'))"
        assert browser.script(stores) == ["secret", None]
        assert browser.script("return localStorage.length") == 0  # under no other name either
        browser.script(f"{AT} at('tokens').value = 4; at('message').value = 'x';")
        browser.script("document.getElementById('ask').requestSubmit()")
        browser.until("document.querySelector('.assistant .facts button')")


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_requests_name_the_selected_of_several_models(
    tmp_path_factory: Any, browser: Any, url: str
) -> None:
    own = Browser(tmp_path_factory.mktemp("models"))  # the script stays for all its pages
    try:
        own.before_load(TWO_MODELS)
        opened(own, url, 800)
        assert own.script("return document.getElementById('model').options.length") == 2
        own.script(
            f"{AT} at('model').value = 'b'; at('model').dispatchEvent(new Event('change'));"
            "at('message').value = 'x'; at('ask').requestSubmit()"
        )
        own.until("window.bodies.length")
        assert own.script("return window.bodies[0].model") == "b"
        own.until("window.paths.includes('decoders?model=b')")
        own.until("window.paths.includes('live?model=b')")
    finally:
        own.close()


#: Script: keeps the bodies that are sent in `window.bodies`.
RECORD = """
window.bodies = [];
const send = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.bodies.push(JSON.parse(options.body));
  return send(path, options);
};
"""

#: Script: the server lists two models; what is sent is kept.
TWO_MODELS = """
window.bodies = [];
window.paths = [];
const send = window.fetch;
window.fetch = (path, options) => {
  window.paths.push(path);
  if (options?.body) window.bodies.push(JSON.parse(options.body));
  if (path !== "v1/models") return send(path, options);
  const models = ["a", "b"].map((id) => ({ id, parent: null }));
  return Promise.resolve(new Response(JSON.stringify({ data: models })));
};
"""

#: Script: the controls and regions without a name, and ids that are used twice.
UNNAMED = """
const isShown = (one) => one.getClientRects().length > 0;
const kinds = "input, select, textarea, button, iframe, [tabindex='0'], svg";
const controls = [...document.querySelectorAll(kinds)];
const isLabelled = (one) => [...one.labels].some((label) => label.textContent.trim());
const hasName = (one) => one.ariaLabel || one.title
  || (one.matches("select, input, textarea") ? isLabelled(one) : one.textContent.trim());
const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
return [
  ...controls.filter((one) => isShown(one) && !hasName(one)).map((one) => one.outerHTML),
  ...ids.filter((id, index) => ids.indexOf(id) !== index),
  ...[...document.querySelectorAll("[aria-describedby]")]
    .map((one) => one.getAttribute("aria-describedby"))
    .filter((id) => !document.getElementById(id)),
];
"""

#: Script: the texts with a contrast below 4.5, as WCAG 2 defines it.
LOW_CONTRAST = """
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map((value) => value / 255)
  .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
  .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
function ground(element) {
  for (let one = element; one; one = one.parentElement) {
    const color = parse(getComputedStyle(one).backgroundColor);
    if (color.length === 3 || color[3] > 0) return color;
  }
  return [255, 255, 255];
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (!text || !element.getClientRects().length) continue;
  if (element.closest(".visually-hidden, :disabled")) continue;
  const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
  if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) found.push(text);
}
return found;
"""

#: Script: the titles of the examples.
EXAMPLES = "return [...document.querySelectorAll('#examples strong')].map((one) => one.innerText)"
#: Script: the number of masks of the canvas, whether the text beside it is shown, and its caption.
LIVE = """
const canvas = document.querySelector('.canvas');
return {
  masks: canvas.querySelectorAll('.mask').length,
  text: getComputedStyle(canvas.previousElementSibling).display,
  progress: canvas.nextElementSibling.textContent,
};
"""


@pytest.mark.parametrize("browser", ["light"], indirect=True)  # no colour is claimed here
def test_the_canvas_is_shown_while_it_fills(browser: Any, monkeypatch: Any) -> None:
    """A diffusion model without a chat template: the message is the prompt. Passes are slow, so
    that the canvas is visible while it fills."""
    run = ScriptedModel.run

    def slow_run(self: ScriptedModel, *args: Any) -> Any:
        time.sleep(0.1)
        return run(self, *args)

    monkeypatch.setattr(ScriptedModel, "run", slow_run)
    with scripted_llm(causal=False) as llm:
        llm.tokenizer.chat_template = None
        decode = llm.tokenizer.decode
        is_ending = lambda tokens: len(tokens) == 1 and tokens[0] % 2  # noqa: E731
        monkeypatch.setattr(
            llm.tokenizer, "decode", lambda tokens: "" if is_ending(tokens) else decode(tokens)
        )
        with LiveServer(llm, Settings(name="diffusion", port=0)) as server:
            for width in (1440, 375):
                opened(browser, server.url, width)
                assert browser.script("return document.getElementById('decoder').value") == "llada"
                assert browser.script("return document.getElementById('chat-mode').hidden")
                assert browser.script(EXAMPLES)[:2] == ["Sort", "Shuffle"]
                browser.script("document.getElementById('tokens').value = 24")
                browser.script("document.getElementById('message').value = 'fill this in'")
                browser.script("document.getElementById('ask').requestSubmit()")
                browser.until("document.querySelector('.canvas .new')")
                live = browser.script(LIVE)
                assert live["masks"] > 0 and live["text"] == "none"
                assert "of 24 positions are filled" in live["progress"]
                browser.until("document.querySelector('.progress').textContent.includes('∅')")
                assert "∅" in browser.script("return document.querySelector('.canvas').innerText")
                assert browser.script(f"return {FITS}")
                browser.picture(f"filling-{width}-{browser.theme}")
                browser.until("document.querySelector('.assistant .facts button')")
                assert browser.script("return document.querySelector('.canvas')") is None
                answer_text = browser.script(
                    "return document.querySelector('.assistant .text').innerText"
                )
                assert answer_text.strip()
                browser.script("document.querySelector('.assistant .facts button').click()")
                trace = "document.querySelector('iframe').srcdoc"
                browser.until(f"{trace}.includes('<h2>Canvas</h2>')")
                assert browser.script(f"return ({trace}.match(/class=.cell/g) || []).length") > 0
                time.sleep(0.5)
                browser.picture(f"canvas-{width}-{browser.theme}")
                assert not browser.errors()
