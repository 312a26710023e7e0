"""What `tailrace check --model` shows: a model's state groups and what follows from them. Shows; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from tailrace.model.family import FamilyConfig
from tailrace.model.row_groups import RowGroup, RowPages
from tailrace.model.source import describe, family_of, has_weights, open_source
from tailrace.model.state_groups import GroupKind
from tailrace.model.state_sizes import (
    PROMPTS,
    bytes_per_token,
    constant_of,
    layer_list,
    most_open,
    prompt_sizes,
)

MIB = 2**20


def render(model: str, tokens_per_page: int) -> Iterator[Table | str]:
    """Tables and lines about a model by name or path. Of a family with rows of its own, config.json alone is enough.

    Raises ConfigError if the model cannot be read, or its periods do not divide tokens_per_page.
    """
    own = family_of(model)
    if own is None:
        yield _plain_groups(model)
        return
    name, config = own
    layout = RowPages(config.row_groups("bfloat16"), tokens_per_page)
    about = f"revision {open_source(model).revision}" if has_weights(model) else "config.json alone, no weights"
    title = f"{name}: {config.family}, {config.num_parameters:,} parameters, {about}"
    yield _row_groups(layout, title)
    yield _sums(config, layout)
    yield _prompts(layout, config.max_position)


def mib(count: int) -> str:
    """Bytes as MiB, to a tenth below a thousand."""
    value = count / MIB
    return f"{value:,.1f}" if value < 1000 else f"{int(value + 0.5):,}"


def per_token(groups: tuple[RowGroup, ...]) -> str:
    """Bytes a token, to a quarter where rows of several tokens leave parts."""
    value = bytes_per_token(groups)
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def group_cells(group: RowGroup) -> tuple[str, str, str, str, str]:
    """Layers, rows, fields with their bytes, bytes a token, bytes a request."""
    fields = ", ".join(f"{f.name} {f.row_bytes} ({f.row_format})" for f in group.fields)
    rows, token, constant = str(group.rows), "", f"{group.constant_bytes:,}"
    if group.kind is GroupKind.HISTORY:
        rows = "1 a token" if group.tokens_per_row == 1 else f"1 a {group.tokens_per_row} tokens"
        token, constant = per_token((group,)), ""
    elif group.kind is GroupKind.TAIL:
        rows = f"{group.rows} at most, of an open {group.period}"
    return f"{layer_list(group.layers)} ({len(group.layers)})", rows, fields, token, constant


def _row_groups(layout: RowPages, title: str) -> Table:
    columns = ("state group", "layers", "rows", "bytes a row and layer", "bytes a token", "bytes a request")
    table = Table(*columns, title=title, title_justify="left")
    for group in layout.groups:
        table.add_row(group.kind.value, *group_cells(group))
    return table


def _sums(config: FamilyConfig, layout: RowPages) -> str:
    groups = layout.groups
    return (
        f"bytes a token: {per_token(groups)} (float32 rows: {per_token(config.row_groups('float32'))})\n"
        f"bytes of a super-page of {layout.tokens_per_page} tokens: {layout.history_bytes:,}\n"
        f"constant bytes a request: windows {constant_of(groups, GroupKind.WINDOW, GroupKind.TOKENS):,}, "
        f"carry {constant_of(groups, GroupKind.CARRY):,}, open rows {most_open(groups):,} at most\n"
        f"state pages a request: {layout.num_state_pages} of {layout.bytes_per_page:,} bytes\n"
        f"positions: {config.max_position:,}"
    )


def _prompts(layout: RowPages, max_position: int) -> Table:
    columns = ("prompt tokens", "MiB of history and windows", "carry, open rows", "history pages", "state pages")
    table = Table(*columns, title="what a hand-off sends; a page is a descriptor", title_justify="left")
    for tokens in [tokens for tokens in PROMPTS if tokens <= max_position] or [max_position]:
        sizes = prompt_sizes(layout, tokens)
        rest = f"{sizes.carry + sizes.open:,} B"
        table.add_row(f"{tokens:,}", mib(sizes.kept), rest, str(sizes.history_pages), str(sizes.state_pages))
    return table


def _plain_groups(model: str) -> Table:
    sizes = describe(open_source(model))
    title = f"{sizes.name}: {sizes.family}, {sizes.num_parameters:,} parameters, revision {sizes.revision}"
    table = Table("state group", "layers", "fields", "looks back", title=title, title_justify="left")
    for group in sizes.groups:
        fields = ", ".join(f"{f.name} {f.kv_heads}x{f.dim}" for f in group.fields)
        table.add_row(
            group.kind.value, str(group.num_layers), fields, "over all" if group.window is None else str(group.window)
        )
    each = ", ".join(f"{dtype} {count:,}" for dtype, count in sizes.kv_bytes_per_token.items())
    table.caption = f"bytes a token: {each}; positions: {sizes.max_position:,}"
    return table
