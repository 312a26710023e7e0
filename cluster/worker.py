"""What a rank process is made of: arena, model, pool, engine, transfer thread and loop, put together for ctx or gen.

The one place where the rooms meet. It decides nothing: sizes come from cluster/sizes.py, everything else from the
parts. `load`, `warm_up`, `start`, `run` and `close` are called once each, in this order, from the main thread.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)
