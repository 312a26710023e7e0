"""Who a bearer key belongs to, as the configuration says. Holds secrets; nothing here is logged or shown."""

from __future__ import annotations

from tailrace.cluster.config import TailraceConfig


def bearer_keys(config: TailraceConfig) -> dict[str, str]:
    """Every accepted key -> the tenant that it belongs to by name, empty for none."""
    keys = {key.get_secret_value(): "" for key in config.api_keys}
    for name, tenant in config.tenants.items():
        keys |= {key.get_secret_value(): name for key in tenant.api_keys}
    return keys
