"""Visit to the page at / in a headless Chromium: prints what a user would see as JSON.

Runs under the Python of an environment with playwright: ``python home_page_browser.py URL FOLDER CHROMIUM IMAGE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ANSWER = "#answer"


def send(page: Page, model: str, values: dict[str, str], until: str) -> str:
    """Fill in the form of a model, send it and return the answer's text."""
    page.click(f"nav button[data-name='{model}/1']")
    for name, value in values.items():
        page.wait_for_selector(f"#input-{name}")
        page.fill(f"#input-{name}", value)
    page.click("button.primary")
    page.wait_for_selector(f"{ANSWER} {until}")
    return page.inner_text(ANSWER)


def visit(url: str, folder: Path, chromium: str, image: str) -> dict[str, Any]:
    """Use the page as a person would and return what it showed."""
    seen: dict[str, Any] = {"errors": [], "elsewhere": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.on("pageerror", lambda error: seen["errors"].append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((url, f"blob:{url}", "data:")) or seen["elsewhere"].append(request.url)
            ),
        )
        page.goto(url)
        page.wait_for_selector("nav button")
        seen["models"] = page.locator("nav button").all_inner_texts()
        seen["numbers"] = send(page, "total", {"x": "[[1, 2, 3], [4, 5, 6]]"}, "table")
        seen["curl"] = page.inner_text("pre[tabindex='0']")
        for name in ("Python", "JavaScript", "tritonclient", "plain JSON"):
            page.click(f'role=tab[name="{name}"]')
            seen[name] = page.inner_text("pre[tabindex='0']")
        seen["invalid"] = send(page, "total", {"x": "one"}, "[role=alert]")
        seen["refused"] = send(page, "refuse", {"x": "1"}, "[role=alert]")
        seen["text"] = send(page, "shout", {"text": "<img src=x onerror=alert(1)>"}, "pre")
        seen["injected"] = page.locator(f"{ANSWER} img").count()
        seen["stream"] = send(page, "count", {"n": "3"}, "p:has-text('events')")
        seen["json"] = send(page, "keys", {"value": '{"b": 1, "a": 2}'}, "pre")
        seen["probabilities"] = send(page, "spread", {"n": "4"}, "progress")
        page.click("nav button[data-name='turn/1']")
        page.wait_for_selector("#input-picture")
        page.set_input_files("input[type=file]", image)
        page.click("button.primary")
        page.wait_for_selector(f"{ANSWER} img")
        seen["image"] = page.locator(f"{ANSWER} img").evaluate("each => [each.naturalWidth, each.naturalHeight]")
        page.wait_for_selector(".facts b >> nth=0 >> text=/^1$/")
        page.click("text=Explain this model")
        page.wait_for_selector("section pre:not([hidden]):has-text('{')")
        page.screenshot(path=str(folder / "wide.png"), full_page=True)
        page.keyboard.press("Tab")
        seen["focused"] = page.evaluate("document.activeElement.tagName")
        narrow = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        narrow.goto(f"{url}#total")
        narrow.wait_for_selector("#input-x")
        seen["narrow_width"] = narrow.evaluate("document.documentElement.scrollWidth")
        narrow.screenshot(path=str(folder / "narrow.png"), full_page=True)
        browser.close()
    return seen


if __name__ == "__main__":
    print(json.dumps(visit(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])))
