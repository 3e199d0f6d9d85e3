"""Checks that every page has exactly one owner. A node runs the audit when it becomes idle, and tests run it too."""

from __future__ import annotations

from collections import Counter

from shared.errors import BatonError
from shared.kvcache.ledger import KVLedger


class LeakError(BatonError):
    """A page has no owner or two owners, or a count is wrong. This is always a bug in Baton."""


def audit(ledger: KVLedger) -> None:
    """Check free + evictable + protected + held == total, page by page. Raises LeakError.

    The audit visits every page. SGLang's check_memory compares counts only.
    """
    owners: Counter[int] = Counter(ledger.allocator.free_pages())
    owners.update(ledger.radix_cache.pages())
    for kv in ledger.live.values():
        owners.update(ledger.rows.read(kv.row, kv.num_tree_pages, kv.num_pages))
        owners.update(kv.superseded)
    doubled = sorted(page for page, count in owners.items() if count > 1)
    missing = sorted(set(range(1, ledger.allocator.num_pages + 1)) - set(owners))
    stray = sorted(set(owners) - set(range(1, ledger.allocator.num_pages + 1)))
    count = ledger.count()
    if doubled or missing or stray:
        raise LeakError(f"pages with two owners {doubled}, with none {missing}, unknown {stray}; {count}")
    if count.free + count.evictable + count.protected + count.held != count.total:
        raise LeakError(f"page counts do not add up: {count}")
    if ledger.radix_cache.count_locked_pages() != count.protected:
        raise LeakError(f"protected pages are miscounted: {count}")
    if ledger.rows.num_free + len(ledger.live) != ledger.rows.num_rows:
        raise LeakError(
            f"{ledger.rows.num_free} free rows, {len(ledger.live)} live, {ledger.rows.num_rows} in all"
        )
    _audit_windows(ledger)
    host = ledger.host
    if len(set(host.free_pages())) != host.num_free or host.num_free + host.num_held != host.num_pages:
        raise LeakError(f"{host.num_free} host pages free, {host.num_held} held, {host.num_pages} in all")


def _audit_windows(ledger: KVLedger) -> None:
    """Check the window pages, and that every request has those of its window. Raises LeakError."""
    windows = ledger.windows
    if windows is None:
        return
    wrong = windows.audit(set(ledger.allocator.free_pages()), set(ledger.radix_cache.pages()))
    count = ledger.count_windows()
    if wrong is None and count.free + count.evictable + count.protected + count.held != count.total:
        wrong = "window page counts do not add up"
    seen: Counter[int] = Counter()
    for kv in ledger.live.values():
        if not windows.of_page[ledger.rows.read(kv.row, kv.window_from, kv.num_pages)].all():
            wrong = f"row {kv.row} lacks a window page from page {kv.window_from} on"
        seen.update(ledger.rows.read(kv.row, kv.window_from, kv.num_tree_pages))
    if wrong is None and any(windows.num_readers(page) < readers for page, readers in seen.items()):
        wrong = "a window page has fewer readers than requests that see it"
    if wrong is not None:
        raise LeakError(f"{wrong}; window pages {count}")


def audit_idle(ledger: KVLedger) -> None:
    """Audit a node without requests, where no page may be held or protected. Raises LeakError."""
    audit(ledger)
    count = ledger.count()
    if ledger.live or count.held or count.protected or ledger.count_windows().protected:
        raise LeakError(f"idle, but {len(ledger.live)} requests hold KV; {count}")
    if ledger.host.num_held:
        raise LeakError(f"idle, but {ledger.host.num_held} host pages are held")
