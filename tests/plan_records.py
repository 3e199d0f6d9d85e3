"""A plan in ints and keys, which crosses as bytes, and the plan that is made of it again."""

from __future__ import annotations

from collections.abc import Mapping

from shared.kvcache.allocator import PageCopy
from shared.protocol.messages import Record, ReqKey
from shared.scheduling.plan import KVCopy, Plan, ScheduleBatch, ScheduledReq
from shared.scheduling.req import Req


class ItemRecord(Record, frozen=True):
    """A ScheduledReq by its key."""

    key: ReqKey
    generation: int
    start: int
    length: int
    position: int | None


class CopyRecord(Record, frozen=True):
    """A KVCopy by its key."""

    key: ReqKey
    num_retractions: int
    to_host: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    window_pages: tuple[int, ...]
    kv_len: int


class PlanRecord(Record, frozen=True):
    """A Plan in ints and keys; without `extends` and `decodes` it launches no forward."""

    extends: tuple[ItemRecord, ...]
    decodes: tuple[ItemRecord, ...]
    future_writes: tuple[tuple[int, int], ...]
    copies: tuple[CopyRecord, ...]
    unservable: tuple[ReqKey, ...]
    given_up: tuple[ReqKey, ...]
    move_wanted: tuple[ReqKey, ...]


def _item_record(item: ScheduledReq) -> ItemRecord:
    return ItemRecord(item.req.key, item.generation, item.start, item.length, item.position)


def _copy_record(copy: KVCopy) -> CopyRecord:
    pages = copy.pages
    ids = pages.device_pages, pages.host_pages, pages.window_pages
    return CopyRecord(copy.req.key, copy.num_retractions, pages.to_host, *ids, copy.kv_len)


def record_of(plan: Plan) -> PlanRecord:
    """The same plan, with the key of each request in its place."""
    batch = plan.batch or ScheduleBatch()
    return PlanRecord(
        tuple(map(_item_record, batch.extends)),
        tuple(map(_item_record, batch.decodes)),
        batch.future_writes,
        tuple(_copy_record(copy) for copy in plan.copies),
        plan.unservable,
        plan.given_up,
        plan.move_wanted,
    )


def plan_of(record: PlanRecord, reqs: Mapping[ReqKey, Req]) -> Plan:
    """The plan of `record`, for the requests that it names. Raises KeyError if one is not in `reqs`."""
    extends, decodes = (
        tuple(ScheduledReq(reqs[i.key], i.generation, i.start, i.length, i.position) for i in items)
        for items in (record.extends, record.decodes)
    )
    copies = tuple(
        KVCopy(
            reqs[c.key],
            c.num_retractions,
            PageCopy(c.to_host, c.device_pages, c.host_pages, c.window_pages),
            c.kv_len,
        )
        for c in record.copies
    )
    batch = ScheduleBatch(extends, decodes, record.future_writes) if extends or decodes else None
    return Plan(batch, copies, record.unservable, record.given_up, record.move_wanted)
