"""The command `tailrace`: serve, check, status, replay, chat. Shows and asks; every decision is made elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tailrace.cluster.captures import capture_sizes
from tailrace.cluster.client import Client
from tailrace.cluster.config import TailraceConfig, load_file
from tailrace.cluster.sizes import Sizes, derive
from tailrace.kv_cache.layout import PageLayout
from tailrace.model.errors import ConfigError, PeerError, TailraceError
from tailrace.model.source import open_source
from tailrace.model.state_sizes import SUPER_PAGE_TOKENS

cli = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Serves language models with prefill apart from decode."
)
out = Console()
err = Console(stderr=True)

BAD_CONFIG = 2
NOT_THERE = 3
PARTED = 4  # replay: the core no longer does what was recorded


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
    tokens_per_page: Annotated[int, typer.Option(help="Tokens a super-page, of models that have them.", min=1)] = (
        SUPER_PAGE_TOKENS
    ),
) -> None:
    """Validate FILE without starting anything and print what follows from it; or the state groups of a model."""
    if file is None and model is None:
        raise ConfigError("name a FILE to check, or a --model")
    if file is not None:
        config = load_file(file)
        source = open_source(model or config.model)
        out.print(_sizes_table(config, derive(config, source.config), source.config))
    if model is not None:
        from tailrace.cluster.model_view import render

        for part in render(model, tokens_per_page):
            out.print(part)


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
def replay(
    file: Annotated[Path, typer.Argument(help="A flight recording that a worker has written.")],
    last: Annotated[int, typer.Option(help="Events to show, from the end; 0 for all.", min=0)] = 40,
) -> None:
    """Run a flight recording again and find the event that broke the law.

    Ends with 0 if the law holds to the end, with 1 if it is broken, with 4 if only the core parts from the recording.
    """
    from tailrace.cluster.replay_view import render
    from tailrace.transfer.recording import load
    from tailrace.transfer.replay import Replay

    try:
        recording = load(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    run = Replay(recording)
    outcome = run.run()
    for part in render(recording, run, last):
        out.print(part)
    if outcome.broken is not None:
        raise typer.Exit(1)
    if outcome.diverged is not None:
        raise typer.Exit(PARTED)


@cli.command("replay-decisions")
def replay_decisions(
    file: Annotated[Path, typer.Argument(help="The router's decision_log.")],
    policy: Annotated[str, typer.Option(help="A placement policy.")],
) -> None:
    """Ask another policy what it would have chosen in each logged placement, and what was predicted for that choice.

    The loads are those of the log: what would have followed from other choices, only a simulation tells.
    """
    from tailrace.cluster.decisions_view import render
    from tailrace.router.decision_log import load

    for part in render(load(file), policy):
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


def _by_pool(values: dict[str, int]) -> str:
    """One number if the pools agree, else each with its pool."""
    if len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{value} ({role})" for role, value in values.items())


def _sizes_table(config: TailraceConfig, sizes: Sizes, model: Any) -> Table:
    table = Table("derived", "value", title=f"{config.model}: valid", title_justify="left")
    total = 0
    for role in ("ctx", "gen"):
        pages, rank, tp = sizes.num_pages(role), sizes.rank_layout(role), config.pool(role).tp
        layout = sizes.layout(role)
        rank_bytes = pages * rank.bytes_per_page
        total += config.pool(role).replicas * tp * rank_bytes
        table.add_row(f"{role} workers", str(config.pool(role).replicas))
        table.add_row(f"{role} pages a worker", f"{pages} ({pages - 1} usable), {tp * rank_bytes / 2**20:.1f} MiB")
        if tp > 1 and isinstance(rank, PageLayout) and isinstance(layout, PageLayout):
            heads = rank.group.fields[0].kv_heads
            held = f"{heads} of {layout.group.fields[0].kv_heads} key-value heads"
            table.add_row(f"{role} ranks a worker", f"{tp}, each with {held}, {rank_bytes / 2**20:.1f} MiB")
        state = layout.num_state_pages
        table.add_row(f"{role} tokens a worker", str((pages - 1 - state) * layout.tokens_per_page))
        if state:
            table.add_row(f"{role} state a sequence", f"{state} pages, {state * layout.bytes_per_page / 2**20:.2f} MiB")
    page = {role: sizes.layout(role).bytes_per_page for role in ("ctx", "gen")}
    token = {role: nbytes // sizes.layout(role).tokens_per_page for role, nbytes in page.items()}
    table.add_row("bytes a page", _by_pool(page))
    table.add_row("bytes a token", _by_pool(token))
    table.add_row("tokens of one request at most", str(sizes.max_request_tokens))
    if sizes.replay is not None:
        lower, upper = sizes.replay.encoder, sizes.replay.decoder
        loss = f"approximate ({sizes.replay_step})" if sizes.replay_step else "exact"
        table.add_row("tokens of a prompt left to gen", f"{lower}, of them {upper} through the upper layers: {loss}")
        table.add_row("parameters that a ctx loads", f"{model.num_lower_parameters:,} of {model.num_parameters:,}")
    table.add_row("memory of pages in all", f"{total / 2**20:.1f} MiB, shared or the GPUs'")
    if config.device != "cpu" and isinstance(sizes.ctx_layout, PageLayout):
        for role in ("ctx", "gen"):
            captured = capture_sizes(config, role)
            table.add_row(f"{role} graphs on a GPU: rows", ", ".join(map(str, captured.rows)))
            table.add_row(f"{role} graphs on a GPU: chunk tokens", ", ".join(map(str, captured.tokens)))
            if captured.beside:
                beside = ", ".join(map(str, captured.beside))
                table.add_row(f"{role} graphs on a GPU: chunk tokens beside rows", beside)
        table.add_row("graphs on a GPU: variants", ", ".join(capture_sizes(config, "gen").variants))
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
