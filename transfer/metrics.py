"""What can be seen: the metric names, one process's registry of them, and the cluster's exposition made of all.

Every sample carries the labels role, worker and model. A process sends its families in a Stats frame each second; the
router keeps the last of each process and exposes them together. Seconds and bytes everywhere. Torch-free; no I/O. A
process that dies leaves its last families with the router, which drops them with its death notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.transfer.messages import Stats

Families = tuple[tuple[str, str, str, tuple[tuple[str, dict[str, str], float], ...]], ...]

COMMON_LABELS = ("role", "worker", "model")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """kind: counter | gauge | histogram. `labels`: beside the common ones."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricSpec] = {
    "tailrace_ttft_seconds": MetricSpec("histogram", "Time to first token, and its parts.", ("part",)),
    "tailrace_itl_seconds": MetricSpec("histogram", "Time between tokens of a stream."),
    "tailrace_queue_length": MetricSpec("gauge", "Requests that wait."),
    "tailrace_queue_age_seconds": MetricSpec("gauge", "Age of the oldest request that waits."),
    "tailrace_pages": MetricSpec("gauge", "KV pages by state.", ("pool", "state")),
    "tailrace_prefix_hit_tokens_total": MetricSpec("counter", "Prompt tokens found in the prefix index."),
    "tailrace_transfer_bytes_total": MetricSpec(
        "counter", "Page bytes read: before the codec (logical) and moved (wire).", ("kind", "transport", "codec")
    ),
    "tailrace_transfer_seconds": MetricSpec(
        "histogram", "Hand-off from bind (total), from the prefill's end (exposed), to valid.", ("part",)
    ),
    "tailrace_codec_seconds_total": MetricSpec("counter", "Seconds spent in codecs."),
    "tailrace_requests_total": MetricSpec("counter", "Requests that ended.", ("outcome", "reason")),
    "tailrace_local_prefills_total": MetricSpec("counter", "Prompts prefilled by a gen worker.", ("reason",)),
    "tailrace_migrations_total": MetricSpec("counter", "Streams that moved to another worker."),
    "tailrace_stale_frames_total": MetricSpec("counter", "Late, doubled and unknown frames, dropped."),
    "tailrace_expired_reads_total": MetricSpec("counter", "Hand-offs whose pages changed before they were released."),
    "tailrace_corrupt_pages_total": MetricSpec("counter", "Pages or landing chunks whose checksum was wrong."),
    "tailrace_draining": MetricSpec("gauge", "1 while the worker drains."),
    "tailrace_active_requests": MetricSpec("gauge", "Requests in work."),
    "tailrace_transfers_in_flight": MetricSpec("gauge", "Hand-offs between bind and valid."),
    "tailrace_transfer_queue_length": MetricSpec("gauge", "Reads and posts that were started and have not ended."),
    "tailrace_transfer_queue_age_seconds": MetricSpec("gauge", "Age of the oldest hand-off under way."),
    "tailrace_landing_chunks": MetricSpec("gauge", "Landing chunks by state.", ("state",)),
    "tailrace_ledger_holds": MetricSpec(
        "gauge", "1 if books (kv, landing) added up when they were last counted, at rest; 0 if not.", ("books",)
    ),
    "tailrace_recordings_total": MetricSpec(
        "counter", "Flight recordings written: the ledger was broken, or somebody asked.", ("reason",)
    ),
    "tailrace_claims": MetricSpec("gauge", "Claims of the router.", ("kind",)),
    "tailrace_prefill_prediction_error_ratio": MetricSpec(
        "histogram", "How far a prefill's predicted seconds lay off, over the measured ones."
    ),
    "tailrace_worker_restarts_total": MetricSpec("counter", "Worker processes that were started again."),
    "tailrace_breaker_open": MetricSpec("gauge", "1 while a worker's breaker is not closed.", ("peer",)),
    "tailrace_breaker_trips_total": MetricSpec("counter", "Times that a breaker opened."),
    "tailrace_stats_stale": MetricSpec("gauge", "1 while a process's statistics are older than they should be."),
    "tailrace_prompt_positions_total": MetricSpec("counter", "Prompt positions computed here.", ("kind",)),
    "tailrace_output_tokens_total": MetricSpec("counter", "Tokens sampled here."),
    "tailrace_pairs": MetricSpec("gauge", "Context workers to read from: wanted ones by state.", ("state",)),
    "tailrace_backflow_offers_total": MetricSpec(
        "counter",
        "Finished turns offered to ctx: read, known, no_room, stale, late, crowded, unsupported.",
        ("result",),
    ),
    "tailrace_backflow_tokens_total": MetricSpec("counter", "Tokens of finished turns that ctx has read from gen."),
    "tailrace_shadow_checks_total": MetricSpec(
        "counter", "Hand-offs whose last full block was computed again: equal, different, or skipped.", ("result",)
    ),
    "tailrace_shadow_check_seconds_total": MetricSpec("counter", "Seconds that shadow checks took of the loop."),
    "tailrace_prompt_cache_tokens_total": MetricSpec(
        "counter", "Tokens of prompts that went through the prompt-token cache: memory, store, fresh.", ("source",)
    ),
    "tailrace_prompt_cache_prompts_total": MetricSpec(
        "counter", "Prompts looked up in the prompt-token cache: hit (at least a part), miss.", ("result",)
    ),
    "tailrace_prompt_cache_evictions_total": MetricSpec("counter", "Parts that had to go: memory, store.", ("tier",)),
    "tailrace_prompt_cache_bytes": MetricSpec("gauge", "Bytes of the prompt-token cache: memory, store.", ("tier",)),
    "tailrace_draft_tokens_total": MetricSpec(
        "counter",
        "Guessed tokens that steps verified (proposed), and those that became tokens (accepted).",
        ("result",),
    ),
    "tailrace_undrafted_requests_total": MetricSpec(
        "counter",
        "Requests decoded without drafts where drafts are on: grammar, penalties, max_tokens.",
        ("reason",),
    ),
    "tailrace_preemptions_total": MetricSpec("counter", "Sequences put back for want of pages."),
}
METRIC_NAMES: tuple[str, ...] = tuple(METRICS)


class Metrics:
    """One process's metrics. Thread-safe, as prometheus_client is; series appear when first touched.

    Args:
        role: ingress | router | ctx | gen.
        worker: the process's name.
        model: the served name.
    """

    def __init__(self, role: str, worker: str, model: str) -> None:
        self._common = {"role": role, "worker": worker, "model": model}
        self._registry = CollectorRegistry(auto_describe=False)
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._seen: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._puts: dict[tuple[object, ...], Callable[[float], None]] = {}
        for name, spec in METRICS.items():
            labels = (*COMMON_LABELS, *spec.labels)
            if spec.kind == "counter":
                self._metrics[name] = Counter(name, spec.help, labels, registry=self._registry)
            elif spec.kind == "gauge":
                self._metrics[name] = Gauge(name, spec.help, labels, registry=self._registry)
            else:
                self._metrics[name] = Histogram(name, spec.help, labels, registry=self._registry, buckets=_SECONDS)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Raise a counter, observe a histogram or set a gauge, by the metric's kind. KeyError for an unknown name."""
        key = (name, *labels.items())
        put = self._puts.get(key)
        if put is None:
            put = self._puts[key] = self._put_of(name, labels)
        put(value)

    def _put_of(self, name: str, labels: dict[str, str]) -> Callable[[float], None]:
        """What takes the values of one series; looking it up anew costs more than the rest of `add`."""
        child = self._metrics[name].labels(**self._common, **labels)
        if isinstance(child, Counter):
            return child.inc
        return child.observe if isinstance(child, Histogram) else child.set

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to `total`, which its owner counts itself and never lowers."""
        key = (name, tuple(sorted(labels.items())))
        before = self._seen.get(key, 0.0)
        if total >= before:
            self._seen[key] = total
            self.add(name, total - before, **labels)

    def value(self, name: str, **labels: str) -> float:
        """Current value of one sample of a counter or gauge, 0 if it was never touched."""
        return self._registry.get_sample_value(name, {**self._common, **labels}) or 0.0

    def families(self) -> Families:
        """Everything that was touched, as a Stats frame carries it."""
        out = []
        for family in self._registry.collect():
            samples = tuple(
                (s.name, dict(s.labels), float(s.value)) for s in family.samples if not s.name.endswith("_created")
            )
            if samples:
                out.append((family.name, family.type, family.documentation, samples))
        return tuple(out)


class Merged(Collector):
    """Families of many processes as one: equal names come together, whatever process they are from.

    Args:
        stats: the last Stats of each living process, asked at every scrape.
    """

    def __init__(self, stats: Callable[[], Iterable[Stats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for stats in self._stats():
            for name, kind, documentation, samples in stats.families:
                family = families.setdefault(name, Metric(name, documentation, kind))
                for sample, labels, value in samples:
                    family.add_sample(sample, labels, value)
        yield from families.values()


def exposition(stats: Iterable[Stats]) -> bytes:
    """Prometheus text of all processes together."""
    registry = CollectorRegistry(auto_describe=False)
    kept = list(stats)
    registry.register(Merged(lambda: kept))
    return generate_latest(registry)
