"""The page of /ui in a real browser: two turns and their reuse, tools, both colour schemes, small screens."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served_conversation import Server

selenium = pytest.importorskip("selenium", reason="the package selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PATIENCE_S = 60

if BROWSER is None or DRIVER is None:
    pytest.skip("no Chromium with chromedriver on the PATH", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--api-key", "secret")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    server = Server()
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1400"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


def wait(browser: webdriver.Chrome, condition: Callable[[webdriver.Chrome], object]) -> None:
    WebDriverWait(browser, PATIENCE_S, poll_frequency=0.1).until(condition)


def say(browser: webdriver.Chrome, text: str) -> str:
    """Send a message with the keyboard; what the newest answer and its cost read."""
    before = len(browser.find_elements(By.CSS_SELECTOR, ".message .cost"))
    browser.find_element(By.ID, "say").send_keys(text, Keys.ENTER)
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, ".message .cost")) > before)
    wait(browser, lambda b: b.find_element(By.ID, "send").is_enabled())
    return browser.find_elements(By.CSS_SELECTOR, ".message")[-1].text


def complaints(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def keep_picture(browser: webdriver.Chrome, name: str) -> None:
    """For people who look at a run's artifacts."""
    folder = os.environ.get("TURNKEEP_SCREENSHOTS")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_the_second_turn_of_a_chat_shows_its_reuse(open_server: Server, browser: webdriver.Chrome) -> None:
    browser.get(f"{open_server.url}/ui")
    assert browser.title == "Turnkeep"
    assert "Noted" in say(browser, "Mara lives in Oslo.")
    answer = say(browser, "Where does Mara live?")
    assert "Oslo" in answer
    reused = re.search(r"(\d+) of (\d+) prompt tokens reused", answer)
    assert reused is not None
    assert 0 < int(reused[1]) < int(reused[2])
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, ".conversation .turn")) == 2)
    turn = browser.find_elements(By.CSS_SELECTOR, ".conversation .turn")[1]
    turn.send_keys("")  # focus by keyboard
    wait(browser, lambda b: f"{reused[1]} reused" in b.find_element(By.ID, "detail").text)
    wait(browser, lambda b: "%" in b.find_element(By.ID, "tiles").text)
    assert "state rows" in browser.find_element(By.ID, "pools").text
    keep_picture(browser, "chat")
    assert complaints(browser) == []


def test_tool_calls_are_run_and_shown(open_server: Server, browser: webdriver.Chrome) -> None:
    browser.get(f"{open_server.url}/ui")
    browser.find_element(By.ID, "with-tools").click()
    assert "12 euros" in say(browser, "How much are the lamps?")
    shown = [summary.text for summary in browser.find_elements(By.CSS_SELECTOR, "#messages summary")]
    assert any(text.startswith("get_price(") for text in shown)
    assert complaints(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_in_light_and_dark(
    open_server: Server, browser: webdriver.Chrome, scheme: str
) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"{open_server.url}/ui")
    say(browser, "Mara lives in Oslo.")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    script = "return [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    text, back = (_luminance(colour) for colour in browser.execute_script(script))
    assert (text < back) == (scheme == "light")
    assert (max(text, back) + 0.05) / (min(text, back) + 0.05) > 7
    keep_picture(browser, f"phone-{scheme}")


def test_the_keyboard_reaches_everything(open_server: Server, browser: webdriver.Chrome) -> None:
    browser.get(f"{open_server.url}/ui")
    wait(browser, lambda b: b.find_element(By.ID, "engine-state").text == "ready")
    reached = set()
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(browser.execute_script("return document.activeElement.id || document.activeElement.className"))
    assert {"skip", "pause", "say", "with-tools", "again", "send"} <= reached


def test_without_a_key_nothing_is_shown_but_the_page(server: Server, browser: webdriver.Chrome) -> None:
    browser.get(f"{server.url}/ui")
    wait(browser, lambda b: b.find_element(By.ID, "key-form").is_displayed())
    assert browser.find_element(By.ID, "model").text == ""
    browser.find_element(By.ID, "key").send_keys("secret", Keys.ENTER)
    wait(browser, lambda b: b.find_element(By.ID, "model").text == "demo")
    assert not browser.find_element(By.ID, "key-form").is_displayed()
    wait(browser, lambda b: b.find_element(By.ID, "engine-state").text == "ready")
    assert "Noted" in say(browser, "Mara lives in Oslo.")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/ui/state", timeout=10)
    request = urllib.request.Request(f"{server.url}/ui/state", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert len(json.load(answer)["conversations"]) == 1


def _luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
