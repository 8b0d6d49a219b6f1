"""What README.md and the pages in docs/ hold: blocks of code, tables, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, its code."""

    place: str
    language: str
    code: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in these languages, or in any, in order."""
    text = page.read_text()
    return [
        Block(f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2])
        for found in _FENCE.finditer(text)
        if not languages or found[1] in languages
    ]


def programs(page: Path) -> list[list[Block]]:
    """The page's Python blocks, those together that run in one namespace: all, or each section after `## The script`.

    The last block of that script wraps an optimizer. A section that wraps the same optimizer takes its place.
    """
    everything = blocks(page, "python")
    text = page.read_text()
    if "\n## The script\n" not in text or page.name not in ("recipes.md", "uneven-data.md"):
        return [everything]
    parts: list[list[Block]] = []
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        count = len([found for found in _FENCE.finditer(part) if found[1] == "python"])
        parts.append(everything[:count])
        everything = everything[count:]
    first, *others = filter(None, parts)
    wraps = re.compile(r"torchring\.wrap\(\w+, model")
    found = [first]
    for other in others:
        has_own = any(wraps.search(block.code) for block in other)
        found.append([*(first[:-1] if has_own and len(first) > 1 else first), *other])
    return found


def golden(file: Path) -> dict[str, str]:
    """The texts of a file, each behind a line "=== name"."""
    return {each.partition("\n")[0]: each.partition("\n")[2] for each in file.read_text().split("=== ")[1:]}


def section(page: Path, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    level = heading.partition(" ")[0]
    _, mark, rest = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    assert mark, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def snippet(page: Path, heading: str) -> str:
    """The first block of code under a heading."""
    found = _FENCE.search(section(page, heading))
    assert found, f"{page.name} has no code under {heading!r}"
    return found[2]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without the headings of their columns."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    is_rule = [set(line) <= set("|- :") for line in lines]
    kept = [line for i, line in enumerate(lines) if not is_rule[i] and not (i + 1 < len(lines) and is_rule[i + 1])]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))


def links(page: Path) -> list[str]:
    """Where the page's links lead, as they are written."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", _FENCE.sub("", page.read_text())))


def included(page: Path) -> Iterator[tuple[str, str]]:
    """(file, section) of what the page takes from elsewhere; "" for a whole file."""
    for file, _, name in re.findall(r'^--8<-- "([^":]+)(:([\w-]+))?"$', page.read_text(), re.MULTILINE):
        yield file, name


def anchors(page: Path) -> set[str]:
    """What a link to the page may have behind #."""
    text = _FENCE.sub("", page.read_text())
    headings = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in _HEADING.findall(text)]
    found = {re.sub(r"[-\s]+", "-", heading) for heading in headings}
    found |= set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    return found.union(*(anchors(ROOT / file) for file, _ in included(page)))
