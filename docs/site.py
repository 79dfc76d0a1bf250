"""Builder of the documentation as a site: `make docs` runs it with MkDocs.

    python docs/site.py PAGES        write the pages for MkDocs into the folder PAGES

The pages are README.md, the other files in capitals, and all of docs/. Their links work in the repository; here they
are rewritten to the place of each page, and links to source files become plain text. The tables of all modules and of
all decisions are pages of the site alone, because they repeat what the repository shows.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<!\!)\[(?P<text>[^\]\n]*(?:\n[^\]\n]*)?)\]\((?P<target>(?!\w+:)[^)\s]*)\)")
IMAGE = re.compile(r'(?P<before><img src=")(?P<target>[^"]+)')
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


MODULES, DECISIONS = "modules.md", "decisions/index.md"
"""Places of the pages that only the site has."""


def places() -> dict[Path, str]:
    """Return the place on the site of each page and picture of the repository, and of folders with a page there."""
    found = {ROOT / name: "index.md" if name == "README.md" else name.lower() for name in TOP}
    # security.md is the page about exposing a server.
    found[ROOT / "SECURITY.md"] = "reporting.md"
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in (".md", ".png") and not _is_built(path):
            found[path] = path.relative_to(DOCS).as_posix()
    # MkDocs would take a README.md for another index.md.
    found[DOCS / "README.md"] = "pages.md"
    found[DOCS / "decisions"] = DECISIONS
    found[ROOT / "core"] = MODULES
    return found


def _is_built(path: Path) -> bool:
    """True for a file that make writes, such as a model's."""
    return "models" in path.relative_to(DOCS).parts


def rewritten(text: str, page: Path, known: dict[Path, str]) -> str:
    """Return a page with its links as the site needs them. Raises ValueError for a link to nothing."""
    here = Path(known[page]).parent

    def moved(target: str) -> str:
        name, hash_mark, heading = target.partition("#")
        if not name:
            return target
        path = Path(os.path.normpath(page.parent / name))
        path = path / "README.md" if path / "README.md" in known else path
        if path not in known:
            if not path.exists():
                raise ValueError(f"{page}: '{target}' leads nowhere")
            return ""
        return os.path.relpath(known[path], here) + hash_mark + heading

    def link(match: re.Match[str]) -> str:
        target = moved(match["target"])
        return f"[{match['text']}]({target})" if target else match["text"]

    def image(match: re.Match[str]) -> str:
        return match["before"] + moved(match["target"])

    kept: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    text = IMAGE.sub(image, LINK.sub(link, FENCE.sub(put_aside, text)))
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text)


def decisions_page() -> str:
    """Return the page with the titles of all decision records."""
    titles = {
        path.name: path.read_text(encoding="utf-8").partition("\n")[0] for path in (DOCS / "decisions").glob("*.md")
    }
    links = [f"- [{title.removeprefix('# ')}]({name})" for name, title in sorted(titles.items())]
    return "\n".join(["# Decisions", "", "Why the code is as it is, half a page each.", "", *links, ""])


def modules_page() -> str:
    """Return the page with all modules, which `docs/reference.py` makes."""
    from reference import modules_page as page  # imported here, because it imports remora

    return page()


WRITTEN = {DECISIONS: decisions_page, MODULES: modules_page}
"""Makers of the pages that only the site has."""


def write(folder: Path) -> None:
    """Write all pages and pictures into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    known = places()
    for path, place in known.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            target.write_text(WRITTEN[place](), encoding="utf-8")
        elif path.suffix == ".md":
            target.write_text(rewritten(path.read_text(encoding="utf-8"), path, known), encoding="utf-8")
        else:
            shutil.copyfile(path, target)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
