"""Show what changed between two bench files: `python bench/compare.py OLD NEW`. Ends with 1 if something got worse.

A row is worse if it moved against its `better` by more than --tolerance (rows of one machine, so 10 % by default), if
it was ok and no longer is, or if it is gone. Ratios to peers of the same run are shown beside, since they survive a
change of machine and the values do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import Row, read_rows


def verdict(old: Row | None, new: Row | None, tolerance: float) -> tuple[bool, str]:
    """(is it worse, what to say of it)."""
    if new is None:
        return True, "gone"
    if old is None:
        return False, "new"
    if new.status != "ok" or new.value is None:
        return old.status == "ok", f"{old.status} -> {new.status}: {new.reason}"
    if old.status != "ok" or not old.value:
        return False, f"{old.status} -> ok"
    change = new.value / old.value - 1
    loss = -change if new.better == "higher" else change
    return loss > tolerance, f"{change:+.1%}"


def compare(old: Mapping[str, Row], new: Mapping[str, Row], tolerance: float) -> tuple[list[str], int]:
    """(lines, number of rows that got worse)."""
    lines, worse = [], 0
    for name in [*old, *(n for n in new if n not in old)]:
        before, after = old.get(name), new.get(name)
        is_worse, text = verdict(before, after, tolerance)
        worse += is_worse
        values = " -> ".join(
            "-" if row is None or row.value is None else f"{row.value:,.4g}" for row in (before, after)
        )
        ratios = ", ".join(
            f"{key} {before.against[key]:.2f} -> {after.against[key]:.2f}"
            for key in (after.against if after and before else ())
            if before and after and key in before.against
        )
        lines.append(f"{'WORSE' if is_worse else '     '}  {name:<28} {values:>24}  {text:<12}  {ratios}".rstrip())
    return lines, worse


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="share of the old value")
    args = parser.parse_args()
    lines, worse = compare(read_rows(args.old), read_rows(args.new), args.tolerance)
    print("\n".join(lines))
    print(f"{worse} worse of {len(lines)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
