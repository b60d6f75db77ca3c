"""The web page in a real browser: chromium, driven through chromedriver."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.models.scripted import ScriptedModel  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
    ),
]
#: Folder for screenshots, if set.
SCREENSHOTS = os.environ.get("ANYDECODE_SCREENSHOTS")


class Browser:
    """A headless chromium. All waits have a timeout."""

    def __init__(self, folder: Path, dark: bool = False) -> None:
        port_file = folder / "chromedriver.log"
        self._log = port_file.open("w+")
        self._process = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=self._log, stderr=subprocess.STDOUT
        )
        self._http = httpx.Client(base_url=self._base(port_file), timeout=30, trust_env=False)
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
        ]  # fmt: skip
        if dark:
            flags.append("--blink-settings=preferredColorScheme=0")
        options = {"binary": CHROMIUM, "args": flags}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        answer = self._http.post("/session", json={"capabilities": capabilities}).json()
        self._session = f"/session/{answer['value']['sessionId']}"

    def _base(self, log: Path) -> str:
        for _ in range(200):
            text = log.read_text()
            if "started successfully on port" in text:
                number = text.rsplit("on port", 1)[1].strip().rstrip(".")
                return f"http://127.0.0.1:{number}"
            time.sleep(0.05)
        raise RuntimeError("chromedriver did not start")

    def do(self, command: str, **body: Any) -> Any:
        """One WebDriver command."""
        answer = self._http.post(f"{self._session}/{command}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def script(self, text: str) -> Any:
        """Run `text` as the body of a function in the page, and return its result."""
        return self.do("execute/sync", script=text, args=[])

    def until(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until the expression `condition` holds."""
        for _ in range(int(seconds / 0.05)):
            if self.script(f"return Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"timed out: {condition}")

    def size(self, width: int, height: int) -> None:
        """Set the size of the page itself, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def picture(self, name: str) -> bytes:
        """A screenshot as PNG."""
        data = base64.b64decode(self._http.get(f"{self._session}/screenshot").json()["value"])
        if SCREENSHOTS:
            Path(SCREENSHOTS, f"{name}.png").write_bytes(data)
        return data

    def errors(self) -> list[str]:
        """Messages of severity SEVERE in the console."""
        entries = self.do("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        """End the session and the driver."""
        self._http.delete(self._session)
        self._http.close()
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


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


def opened(browser: Browser, url: str, width: int) -> None:
    browser.size(width, 800)
    browser.do("url", url=url)
    browser.until("document.body.dataset.ready")


@pytest.mark.parametrize("width", [1200, 380])
def test_chat_race_and_trace_views(browser: Any, url: str, width: int) -> None:
    opened(browser, url, width)
    name = f"{browser.theme}-{width}"
    dark = browser.script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (browser.theme == "dark")
    ground = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")

    browser.script(
        "at('tokens').value = 60; at('seed').value = 4; at('temperature').value = 0.3;"
        "at('decoder').value = 'prompt-lookup'; at('message').value = 'one two one two one';"
        "at('ask').requestSubmit()"
    )
    browser.until("document.querySelector('.assistant .facts button') && !pending")
    facts = browser.script("return document.querySelector('.assistant .facts').innerText")
    assert "prompt-lookup" in facts and "60 tokens" in facts and "seed 4" in facts
    assert browser.script("return messages.map((m) => m.role)") == ["user", "assistant"]
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert browser.script(f"return {fits}")
    browser.picture(f"chat-{name}")

    browser.script("document.querySelector('.assistant .facts button').click()")
    browser.until("document.querySelector('dialog[open] iframe').srcdoc.includes('prompt-lookup')")
    time.sleep(0.3)  # only for the screenshot
    browser.picture(f"trace-{name}")
    browser.script("at('viewer').close()")

    browser.script("document.querySelector('[data-view=race]').click()")
    browser.script("at('start').requestSubmit()")
    browser.until("at('verdict').textContent")
    assert "the same text" in browser.script("return at('verdict').textContent")
    assert browser.script("return document.querySelectorAll('article.won').length") == 1
    assert browser.script(f"return {fits}")
    browser.picture(f"race-{name}")
    assert browser.errors() == []


def test_an_error_is_shown_and_not_added_to_the_chat(browser: Any, url: str) -> None:
    opened(browser, url, 800)
    browser.script(
        "at('temperature').value = -5; at('message').value = 'x'; at('ask').requestSubmit()"
    )
    browser.until("document.querySelector('.facts .error')")
    error = browser.script("return document.querySelector('.facts .error').innerText")
    assert error == "temperature must be between 0 and 100, not -5"
    assert browser.script("return messages.length") == 0


def test_the_page_loads_no_external_resources(browser: Any, url: str) -> None:
    opened(browser, url, 800)
    fetched = browser.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert fetched and all(name.startswith(url) for name in fetched)


#: Script: the number of masks of the canvas, and whether the text beside it is shown.
LIVE = """
const canvas = document.querySelector('.canvas');
return {
  masks: canvas.querySelectorAll('.mask').length,
  text: getComputedStyle(canvas.previousElementSibling).display,
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
    browser.errors()  # discard expected errors of earlier tests
    with scripted_llm(causal=False) as llm:
        llm.tokenizer.chat_template = None
        with LiveServer(llm, Settings(name="diffusion", port=0)) as server:
            for width in (1200, 380):
                opened(browser, server.url, width)
                assert browser.script("return document.getElementById('decoder').value") == "llada"
                browser.script("document.getElementById('tokens').value = 24")
                browser.script("document.getElementById('message').value = 'fill this in'")
                browser.script("document.getElementById('ask').requestSubmit()")
                browser.until("document.querySelector('.canvas .new')")
                live = browser.script(LIVE)
                assert live["masks"] > 0 and live["text"] == "none"
                assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
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
