"""A real browser for tests of the web page: chromium, driven through chromedriver."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
#: Folder for screenshots, if set.
SCREENSHOTS = os.environ.get("ANYDECODE_SCREENSHOTS")
#: Keys, as WebDriver names them.
TAB, ENTER, SPACE, DOWN = "\ue004", "\ue007", " ", "\ue015"


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

    def press(self, keys: str) -> None:
        """Press and release `keys`, one by one."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def tab_to(self, condition: str, limit: int = 200) -> None:
        """Press the tab key until the focused element, `element`, fulfils `condition`."""
        for _ in range(limit):
            if self.script(f"const element = document.activeElement; return Boolean({condition})"):
                return
            self.press(TAB)
        raise AssertionError(f"the tab key does not reach {condition}")

    def before_load(self, text: str) -> None:
        """Run `text` in every page that is opened from now on, before its own scripts."""
        params = {"source": text}
        self.do("goog/cdp/execute", cmd="Page.addScriptToEvaluateOnNewDocument", params=params)

    def script(self, text: str) -> Any:
        """Run `text` as the body of a function in the page, and return its result. A promise is
        awaited."""
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
