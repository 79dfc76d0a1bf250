"""Visit to the page at / in a headless Chromium: prints what a user would see as JSON.

Runs under the Python of an environment with playwright: ``python home_page_browser.py URL FOLDER CHROMIUM [IMAGE]``.
Without IMAGE it writes the pictures of the README.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ANSWER = "#answer"
PAINTS = 10


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
        page.click("nav button[data-name='total/1']")
        send(page, "total", {"x": "[[1, 2, 3]]"}, "pre")  # one batch alone has no rate
        page.click("text=Explain this model")
        page.wait_for_selector(".output h3:has-text('Batches by size')")
        seen["explain"] = page.inner_text("section:has(> h2:text-is('Explain'))")
        page.click("text=Show the start")
        page.wait_for_selector(".output h3:has-text('This model')")
        seen["start"] = page.inner_text("section:has(> h2:text-is('Start'))")
        page.screenshot(path=str(folder / "wide.png"), full_page=True)
        page.keyboard.press("Tab")
        seen["focused"] = page.evaluate("document.activeElement.tagName")
        narrow = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        narrow.goto(f"{url}#total")
        narrow.wait_for_selector("#input-x")
        seen["narrow_width"] = narrow.evaluate("document.documentElement.scrollWidth")
        narrow.screenshot(path=str(folder / "narrow.png"), full_page=True)
        seen["bytes"], seen["first_paint_ms"] = first_paint(narrow, url)
        browser.close()
    return seen


def first_paint(page: Page, url: str) -> tuple[int, float]:
    """Return the size of the page and the time until its first paint, the least of some visits."""
    sizes, times = [], []
    for _ in range(PAINTS):
        page.goto("about:blank")
        page.goto(url)
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
        times.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        sizes.append(page.evaluate("performance.getEntriesByType('navigation')[0].decodedBodySize"))
    return max(sizes), min(times)


def pictures(url: str, folder: Path, chromium: str) -> None:
    """Write the pictures of the README: the answer of the README's function, and the explanation of its batches."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 640}, color_scheme="light")
        page.goto(f"{url}#distance")
        page.wait_for_selector("#input-points")
        send(page, "distance", {"points": "[[3, 4], [6, 8], [5, 12]]"}, "table")
        page.wait_for_selector(".facts b >> nth=0 >> text=/^[1-9]/")
        page.screenshot(path=str(folder / "page.png"))
        page.click("text=Explain this model")
        page.wait_for_selector(".output h3:has-text('Predicted')")
        page.locator("section:has(> h2:text-is('Explain'))").screenshot(path=str(folder / "explain.png"))
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) > 4:
        print(json.dumps(visit(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])))
    else:
        pictures(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
