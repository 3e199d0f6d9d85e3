from __future__ import annotations

import pytest

from shared.kvcache.allocator import PageAllocator


def test_page_zero_is_never_handed_out() -> None:
    allocator = PageAllocator(5)
    assert allocator.num_pages == 4
    assert sorted(allocator.alloc(4) or []) == [1, 2, 3, 4]
    assert allocator.alloc(1) is None


def test_too_large_a_request_takes_nothing() -> None:
    allocator = PageAllocator(5)
    assert allocator.alloc(5) is None
    assert allocator.alloc_for_arrival(5) is None
    assert allocator.num_free == 4


def test_nothing_cools_while_nothing_runs() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(3)
    assert pages is not None
    allocator.free(pages)
    assert allocator.num_free_for_arrivals == allocator.num_free == 4


def test_a_page_freed_during_a_forward_cools_for_arrivals_only() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(4) or []
    allocator.forward_launched()
    allocator.free(pages[:2])
    assert (allocator.num_free, allocator.num_free_for_arrivals) == (2, 0)
    assert allocator.alloc_for_arrival(1) is None
    assert sorted(allocator.alloc(2) or []) == sorted(pages[:2])


def test_a_page_cools_until_every_forward_launched_before_it_was_freed_is_done() -> None:
    allocator = PageAllocator(9)
    pages = allocator.alloc(8) or []
    allocator.forward_launched()
    allocator.free([pages[0]])
    allocator.forward_launched()
    allocator.free([pages[1]])
    allocator.forward_launched()
    allocator.free([pages[2]])
    allocator.forward_retired()
    assert allocator.alloc_for_arrival(1) == [pages[0]]
    assert allocator.alloc_for_arrival(1) is None
    allocator.forward_retired()
    assert allocator.alloc_for_arrival(1) == [pages[1]]
    allocator.forward_retired()
    assert allocator.alloc_for_arrival(1) == [pages[2]]


def test_forwards_take_cooling_pages_first_and_leave_cool_ones_for_arrivals() -> None:
    allocator = PageAllocator(9)
    pages = allocator.alloc(4) or []
    allocator.forward_launched()
    allocator.free(pages[:2])
    assert set(allocator.alloc(3) or []) > set(pages[:2])
    assert allocator.num_free_for_arrivals == 3


def test_a_page_taken_while_it_cooled_is_not_given_out_again_when_the_forward_retires() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3) or []
    allocator.forward_launched()
    allocator.free(pages)
    again = allocator.alloc(2) or []
    allocator.forward_retired()
    assert allocator.num_free == allocator.num_free_for_arrivals == 1
    assert sorted(again + allocator.free_pages()) == [1, 2, 3]


def test_free_pages_lists_cool_and_cooling_ones() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(2) or []
    allocator.forward_launched()
    allocator.free(pages)
    assert sorted(allocator.free_pages()) == [1, 2, 3, 4]


def test_a_forward_cannot_retire_before_it_is_launched() -> None:
    with pytest.raises(AssertionError):
        PageAllocator(3).forward_retired()
