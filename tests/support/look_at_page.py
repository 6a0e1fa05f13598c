"""Open a page in headless Chromium and print as JSON what is wrong with it; runs with requirements/browser.lock.

Usage: look_at_page.py CHROMIUM PAGE PICTURE
"""

from __future__ import annotations

import json
import pathlib
import sys

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

VIEWS = {"phone-light": (390, "light"), "desktop-dark": (1280, "dark")}
# Without these Chromium asks its maker's servers for updates, and as root it does not start with its sandbox.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SPILLING = """
[...document.querySelectorAll("body *")].filter(item => item.getBoundingClientRect().right > innerWidth + 1
  && !item.closest(".scroll")).map(item => item.outerHTML.slice(0, 80)).slice(0, 5)
"""


def look(browser, url, width, scheme, picture):
    """Return ``{console, requests, scroll, spilling, axe}`` of the page at one width and colour scheme."""
    seen = {"console": [], "requests": []}
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda message: seen["console"].append(message.text))
    page.on("pageerror", lambda error: seen["console"].append(str(error)))
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.goto(url)
    seen["scroll"] = page.evaluate("document.documentElement.scrollWidth") - width
    seen["spilling"] = page.evaluate(SPILLING)
    seen["images"] = page.locator("svg[role=img]").count()
    seen["pair"] = _compare(page)
    found = Axe().run(page).response["violations"]
    seen["axe"] = [f"{item['id']}: {item['help']}: {item['nodes'][0]['html'][:120]}" for item in found]
    page.screenshot(path=picture, full_page=True)
    context.close()
    return seen


def _compare(page):
    """Choose the last release to compare with, as a reader does; return the table's rows before and after."""
    if not page.locator("#two").count():
        return None
    rows = "[...document.querySelectorAll('#difference tbody tr')].map(row => row.innerText)"
    before = page.evaluate(rows)
    page.locator("#two").select_option(index=page.locator("#two option").count() - 1)
    return [before, page.evaluate(rows)]


def main():
    """Print the findings by width."""
    chromium, path, picture = sys.argv[1:]
    url = pathlib.Path(path).resolve().as_uri()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        seen = {
            name: look(browser, url, width, scheme, f"{picture}-{name}.png") for name, (width, scheme) in VIEWS.items()
        }
        browser.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
