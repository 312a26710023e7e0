"""Which codec a pair of workers uses: their names, what they promise, what is offered, and the break-even of `auto`.

A pair uses the first of ctx's codecs that gen has too (transfer/pairing.py). `auto` is one name that lists what may be
chosen, `auto(raw,lossless,int8)`: ctx chooses among them, post by post, and says in each wire row what it chose, so gen
need not be asked. A page takes, one step after the other,

    raw      1 / rate                                        seconds a byte of page
    coded    encode + decode + 1 / (rate * ratio)

with the rate measured on that pair's writes, the codec's seconds on its own work. Raw until the rate is known. Pure,
torch-free; knows no transport. Dies with its pair: the next one measures anew.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RAW, LOSSLESS, AUTO = "raw", "lossless", "auto"
EXACT = "exact"
MEASURED_BYTES = 1 << 20  # a link's rate counts from here on
KEEP = 0.9  # another codec must cost less than this share of the present one: no swinging to and fro
_FADE_BYTES = 64 << 20  # what was measured longer ago than so many bytes counts for half
_LISTED = re.compile(r"^auto\(([a-z0-9,]+)\)$")


@dataclass(frozen=True, slots=True)
class CodecKind:
    """What a codec promises.

    Attributes:
        lossy: what comes out may differ from what went in.
        error: relative L2 error of a page of keys and values, at most (0: bit-equal).
        ratio: bytes of a bfloat16 page over bytes on the wire, for head dims of 64 or more; expected, if not fixed.
    """

    lossy: bool
    error: float
    ratio: float


KINDS: dict[str, CodecKind] = {
    RAW: CodecKind(lossy=False, error=0.0, ratio=1.0),
    LOSSLESS: CodecKind(lossy=False, error=0.0, ratio=1.33),
    "int8": CodecKind(lossy=True, error=0.02, ratio=1.88),
    "fp8": CodecKind(lossy=True, error=0.04, ratio=1.88),
    "int4": CodecKind(lossy=True, error=0.12, ratio=3.2),
}
LOSSY = tuple(name for name, kind in KINDS.items() if kind.lossy)  # the least lossy first


def offered(codec: str, allowed: Sequence[str] = ()) -> tuple[str, ...]:
    """What a worker's compat record lists, by falling preference.

    Args:
        codec: as configured; `auto` stands for the codecs that lose nothing and those `allowed`.
        allowed: lossy codecs that `auto` may choose.
    """
    if codec != AUTO:
        return (codec,)
    candidates = tuple(name for name in KINDS if not KINDS[name].lossy or name in allowed)
    return (f"{AUTO}({','.join(candidates)})", *candidates)


def candidates_of(name: str) -> tuple[str, ...]:
    """What a codec of this name may turn out to be; ValueError if there is none such."""
    listed = _LISTED.match(name)
    names = tuple(listed[1].split(",")) if listed else (name,)
    for one in names:
        if one not in KINDS:
            raise ValueError(f"there is no codec {one!r}; there are {', '.join(KINDS)}")
    return names


def lossy_of(names: Sequence[str]) -> tuple[str, ...]:
    """The lossy codecs among what these names may turn out to be, the least lossy first."""
    found = {one for name in names for one in candidates_of(name)}
    return tuple(name for name in LOSSY if name in found)


def fidelity_class(codec: str, src_dtype: str, dst_dtype: str) -> str:
    """Of pages that came through `codec`: `exact`, or the lossy step that made them.

    Pages computed in another dtype are not what their reader would have computed itself, even if no bit was lost.
    """
    step = codec if KINDS[codec].lossy else ""
    if src_dtype != dst_dtype:
        step = f"{src_dtype}+{step}" if step else src_dtype
    return step or EXACT


def lossy_steps(codec: str, src_dtype: str, dst_dtype: str) -> tuple[str, ...]:
    """The fidelity classes but `exact` that pages may get through what this name may turn out to be, the least lossy
    first."""
    names = [name for name in KINDS if name in candidates_of(codec)]
    classes = dict.fromkeys(fidelity_class(name, src_dtype, dst_dtype) for name in names)
    return tuple(step for step in classes if step != EXACT)


class LinkMeter:
    """The rate of a pair's writes: bytes over the time in which any was under way. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = 0
        self._since = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self.total = 0

    def begun(self) -> None:
        if not self._live:
            self._since = self._clock()
        self._live += 1

    def ended(self, nbytes: int) -> None:
        """One write is done. One that fails ends its pair, and this with it."""
        now = self._clock()
        self._live -= 1
        self._seconds += max(0.0, now - self._since)
        self._since = now
        self._bytes += nbytes
        self.total += nbytes
        if self._bytes > _FADE_BYTES:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    @property
    def rate(self) -> float | None:
        """Bytes a second; None as long as too little has been measured."""
        if self.total < MEASURED_BYTES or self._seconds <= 0.0:
            return None
        return self._bytes / self._seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """What a codec was seen to take. Seconds a byte of page; ratio: bytes of page over bytes on the wire."""

    encode: float
    decode: float
    ratio: float

    def seconds(self, rate: float) -> float:
        """A byte of page, at `rate` bytes a second of wire."""
        return self.encode + self.decode + 1.0 / (rate * self.ratio)


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec and why."""

    codec: str
    reason: str


def choose(costs: Mapping[str, Cost], rate: float | None, present: str) -> Choice:
    """The cheapest of the codecs in `costs`, raw among them; the present one unless another is clearly better."""
    if rate is None:
        return Choice(present, "the link is not measured yet")
    seconds = {name: cost.seconds(rate) for name, cost in costs.items()}
    best = min(seconds, key=lambda name: seconds[name])
    if seconds[best] > KEEP * seconds[present]:
        best = present
    shown = ", ".join(f"{name} {1e9 * s:.2f}" for name, s in sorted(seconds.items(), key=lambda item: item[1]))
    return Choice(best, f"at {rate / 1e9:.2f} GB/s of wire, seconds a GB of pages: {shown}")
