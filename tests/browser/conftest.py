"""A real browser for tests: Debian's chromium, headless, driven by selenium; where there is none, tests are skipped."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(os.environ.get("COTERIE_SCREENSHOTS", "build/screenshots")).resolve()
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    "--force-prefers-reduced-motion",
)


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, width: int = 1440, theme: str = "light", height: int = 900) -> None:
        """Show a page in a window of that size."""
        self.size(width, height)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get_log("browser")  # forget what came before
        self.driver.get(address)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def js(self, code: str, *arguments: Any) -> Any:
        """What a piece of script returns."""
        return self.driver.execute_script(code, *arguments)

    def click(self, selector: str, text: str | None = None) -> None:
        """Click the first element of a selector, or the one with that text."""
        find = "[...document.querySelectorAll(where)].find(e => text === null || e.textContent === text)"
        self.js(f"const [where, text] = arguments; {find}.click()", selector, text)

    def change(self, selector: str, value: str, event: str = "change") -> None:
        """Give a field a value, as a user would."""
        code = "const [where, value, event] = arguments, e = document.querySelector(where); e.value = value;"
        self.js(f"{code} e.dispatchEvent(new Event(event))", selector, value, event)

    def marks(self, inside: str) -> dict[str, int]:
        """How many elements of a selector each panel has."""
        counts = "[...document.querySelectorAll('.card')].map(e => [e.id, e.querySelectorAll(wanted).length])"
        found: dict[str, int] = self.js(f"const wanted = arguments[0]; return Object.fromEntries({counts})", inside)
        return found

    def wait(self, code: str, seconds: float = 15.0) -> Any:
        """Wait until a script returns something true, and give it."""
        until = time.monotonic() + seconds
        while True:
            found = self.js(f"return {code}")
            if found:
                return found
            assert time.monotonic() < until, f"{code} did not become true; console: {self.errors()}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What the console complains of."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def scroll_through(self) -> None:
        """Down the whole page, so that everything is drawn."""
        self.js("scrollTo(0, 0)")
        while True:
            before = self.js("scrollBy(0, innerHeight * 0.8); return scrollY")
            time.sleep(0.12)
            if self.js("return Math.ceil(scrollY + innerHeight) >= document.documentElement.scrollHeight"):
                break
            assert before is not None
        time.sleep(0.2)

    def overflow(self) -> int:
        """By how much the page is wider than the window."""
        found: int = self.js("return document.documentElement.scrollWidth - innerWidth")
        return found

    def keep(self, name: str, width: int) -> Path:
        """A picture of the whole page, kept as a build output."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        height = self.js("return document.documentElement.scrollHeight")
        self.size(width, int(min(height, 12000)))
        time.sleep(0.5)
        path = SCREENSHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The browser itself, started once."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed: make test-browser installs it")
    assert selenium
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None or (helper := shutil.which("chromedriver")) is None:
        pytest.skip("there is no chromium with chromedriver on this machine: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=Service(helper))
    yield started
    started.quit()


@pytest.fixture
def browser(driver: Any) -> Browser:
    """A window for one test."""
    return Browser(driver)
