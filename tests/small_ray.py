"""A Ray for tests that join it from processes of their own, by RAY_ADDRESS; ended with all it made."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def small_ray() -> Iterator[str]:
    """Its address, which stands in RAY_ADDRESS too."""
    patience = {"RAY_raylet_start_wait_time_s": "120"}  # on a loaded machine
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **patience}
    ray = pytest.importorskip("ray", reason="the package ray is not installed")
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        try:
            started = ray.init(
                num_cpus=1, include_dashboard=False, object_store_memory=300 << 20, log_to_driver=False,
                configure_logging=False, _temp_dir=folder,
            )  # fmt: skip
            address = os.environ["RAY_ADDRESS"] = started.address_info["gcs_address"]
            yield address
        finally:
            os.environ.pop("RAY_ADDRESS", None)
            ray.shutdown()
