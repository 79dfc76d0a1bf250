"""Visit to the page at / in a headless Chromium: prints what a user would see as JSON.

Runs under the Python of an environment with playwright:
``python home_page_browser.py models|openai|gpus|keys|pictures URL FOLDER CHROMIUM [FILES]``. ``models`` needs a folder
with a picture and a sound, ``keys`` the key of the server, and ``pictures`` writes those of the README.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

ANSWER = "#answer"
SHOWN = "#view:not([inert])"
"""The view that was chosen last: the one before it takes no input while the next is loaded."""
PAINTS = 10
TIMEOUT_MS = 120_000
PAUSE_MS = 20
STOP_AT_FIRST_WORDS = """() => new MutationObserver((_, self) => {
    const line = document.querySelector('.chat .assistant');
    if (!line || !line.textContent) return;
    self.disconnect();
    document.querySelector('section:has(.chat) .small').click();
}).observe(document.querySelector('.chat'), { childList: true, subtree: true, characterData: true })"""

TAKEN_OVER = """() => ['ctrlKey', 'metaKey', 'shiftKey', 'altKey'].filter((key) => {
    const event = new MouseEvent('click', { bubbles: true, cancelable: true, [key]: true });
    let taken = false;
    window.addEventListener('click', () => { taken = event.defaultPrevented; event.preventDefault(); }, { once: true });
    document.querySelector('a[href]').dispatchEvent(event);
    return taken;
})"""


def choose(page: Page, model: str) -> None:
    """Choose a model and wait for its form."""
    page.click(f"nav button[data-name='{model}/1']")
    page.wait_for_selector(f"{SHOWN} h2:text('{model}')")


def send(page: Page, model: str, values: dict[str, str], until: str) -> str:
    """Fill in the form of a model, send it and return the answer's text."""
    choose(page, model)
    for name, value in values.items():
        page.fill(f"#input-{name}", value)
    page.click("button.primary")
    page.wait_for_selector(f"{ANSWER} {until}")
    return page.inner_text(ANSWER)


@contextmanager
def opened(chromium: str) -> Iterator[Browser]:
    """Yield a new headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def watched(browser: Browser, url: str, seen: dict[str, Any]) -> Page:
    """Return a page whose errors, and requests to other places, are noted."""
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    page.set_default_timeout(TIMEOUT_MS)
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith((url, f"blob:{url}", "data:")) or seen["elsewhere"].append(request.url),
    )
    return page


def visit(url: str, folder: Path, chromium: str, files: Path) -> dict[str, Any]:
    """Use the page as a person would and return what it showed."""
    seen: dict[str, Any] = {"errors": [], "elsewhere": []}
    with opened(chromium) as browser:
        page = watched(browser, url, seen)
        page.goto(url)
        page.wait_for_selector("#models button")
        seen["models"] = page.locator("#models button").all_inner_texts()
        seen["controls"] = page.locator("text=/^(Unload|Load again)$/").count()
        choose(page, "total")
        page.wait_for_selector("#input-x")
        seen["first"] = page.input_value("#input-x")
        seen["numbers"] = send(page, "total", {"x": "[[1, 2, 3], [4, 5, 6]]"}, "table")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        for name in ("Python", "JavaScript", "tritonclient", "plain JSON", "curl"):
            page.click(f'role=tab[name="{name}"]')
            seen[name] = copied(page)
        seen["typed"] = typed_text(page)
        seen["invalid"] = send(page, "total", {"x": "one"}, "[role=alert]")
        seen["refused"] = send(page, "refuse", {"x": "1"}, "[role=alert]")
        seen["text"] = send(page, "shout", {"text": "<img src=x onerror=alert(1)>"}, "pre")
        seen["injected"] = page.locator(f"{ANSWER} img").count()
        seen["stream"] = send(page, "count", {"n": "3"}, "p:has-text('events')")
        seen["json"] = send(page, "keys", {"value": '{"b": 1, "a": 2}'}, "pre")
        seen["probabilities"] = send(page, "spread", {"n": "4"}, "progress")
        seen["scores"] = send(page, "mood", {"text": "fine"}, "progress")
        choose(page, "turn")
        page.wait_for_selector("#input-picture")
        page.set_input_files("input[type=file]", files / "picture.png")
        page.wait_for_selector(".preview img")
        page.click("button.primary")
        page.wait_for_selector(f"{ANSWER} img")
        seen["image"] = page.locator(f"{ANSWER} img").evaluate("each => [each.naturalWidth, each.naturalHeight]")
        page.wait_for_selector(".facts b >> nth=0 >> text=/^1$/")
        send(page, "speak", {"text": "hello"}, "audio")
        wait_until(page, "document.querySelector('#answer audio').duration > 0")
        seen["spoken_s"] = page.locator(f"{ANSWER} audio").evaluate("each => each.duration")
        page.screenshot(path=str(folder / "sound.png"), full_page=True)
        choose(page, "hear")
        page.wait_for_selector("#input-sound")
        page.set_input_files("input[type=file]", files / "sound.wav")
        page.wait_for_selector(".preview audio")
        page.click("button.primary")
        page.wait_for_selector(f"{ANSWER} pre")
        seen["heard"] = page.inner_text(f"{ANSWER} pre")
        seen["stopped"] = stopped_stream(page)
        seen["charts"] = charts_of(page)
        choose(page, "total")
        send(page, "total", {"x": "[[1, 2, 3]]"}, "pre")  # one batch alone has no rate
        page.click("text=Explain this model")
        page.wait_for_selector(".output h3:has-text('Batches by size')")
        seen["explain"] = page.inner_text("section:has(> h2:text-is('Explain'))")
        page.click("text=Show the start")
        page.wait_for_selector(".output h3:has-text('This model')")
        seen["start"] = page.inner_text("section:has(> h2:text-is('Start'))")
        page.click("text=Show the last traces")
        page.click("text=Trace the next 50 requests")
        page.wait_for_selector("text=On: send requests")
        send(page, "total", {"x": "[[1, 2, 3]]"}, "pre")
        seen["traces"] = last_trace(page)
        page.screenshot(path=str(folder / "wide.png"), full_page=True)
        page.evaluate("document.activeElement.blur()")
        seen["keyboard"] = reached_by_keyboard(page)
        page.click("#server-view")
        page.wait_for_selector("figcaption:has-text('Memory of the server') b:text-matches('[1-9]')")
        page.wait_for_selector(".charts path[d^='M']")
        page.click("text=Show the start")
        page.wait_for_selector(".output h3:has-text('Models')")
        page.click("text=Show the last traces")
        page.wait_for_selector("details")
        seen["server"] = page.inner_text("#view")
        page.screenshot(path=str(folder / "server.png"), full_page=True)
        narrow = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        narrow.set_default_timeout(TIMEOUT_MS)
        narrow.goto(f"{url}#total")
        narrow.wait_for_selector("#input-x")
        seen["backgrounds"] = [
            each.evaluate("getComputedStyle(document.body).backgroundColor") for each in (page, narrow)
        ]
        seen["narrow_width"] = narrow.evaluate("document.documentElement.scrollWidth")
        narrow.screenshot(path=str(folder / "narrow.png"), full_page=True)
        narrow.click("#server-view")
        narrow.wait_for_selector(".charts")
        seen["narrow_server_width"] = narrow.evaluate("document.documentElement.scrollWidth")
        seen["bytes"], seen["first_paint_ms"] = first_paint(narrow, url)
    return seen


def typed_text(page: Page) -> list[object]:
    """Return the text of a field after its model was chosen again, and whether it takes input while another loads."""
    choose(page, "total")
    page.fill("#input-x", "[[7, 8, 9]]")
    choose(page, "total")
    kept = page.input_value("#input-x")
    pattern = "**/v2/models/keys/versions/1/config"
    held = held_requests(page, pattern)
    page.click("nav button[data-name='keys/1']")
    wait_for(page, held, 1)
    inert = page.evaluate("document.querySelector('#view').inert")
    held[0].continue_()
    page.unroute(pattern)
    return [kept, inert]


def copied(page: Page) -> str:
    """Press the button that copies the code, and return what a paste would insert."""
    page.evaluate("navigator.clipboard.writeText('')")
    page.click("text=/^Copy$/")  # which the button shows again two seconds after the press before
    wait_until(page, "navigator.clipboard.readText()")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def visit_gpus(url: str, folder: Path, chromium: str) -> dict[str, Any]:
    """Return the charts of a server that has GPUs, once they have values."""
    seen: dict[str, Any] = {"errors": [], "elsewhere": []}
    with opened(chromium) as browser:
        page = watched(browser, url, seen)
        page.goto(f"{url}#/server")
        page.wait_for_selector("figcaption:has-text('GPU 1, memory, MiB') b:text-matches('[1-9]')")
        seen["charts"] = charts_of(page)
        page.screenshot(path=str(folder / "gpus.png"), full_page=True)
    return seen


def charts_of(page: Page) -> dict[str, str]:
    """Return the name of each chart and its last value."""
    labels = page.locator(".charts svg").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    return {name: value for name, _, value in (label.partition(": ") for label in labels)}


def stopped_stream(page: Page) -> str:
    """Return the answer of a stream without an end that is stopped while it arrives."""
    choose(page, "endless")
    page.fill("#input-n", "1")
    page.click("button.primary")
    page.wait_for_selector(f"{ANSWER} pre:text-matches('.')")
    page.click("text=Stop")
    page.wait_for_selector(f"{ANSWER} >> text=stopped")
    page.wait_for_selector("figcaption:has-text('Requests') b:has-text('running 0')")
    return page.inner_text(ANSWER)


def last_trace(page: Page) -> str:
    """Return the text of the newest trace, opened. It is finished a moment after its request was answered."""
    while not page.locator("details").count():
        page.click("text=Show the last traces")
        page.wait_for_selector("section:has(> h2:text-is('Traces')) .output p:has-text('Traced')")
    page.click("summary >> nth=0")
    return page.inner_text("details >> nth=0")


def reached_by_keyboard(page: Page) -> list[str]:
    """Return the names of the controls that Tab reaches from the top of the page."""
    found = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found.append(page.evaluate("document.activeElement.id || document.activeElement.innerText.split('\\n')[0]"))
    return found


def visit_openai(url: str, folder: Path, chromium: str) -> dict[str, Any]:
    """Chat with the model `tiny`, stop an answer, and compare texts with `meaning`."""
    seen: dict[str, Any] = {"errors": [], "elsewhere": []}
    with opened(chromium) as browser:
        page = watched(browser, url, seen)
        page.goto(f"{url}#tiny")
        page.wait_for_selector("#chat-text")
        page.fill("#chat-tokens", "12")
        page.fill("#chat-text", "What is two plus two?")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=/[0-9]+ tokens,/")
        seen["chat"] = page.locator(".chat p").all_inner_texts()
        page.screenshot(path=str(folder / "chat.png"), full_page=True)
        seen["attempts"] = stop_chat(page)
        page.click("text=New conversation")
        page.check("text=Continue the text")
        page.fill("#chat-tokens", "3")
        page.fill("#chat-text", "The baker")
        page.click("section:has(.chat) button.primary")
        page.wait_for_selector("text=/[0-9]+ tokens?,/")
        seen["continued"] = page.locator(".chat p").all_inner_texts()
        page.wait_for_selector(".facts b >> nth=0 >> text=/^[1-9]/")
        page.wait_for_selector(".facts b >> nth=1 >> text=/^[1-9]/")  # the counts are polled
        page.wait_for_selector("figcaption:has-text('First token') b:text-matches('p50 [0-9]')")
        seen["live"] = page.inner_text("section:has(> h2:text-is('Live'))")
        seen["charts"] = charts_of(page)
        page.click("text=Show the last traces")
        page.wait_for_selector("text=/Tracing is off/")
        seen["traces"] = page.inner_text("section:has(> h2:text-is('Traces'))")
        page.locator("section:has(> h2:text-is('Live'))").screenshot(path=str(folder / "tokens.png"))
        choose(page, "meaning")
        page.fill("#embedding-texts", "one\none\nanother text")
        page.click("text=Compare")
        page.wait_for_selector(".cosines")
        seen["cosines"] = page.locator(".cosines td").all_inner_texts()
        page.wait_for_selector(".facts b >> nth=0 >> text=/^[1-9]/")
        seen["embeddings"] = charts_of(page)
        seen["labels"] = send(page, "flower", {"X": "[[1, 3, 2], [5, 4, 6]]"}, "progress")
        choose(page, "flower")
        page.click("text=/^Unload$/")
        page.wait_for_selector("#models button[data-name^='flower']:has-text('unavailable')")
        seen["unloaded"] = page.inner_text("#models")
        page.click("nav button[data-name^='flower']")
        page.click("text=/^Load again$/")
        page.wait_for_selector("#models button[data-name='flower/1']:has-text('ready')")
        page.screenshot(path=str(folder / "embeddings.png"), full_page=True)
    return seen


def visit_with_key(url: str, folder: Path, chromium: str, key: str) -> dict[str, Any]:
    """Open the page of a server that requires a key: without one, with a wrong one, with ``key``, and without again."""
    seen: dict[str, Any] = {"errors": [], "elsewhere": [], "sent": []}
    with opened(chromium) as browser:
        page = watched(browser, url, seen)
        page.on("request", lambda request: seen["sent"].append([request.url, request.headers.get("x-api-key")]))
        page.goto(url)
        page.wait_for_selector("dialog #api-key")
        seen["before"] = [page.title(), page.locator("#models button").count(), page.inner_text("main")]
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.fill("#api-key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog [role=alert]")
        seen["refused"] = page.inner_text("dialog")
        page.screenshot(path=str(folder / "key.png"))
        page.fill("#api-key", key)
        page.click("dialog button")
        page.wait_for_selector("#models button")
        seen["answer"] = send(page, "total", {"x": "[[1, 2, 3]]"}, "pre")
        page.click("text=Routes and examples")
        wait_until(page, "[...document.querySelectorAll('#view a')].some((each) => each.href.endsWith('/v2/status'))")
        seen["docs"] = page.inner_text("#view")
        seen["links"] = page.locator("#view a").evaluate_all("all => all.map(each => each.href)")
        page.click("text=OpenAPI")
        page.wait_for_selector("#view pre:has-text('3.1.0')")
        seen["kept"] = model_chosen_meanwhile(page)
        seen["taken over"] = page.evaluate(TAKEN_OVER)
        seen["sent meanwhile"] = sent_while_asked(page, key)
        seen["stores"] = page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
        page.reload()
        page.wait_for_selector("#models button")
        page.click("#forget-key")
        page.wait_for_selector("dialog #api-key")
        seen["after"] = page.evaluate("[sessionStorage.length, document.querySelectorAll('#models button').length]")
    return seen


def held_requests(page: Page, pattern: str) -> list[Route]:
    """Return a list to which requests to a path are added, which then wait."""
    held: list[Route] = []
    page.route(pattern, lambda route: held.append(route))  # Playwright sets an attribute of it
    return held


def wait_for(page: Page, held: list[Route], count: int) -> None:
    """Wait until so many requests are held."""
    while len(held) < count:
        page.wait_for_timeout(20)


def model_chosen_meanwhile(page: Page) -> bool:
    """Return True if a model stays on the page that is chosen before the answer to a link arrives."""
    path = page.locator("a:has-text('Routes and examples') >> nth=0").get_attribute("href")
    held = held_requests(page, f"**/{path}")
    page.click("text=Routes and examples")
    wait_for(page, held, 1)
    choose(page, "total")
    page.wait_for_selector("#input-x")
    with page.expect_response(f"**/{path}") as answer:
        held[0].continue_()
    answer.value.finished()
    page.wait_for_timeout(100)
    page.unroute(f"**/{path}")
    return page.locator("#input-x").count() == 1


def sent_while_asked(page: Page, key: str) -> list[str | None]:
    """Refuse the keys of two requests, and return the keys that are sent from then on."""
    held = held_requests(page, "**/twice/*")
    page.evaluate("for (const path of ['twice/a', 'twice/b']) request(path); null")
    wait_for(page, held, 2)
    held[0].fulfill(status=401)
    page.wait_for_selector("dialog #api-key")
    held[1].fulfill(status=401)
    page.wait_for_timeout(100)
    page.fill("#api-key", key)
    page.click("dialog button")
    wait_for(page, held, 4)
    for each in held[2:]:
        each.fulfill(status=200)
    page.unroute("**/twice/*")
    return [each.request.headers.get("x-api-key") for each in held[2:]]


def stop_chat(page: Page) -> int:
    """Stop a long answer at its first words, and return how many answers it took, because a fast one may end first."""
    page.fill("#chat-tokens", "400")
    for attempt in range(1, 20):
        page.click("text=New conversation")
        page.evaluate(STOP_AT_FIRST_WORDS)
        page.fill("#chat-text", "Write a short story about a cat.")
        page.keyboard.press("Enter")
        page.wait_for_selector("section:has(.chat) [role=status]:text-matches('stopped|tokens,')")
        lines = page.evaluate("fetch('v2/metrics').then(each => each.text())").splitlines()
        aborted = [line for line in lines if 'finished_reason="abort"' in line and float(line.split()[-1])]
        if aborted and "stopped" in page.inner_text("section:has(.chat) [role=status]"):
            return attempt
    return 0


def wait_until(page: Page, condition: str) -> None:
    """Wait until an expression is true; Playwright's own wait needs ``eval``, which the page's policy forbids."""
    for _ in range(TIMEOUT_MS // PAUSE_MS):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(PAUSE_MS)
    raise AssertionError(condition)


def first_paint(page: Page, url: str) -> tuple[int, float]:
    """Return the size of the page and the time until its first paint, the least of some visits."""
    sizes, times = [], []
    for _ in range(PAINTS):
        page.goto("about:blank")
        page.goto(url)
        wait_until(page, "performance.getEntriesByName('first-contentful-paint').length > 0")
        times.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        sizes.append(page.evaluate("performance.getEntriesByType('navigation')[0].decodedBodySize"))
    return max(sizes), min(times)


def pictures(url: str, folder: Path, chromium: str) -> None:
    """Write the pictures of the README: the answer of the README's function, and the explanation of its batches."""
    with opened(chromium) as browser:
        page = browser.new_page(viewport={"width": 960, "height": 640}, color_scheme="light")
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{url}#distance")
        page.wait_for_selector("#input-points")
        send(page, "distance", {"points": "[[3, 4], [6, 8], [5, 12]]"}, "table")
        page.wait_for_selector(".facts b >> nth=0 >> text=/^[1-9]/")
        page.screenshot(path=str(folder / "page.png"))
        page.click("text=Explain this model")
        page.wait_for_selector(".output h3:has-text('Predicted')")
        page.locator("section:has(> h2:text-is('Explain'))").screenshot(path=str(folder / "explain.png"))


if __name__ == "__main__":
    kind, where, kept, browser_path = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    if kind == "models":
        print(json.dumps(visit(where, kept, browser_path, Path(sys.argv[5]))))
    elif kind == "gpus":
        print(json.dumps(visit_gpus(where, kept, browser_path)))
    elif kind == "openai":
        print(json.dumps(visit_openai(where, kept, browser_path)))
    elif kind == "keys":
        print(json.dumps(visit_with_key(where, kept, browser_path, sys.argv[5])))
    else:
        pictures(where, kept, browser_path)
