"""A worker with two landing transports: posts and chunks go over the one that their pair uses."""

from __future__ import annotations

from transport_peers import KEY, new_arena, units_for, worker_name

from tailrace.kv_cache.arena import Arena
from tailrace.model.errors import PeerError
from tailrace.transfer.messages import LandingGrant, Notice
from tailrace.transfer.page_list import PageList
from tailrace.transfer.transports.base import PostJob
from tailrace.transfer.transports.in_process import Exchange, InProcessTransport
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.ways import Ways


class Landing(InProcessTransport):
    """Grants and takes notices, and writes down what it is asked."""

    def __init__(self, name: str, arena: Arena) -> None:
        super().__init__(Exchange(), name, Mapped((arena.pages,), arena.generations))
        self.name, self.units_per_grant = name, 4
        self.asked: list[object] = []

    def post(self, job: PostJob) -> None:
        self.asked.append(job)

    def drop_landed(self, boot: str, landed: object) -> None:
        self.asked.append(landed)

    def noticed(self, boot: str, data: bytes) -> None:
        if data == b"bad":
            raise PeerError("nothing of ours")
        self.asked.append((boot, data))


def test_posts_chunks_and_notices_go_where_their_pair_is():
    arena = new_arena(worker_name("ways"), "b0", 64, 8)
    one, two = Landing("one", arena), Landing("two", arena)
    stale: list[int] = []
    news: list[int] = []
    ways = Ways((one, two), lambda: stale.append(1), lambda: news.append(1))
    job = PostJob(1, KEY, "gen", PageList.of([d for d, _ in units_for([1], [1], [1])]), LandingGrant(0, 1, 64, 1))
    ways.post(job)
    assert one.asked == [job], "any of them can say that there is no pair"
    ways.gen_chose("gen", ("one",))
    ways.gen_chose("gen", ("two",))  # the probe over one failed
    ways.post(job)
    assert two.asked == [job]
    ways.lands("ctx", two)
    ways.drop_landed("ctx", "a chunk")
    assert two.asked[-1] == "a chunk"
    ways.noticed("gen", Notice("two", True, b"x"))
    assert two.asked[-1] == ("gen", b"x") and news and not stale
    ways.noticed("gen", Notice("two", True, b"bad"))
    ways.noticed("gen", Notice("three", True, b"x"))
    assert len(stale) == 2
    ways.dead(("gen", "ctx"))
    ways.post(job)
    assert one.asked[-1] == job
    arena.unlink()
