"""A process of the product with one thing about it that is not as it should be.

    python tests/odd_process.py ODD=VALUE ... {ctx,gen} --config FILE --directory DIR ...

    late_pool=3          it has no pages to offer its peers until so many seconds after the first has asked
    tells=127.0.0.1      it listens at --host and tells everybody another address
    protocol=99          its record for pairing names another protocol version; `links_protocol`: so do its links
    window=99            its record for pairing says that its layers keep so many tokens only

What is behind the `=` replaces the product's own value; all else is the product. It is put in place where a rank is
about to import the product's parts: torch must not be imported earlier.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tailrace.cluster import process, rank


def late_pool(seconds: str) -> None:
    from tailrace.transfer import switchboard

    answer, asked = switchboard.answer_hello, []

    def later(*args: Any, **options: Any) -> Any:
        asked.append(time.monotonic())
        hello = answer(*args, **options)
        return hello if time.monotonic() - asked[0] > float(seconds) else replace(hello, transports={})

    switchboard.answer_hello = later


def tells(host: str) -> None:
    from tailrace.transfer import switchboard

    register = switchboard.Switchboard.register

    def told(self: switchboard.Switchboard, epoch: int, router_boot: str) -> Any:
        return replace(register(self, epoch, router_boot), host=host)

    switchboard.Switchboard.register = told  # type: ignore[method-assign]


def record_as(change: Callable[[Any], Any]) -> None:
    from tailrace.cluster import worker

    compat = worker.compat_record
    worker.compat_record = lambda *args, **options: change(compat(*args, **options))


def protocol(version: str) -> None:
    record_as(lambda record: replace(record, protocol=int(version)))


def window(tokens: str) -> None:
    record_as(lambda record: replace(record, groups=tuple(replace(g, window=int(tokens)) for g in record.groups)))


def links_protocol(version: str) -> None:
    from tailrace.transfer import links

    links.PROTOCOL_VERSION = int(version)


ODD = {
    "late_pool": late_pool,
    "tells": tells,
    "protocol": protocol,
    "window": window,
    "links_protocol": links_protocol,
}


def main() -> None:
    words = [word.split("=", 1) for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    sys.argv[1:] = sys.argv[1 + len(words) :]
    set_threads = rank.set_thread_environment

    def at_the_start(*args: Any) -> int:
        count = set_threads(*args)
        for name, value in words:
            ODD[name](value)
        return count

    rank.set_thread_environment = at_the_start
    process.main()


if __name__ == "__main__":
    main()
