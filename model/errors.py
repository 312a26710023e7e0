"""The exception tree, split by whose fault it is. "Does not fit now" is a return value and stands nowhere here.

TailraceError
├── ClientError            the request is wrong: 4xx, never retried, opens no breaker
├── ConfigError            the operator's file or checkpoint is wrong: refused at construction
├── WorkerError            our own fault: 5xx, may be retried elsewhere
│   └── LedgerError        a page conservation law is broken: the process stops
└── PeerError              the other process's fault or absence: retried, never blamed on the client
    ├── PairRefused        compat records differ; names the field and both values
    └── ProtocolError      a frame that is malformed, too large or of an unknown kind
"""

from __future__ import annotations


class TailraceError(Exception):
    """Base of every error that Tailrace raises on purpose."""


class ClientError(TailraceError):
    """The request is wrong.

    Args:
        message: what is wrong, with the numbers.
        param: the request field at fault, as the client wrote it; None if it is the body as a whole.
        status: HTTP status, 4xx.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class ConfigError(TailraceError):
    """A configuration or checkpoint that cannot be served; the message names the key and both values."""


class WorkerError(TailraceError):
    """A fault of ours inside a worker."""


class LedgerError(WorkerError):
    """free + cached + held + pinned + quarantined != total, or an ownership change that the table forbids."""


class PeerError(TailraceError):
    """The other process failed, or is not there."""


class PairRefused(PeerError):
    """Two workers cannot be paired: `field` differs and no codec bridges it."""

    def __init__(self, field: str, mine: object, theirs: object) -> None:
        super().__init__(f"pairing refused: {field} differs: mine {mine!r}, theirs {theirs!r}")
        self.field, self.mine, self.theirs = field, mine, theirs


class ProtocolError(PeerError):
    """A frame that is malformed, over its bound, or of an unknown kind."""
