"""Writes the part of docs/models.md that follows from the families' declarations: state groups and bytes.

`python -m tailrace.cluster.models_page` (make models) puts it between two markers of the page, from the configs of the
published models that stand beside the tests; a test compares. The rest of the page is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.cluster.model_view import group_cells, mib, per_token
from tailrace.model.row_groups import RowPages
from tailrace.model.source import family_of
from tailrace.model.state_groups import GroupKind
from tailrace.model.state_sizes import PROMPTS, SUPER_PAGE_TOKENS, constant_of, most_open, prompt_sizes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
CONFIGS = ROOT / "tests" / "model" / "configs"
BEGIN, END = "<!-- state groups: begin, written by make models -->", "<!-- state groups: end -->"


def page_with(text: str) -> str:
    """`text`, a page with both markers, with the part between them generated anew."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{state_groups_text()}\n{END}{tail}"


def state_groups_text() -> str:
    """One table of sizes over all published models, then one of state groups for each of them."""
    layouts: dict[str, tuple[str, RowPages]] = {}
    for directory in sorted(CONFIGS.iterdir()):
        own = family_of(str(directory))
        assert own is not None, f"{directory} is of no family with rows of its own"
        name, config = own
        layouts[name] = config.family, RowPages(config.row_groups("bfloat16"), SUPER_PAGE_TOKENS)
    lines = _sizes([(name, layout) for name, (_, layout) in layouts.items()])
    for name, (family, layout) in layouts.items():
        lines += ["", f"**{name}** (`{family}`)", "", *_groups(layout)]
    return "\n".join(lines) + "\n"


def _sizes(layouts: list[tuple[str, RowPages]]) -> list[str]:
    prompts = [f"{tokens >> 10}k" for tokens in PROMPTS]
    columns = ["model", "bytes a token", *(f"MiB, {p} prompt" for p in prompts)]
    columns += ["windows", "carry", "open rows, at most", f"super-page of {SUPER_PAGE_TOKENS}", "state pages"]
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for name, layout in layouts:
        groups = layout.groups
        lines.append(
            _row(
                [
                    name,
                    per_token(groups),
                    *(mib(prompt_sizes(layout, tokens).kept) for tokens in PROMPTS),
                    f"{constant_of(groups, GroupKind.WINDOW, GroupKind.TOKENS):,}",
                    f"{constant_of(groups, GroupKind.CARRY):,}",
                    f"{most_open(groups):,}",
                    f"{layout.history_bytes:,}",
                    str(layout.num_state_pages),
                ]
            )
        )
    return lines


def _groups(layout: RowPages) -> list[str]:
    columns = ["state group", "layers", "rows", "bytes a row and layer", "bytes a token", "bytes a request"]
    rows = [[group.kind.value, *group_cells(group)] for group in layout.groups]
    return [_row(columns), "|" + "---|" * len(columns), *(_row(cells) for cells in rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def main() -> None:
    PAGE.write_text(page_with(PAGE.read_text()))


if __name__ == "__main__":
    main()
