"""A headless Chromium, driven through chromedriver by the W3C WebDriver protocol: as much of it as the tests need."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from served_conversation import free_port

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, fixed by the protocol
ENTER, TAB = "\ue007", "\ue004"
PATIENCE_S = 60.0


class Browser:
    """One window. Selectors are CSS."""

    def __init__(self) -> None:
        assert BROWSER is not None
        assert DRIVER is not None
        port = free_port()
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1400"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": BROWSER, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self.until(self._is_up)
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{session['sessionId']}"

    def close(self) -> None:
        try:
            self._send("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=30)

    def open(self, url: str) -> None:
        self._send("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; `arguments[0]` and on are its arguments."""
        return self._send("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText)"
        return list(self.run(script, selector))

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def is_shown(self, selector: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0]).getClientRects().length > 0", selector))

    def click(self, selector: str) -> None:
        self._send("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def type(self, selector: str, *keys: str) -> None:
        self._send("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": "".join(keys)})

    def press(self, key: str) -> None:
        """A key to whatever has the focus."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._send("POST", f"{self._session}/actions", body)

    def command(self, name: str, **parameters: Any) -> None:
        """A command of the DevTools protocol."""
        self._send("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        entries = self._send("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", f"{self._session}/screenshot")))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "what was waited for did not come about"
            time.sleep(0.05)

    def _find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        return str(self._send("POST", f"{self._session}/element", body)[ELEMENT])

    def _is_up(self) -> bool:
        try:
            return bool(self._send("GET", "/status")["ready"])
        except OSError:
            return False

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)["value"]
