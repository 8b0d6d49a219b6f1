"""Pieces of the page as HTML. All text is escaped here: names of hosts and parameters come from users."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from torchring.report.model.timing import Spread
from torchring.report.show.formats import bounds, median


class Html(str):
    """Markup. All other strings are text, which `html` escapes."""


def html(content: str | Spread) -> Html:
    """Markup as it is, text escaped, a number with its spread less prominent than its median."""
    if isinstance(content, Html):
        return content
    if isinstance(content, Spread):
        return Html(f'{escape(median(content))} <span class="spread">({escape(bounds(content))})</span>')
    return Html(escape(content))


def element(name: str, *contents: str | Spread, **attributes: str) -> Html:
    """An element. An attribute `class_` is a class, `data_x` is data-x; an empty one is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value
    )
    return Html(f"<{name}{written}>{''.join(map(html, contents))}</{name}>")


def join(contents: Iterable[str]) -> Html:
    """Pieces one after the other."""
    return Html("\n".join(map(html, contents)))


def section(name: str, title: str, *contents: str) -> Html:
    """A part of the page under a heading. `name` is what a link to it has behind #."""
    heading = element("h2", title, id=name)
    return element("section", join([heading, *contents]), aria_labelledby=name)


def paragraph(text: str, class_: str = "") -> Html:
    """Nothing if there is no text."""
    return element("p", text, class_=class_) if text else Html("")


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str | Spread]], texts: Sequence[int] = ()
) -> Html:
    """A table whose first column names the row. `texts`: the columns that hold text, not numbers."""

    def cell(name: str, column: int, content: str | Spread, **attributes: str) -> Html:
        kind = "" if column not in texts else "text wide" if column else "text"
        return element(name, content, class_=kind, **attributes)

    head = join(cell("th", i, column, scope="col") for i, column in enumerate(columns))
    body = join(
        element("tr", *(cell("td" if i else "th", i, each, scope="" if i else "row") for i, each in enumerate(row)))
        for row in rows
    )
    content = join([element("caption", caption), element("thead", element("tr", head)), element("tbody", body)])
    return element("div", element("table", content), class_="scroll", tabindex="0", role="region", aria_label=caption)


def legend(colors: Iterable[tuple[str, str]]) -> Html:
    """What the colours of a figure mean: (name, colour)."""
    entries = [element("li", swatch(color), name) for name, color in colors]
    return element("ul", join(entries), class_="legend")


def swatch(color: str) -> Html:
    """A small square of a colour."""
    return Html(f'<i class="swatch" style="background:{escape(color)}" aria-hidden="true"></i>')


def panel(name: str, figure: Any, description: str, *above: str) -> Html:
    """A figure. `description` is for people who cannot see it; `above` is a legend or a choice."""
    drawing = element("div", id=name, class_="drawing", role="img", aria_label=description)
    data = figure.to_json().replace("<", "\\u003c")  # no text of the data ends the script
    script = Html(f'<script type="application/json" id="{name}-data">{data}</script>')
    return element("figure", join([*above, drawing, script]), class_="panel")


def choice(label: str, drawing: str, options: Sequence[tuple[str, dict[str, Any]]], selected: int) -> Html:
    """A menu above a figure: (what is shown, {"group": legend group to show} or {"layout": changes of the layout})."""
    entries = [
        element("option", text, value=json.dumps(change), selected="selected" if i == selected else "")
        for i, (text, change) in enumerate(options)
    ]
    # Without autocomplete="off" a browser that reloads the page may keep another choice than the figure shows.
    select = element("select", join(entries), id=f"{drawing}-choice", data_drawing=drawing, autocomplete="off")
    return element("div", element("label", label, for_=f"{drawing}-choice"), select, class_="choice")
