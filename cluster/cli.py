"""The command `tailrace`: serve, check, status, chat. Shows and asks; every decision is made elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tailrace.cluster.client import Client
from tailrace.cluster.config import TailraceConfig, load_file
from tailrace.cluster.sizes import Sizes, derive
from tailrace.model.errors import ConfigError, PeerError, TailraceError
from tailrace.model.source import describe, open_source

cli = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Serves language models with prefill apart from decode."
)
out = Console()
err = Console(stderr=True)

BAD_CONFIG = 2
NOT_THERE = 3


@cli.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve YAML such as manifests/serve/local.yaml.")],
    port: Annotated[int | None, typer.Option(help="The clients' port instead of the file's.")] = None,
    operators_port: Annotated[int | None, typer.Option(help="The operators' port instead of the file's.")] = None,
    ask: Annotated[bool, typer.Option(help="Ask one question once the cluster is ready.")] = True,
) -> None:
    """Start a local Ray cluster with the application of CONFIG and serve until Ctrl-C."""
    from tailrace.cluster.local_serve import make_plan, serve_until_stopped

    serve_until_stopped(make_plan(config, port, operators_port), out, ask=ask)


@cli.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="A configuration or Serve YAML.")] = None,
    model: Annotated[str | None, typer.Option(help="Show the state groups of this model instead.")] = None,
) -> None:
    """Validate FILE without starting anything and print what follows from it; or the state groups of a model."""
    if file is None and model is None:
        raise ConfigError("name a FILE to check, or a --model")
    if file is not None:
        config = load_file(file)
        source = open_source(model or config.model)
        out.print(_sizes_table(config, derive(config, source.config)))
    if model is not None:
        out.print(_groups_table(model))


@cli.command()
def status(
    url: Annotated[str, typer.Option(help="The operators' port, or the clients' one.")] = "http://127.0.0.1:8001",
) -> None:
    """What /cluster says: pools, workers, pages, pairs, requests."""
    from tailrace.cluster.status_view import render

    with Client(url) as client:
        for part in render(client.cluster()):
            out.print(part)


@cli.command()
def chat(
    url: Annotated[str, typer.Option(help="The clients' port.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="Bearer key, where keys are on.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
) -> None:
    """Talk in the terminal; an empty line, Ctrl-D or Ctrl-C ends it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    options: dict[str, object] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    with Client(url, key) as client:
        while text := _read_line():
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                for piece in client.stream_chat(messages, **options):
                    answer += piece
                    out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                out.print(" [dim](stopped)[/dim]", end="")
            out.print()
            messages.append({"role": "assistant", "content": answer})


def _read_line() -> str:
    try:
        return out.input("[bold cyan]you>[/bold cyan] ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _sizes_table(config: TailraceConfig, sizes: Sizes) -> Table:
    layout = sizes.layout
    table = Table("derived", "value", title=f"{config.model}: valid", title_justify="left")
    for role in ("ctx", "gen"):
        pages, bytes_all = sizes.num_pages(role), sizes.num_pages(role) * layout.bytes_per_page
        table.add_row(f"{role} workers", str(config.pool(role).replicas))
        table.add_row(f"{role} pages a worker", f"{pages} ({pages - 1} usable), {bytes_all / 2**20:.1f} MiB")
        table.add_row(f"{role} tokens a worker", str((pages - 1) * layout.tokens_per_page))
    table.add_row("bytes a page", str(layout.bytes_per_page))
    table.add_row("bytes a token", str(layout.bytes_per_page // layout.tokens_per_page))
    table.add_row("tokens of one request at most", str(sizes.max_request_tokens))
    total = sum(config.pool(role).replicas * sizes.num_pages(role) * layout.bytes_per_page for role in ("ctx", "gen"))
    table.add_row("shared memory in all", f"{total / 2**20:.1f} MiB")
    return table


def _groups_table(model: str) -> Table:
    sizes = describe(open_source(model))
    title = f"{sizes.name}: {sizes.family}, {sizes.num_parameters:,} parameters, revision {sizes.revision}"
    table = Table("state group", "layers", "fields", "looks back", title=title, title_justify="left")
    for group in sizes.groups:
        fields = ", ".join(f"{f.name} {f.kv_heads}x{f.dim}" for f in group.fields)
        table.add_row(
            group.kind.value, str(group.num_layers), fields, "over all" if group.window is None else str(group.window)
        )
    per_token = ", ".join(f"{dtype} {count:,}" for dtype, count in sizes.kv_bytes_per_token.items())
    table.caption = f"bytes a token: {per_token}; positions: {sizes.max_position:,}"
    return table


def main() -> None:
    """Entry point: errors of ours are one line each on stderr and an exit status, never a traceback."""
    try:
        cli()
    except ConfigError as error:
        _complain(error)
        sys.exit(BAD_CONFIG)
    except PeerError as error:
        _complain(error)
        sys.exit(NOT_THERE)
    except TailraceError as error:
        _complain(error)
        sys.exit(1)


def _complain(error: TailraceError) -> None:
    for line in str(error).split("\n"):
        err.print(f"[red]error[/red]: {escape(line)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
