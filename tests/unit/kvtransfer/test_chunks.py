from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.errors import ConfigError, PeerMismatch
from shared.kvtransfer.queues import record_digest
from shared.kvtransfer.receiver import check_layout
from shared.kvtransfer.staging import ChunkPlan
from shared.protocol.messages import KVLayout

OURS = KVLayout("f00d", "bfloat16", 16, 24, 2, 128, "native-1/amx/bfloat16")


def test_equal_layouts_pass() -> None:
    same = KVLayout("f00d", "bfloat16", 16, 24, 2, 128, "native-1/amx/bfloat16")
    check_layout(OURS, same, allow_mixed_numerics=False)


def test_mixed_numerics_may_be_allowed() -> None:
    check_layout(OURS, replace(OURS, numerics="torch-2.13/AVX512/bfloat16"), allow_mixed_numerics=True)


@pytest.mark.parametrize("field", KVLayout.__struct_fields__)
def test_a_mismatch_names_the_field(field: str) -> None:
    values = {name: getattr(OURS, name) for name in KVLayout.__struct_fields__}
    values[field] = "other" if isinstance(values[field], str) else 4711
    with pytest.raises(PeerMismatch, match=f"differ in {field}: "):
        check_layout(OURS, KVLayout(**values), allow_mixed_numerics=field != "numerics")


@given(
    num_layers=st.integers(1, 40),
    unit_nbytes=st.integers(1, 300),
    slot_units=st.integers(1, 200),
    slack=st.integers(0, 299),
    first_page=st.integers(0, 50),
    num_pages=st.integers(0, 60),
)
def test_chunks_cover_each_page_of_each_layer_once_and_fit(
    num_layers: int, unit_nbytes: int, slot_units: int, slack: int, first_page: int, num_pages: int
) -> None:
    slot_nbytes = slot_units * unit_nbytes + min(slack, unit_nbytes - 1)
    plan = ChunkPlan.fit(num_layers=num_layers, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes)
    chunks = list(plan.cut(first_page, num_pages))
    covered = [
        (page, layer)
        for c in chunks
        for page in range(c.first_page, c.first_page + c.num_pages)
        for layer in range(c.first_layer, c.first_layer + c.num_layers)
    ]
    pages = range(first_page, first_page + num_pages)
    assert sorted(covered) == [(page, layer) for page in pages for layer in range(num_layers)]
    assert all(0 < c.units * unit_nbytes <= slot_nbytes for c in chunks)
    assert sum(c.units for c in chunks) == num_pages * num_layers


def test_slots_are_filled_well() -> None:
    # 24 layers of 32 kB a page: a slot of 4 MB holds 5 pages; a page of 80 layers of 64 kB exceeds it.
    assert ChunkPlan.fit(num_layers=24, unit_nbytes=32 << 10, slot_nbytes=4 << 20) == ChunkPlan(24, 24, 5)
    assert ChunkPlan.fit(num_layers=80, unit_nbytes=64 << 10, slot_nbytes=4 << 20) == ChunkPlan(80, 40, 1)


def test_a_slot_that_holds_not_even_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="100 bytes"):
        ChunkPlan.fit(num_layers=2, unit_nbytes=100, slot_nbytes=99)


def test_the_digest_tells_records_apart() -> None:
    records = [
        ((1, 2, 3), (4,), (5,), 4),
        ((1, 2), (3, 4), (5,), 4),
        ((1, 2, 3), (), (4, 5), 4),
        ((1, 2, 3, 4), (), (5,), 4),
        ((1, 2, 3), (4,), (5,), 5),
        ((1, 2, 3), (4,), (6,), 4),
    ]
    assert len({record_digest(*record) for record in records}) == len(records)
    assert record_digest([1, 2, 3], [4], [5], 4) == record_digest(*records[0])
    assert 0 <= record_digest(*records[0]) < 2**64
