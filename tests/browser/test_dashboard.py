"""The page of /ui in a real browser: two turns and their reuse, tools, both colour schemes, small screens."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_conversation import Server
from web_driver import BROWSER, DRIVER, ENTER, TAB, Browser

if BROWSER is None or DRIVER is None:
    pytest.skip("no Chromium with chromedriver on the PATH", allow_module_level=True)


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[Server]:
    server = Server("--api-key", "secret")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


def say(browser: Browser, text: str) -> str:
    """Send a message with the keyboard; what the newest answer and its cost read."""
    before = len(browser.texts(".message .cost"))
    browser.type("#say", text, ENTER)
    browser.until(lambda: len(browser.texts(".message .cost")) > before)
    browser.until(lambda: not browser.run("return document.querySelector('#send').disabled"))
    return browser.texts(".message")[-1]


def keep_picture(browser: Browser, name: str) -> None:
    """For people who look at a run's artifacts."""
    folder = os.environ.get("TURNKEEP_SCREENSHOTS")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.picture(Path(folder) / f"{name}.png")


def test_the_second_turn_of_a_chat_shows_its_reuse(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/ui")
    assert browser.run("return document.title") == "Turnkeep"
    assert "Noted" in say(browser, "Mara lives in Oslo.")
    answer = say(browser, "Where does Mara live?")
    assert "Oslo" in answer
    reused = re.search(r"(\d+) of (\d+) prompt tokens reused", answer)
    assert reused is not None
    assert 0 < int(reused[1]) < int(reused[2])
    browser.until(lambda: len(browser.texts(".conversation .turn")) == 2)
    browser.run("document.querySelectorAll('.conversation .turn')[1].focus()")
    browser.until(lambda: f"{reused[1]} reused" in browser.text("#detail"))
    browser.until(lambda: "%" in browser.text("#tiles"))
    assert "state rows" in browser.text("#pools")
    keep_picture(browser, "chat")
    assert browser.complaints() == []


def test_a_new_conversation_in_the_middle_of_an_answer_starts_empty(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/ui")
    say(browser, "Mara lives in Oslo.")
    # In one go, so that the answer cannot be complete before the second click.
    browser.run("byId('say').value = 'Where does Mara live?'; byId('chat-form').requestSubmit(); byId('again').click()")
    browser.until(lambda: not browser.run("return byId('send').disabled"))
    assert browser.run("return messages.length") == 0
    assert browser.texts(".message") == []
    assert "Noted" in say(browser, "Mara lives in Graz.")
    assert browser.complaints() == []


def test_tool_calls_are_run_and_shown(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/ui")
    browser.click("#with-tools")
    assert "12 euros" in say(browser, "How much are the lamps?")
    assert any(text.startswith("get_price(") for text in browser.texts("#messages summary"))
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_in_light_and_dark(server: Server, browser: Browser, scheme: str) -> None:
    browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.command("Emulation.setDeviceMetricsOverride", width=360, height=780, deviceScaleFactor=2, mobile=True)
    browser.open(f"{server.url}/ui")
    say(browser, "Mara lives in Oslo.")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    script = "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    text, back = (_luminance(colour) for colour in browser.run(script))
    assert (text < back) == (scheme == "light")
    assert (max(text, back) + 0.05) / (min(text, back) + 0.05) > 7
    keep_picture(browser, f"phone-{scheme}")


def test_the_keyboard_reaches_everything(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/ui")
    browser.until(lambda: browser.text("#engine-state") == "ready")
    reached = set()
    for _ in range(60):
        browser.press(TAB)
        reached.add(browser.run("return document.activeElement.id || document.activeElement.className"))
    assert {"skip", "pause", "say", "with-tools", "again", "send"} <= reached


def test_without_a_key_nothing_is_shown_but_the_page(guarded_server: Server, browser: Browser) -> None:
    browser.open(f"{guarded_server.url}/ui")
    browser.until(lambda: browser.is_shown("#key-form"))
    assert browser.text("#model") == ""
    browser.type("#key", "secret", ENTER)
    browser.until(lambda: browser.text("#model") == "demo")
    assert not browser.is_shown("#key-form")
    assert "Noted" in say(browser, "Mara lives in Oslo.")
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"{guarded_server.url}/ui/state", timeout=10)
    refused.value.close()
    request = urllib.request.Request(f"{guarded_server.url}/ui/state", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert len(json.load(answer)["conversations"]) == 1


def _luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
