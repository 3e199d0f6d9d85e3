"""NCCL itself is not needed here: what is asked of it is data."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from shared.config import TransferOptions
from shared.errors import ConfigError
from shared.kvtransfer.transports.choice import make_transports
from shared.kvtransfer.transports.nccl import NcclOp, configure, nccl_environment


class Config:
    blocking = -1
    min_ctas = -1
    max_ctas = -1


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = True
        self.config = Config()


def test_options_keep_transfers_small_and_impatient() -> None:
    options = Options()
    configure(options, TransferOptions(op_timeout_s=2.5, nccl_max_ctas=6))
    assert options._timeout == timedelta(seconds=2.5)
    assert not options.is_high_priority_stream
    assert (options.config.blocking, options.config.min_ctas, options.config.max_ctas) == (0, 1, 6)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this build of torch has no NCCL")
def test_torch_has_the_options_that_are_set() -> None:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    configure(options, TransferOptions())
    assert options.config.max_ctas == TransferOptions().nccl_max_ctas
    assert hasattr(ProcessGroupNCCL, "eager_connect_single_device")


def test_the_environment_keeps_the_process_alive() -> None:
    environment = nccl_environment(TransferOptions(build_timeout_s=12.4))
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "12",
    }


def test_backends_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="pages are on cpu"):
        make_transports(TransferOptions(backend="nccl"), torch.device("cpu"))
    with pytest.raises(ConfigError, match="unknown transfer backend 'nixl'"):
        make_transports(TransferOptions(backend="nixl"), torch.device("cpu"))


class Work:
    """A NCCL work: completion must be polled, and `wait` only orders streams."""

    def __init__(self, polls_needed: int, error: Exception | None = None) -> None:
        self.polls_needed = polls_needed
        self.error = error
        self.num_waits = 0

    def is_completed(self) -> bool:
        self.polls_needed -= 1
        return self.polls_needed < 0

    def exception(self) -> Exception | None:
        return self.error

    def wait(self) -> bool:
        self.num_waits += 1
        return True


def test_an_op_polls_until_it_is_complete() -> None:
    work = Work(polls_needed=3)
    op = NcclOp(work, torch.zeros(1), timeout_s=5)
    assert not op.wait(block=False)
    assert op.wait(block=True)
    assert work.num_waits == 1


def test_an_op_fails_by_its_timeout_or_by_its_error_and_stays_failed() -> None:
    from shared.errors import LinkError

    op = NcclOp(Work(polls_needed=10**9), torch.zeros(1), timeout_s=0.01)
    for _ in range(2):
        with pytest.raises(LinkError, match="timed out"):
            op.wait(block=True)
    op = NcclOp(Work(0, RuntimeError("remote died")), torch.zeros(1), timeout_s=5)
    with pytest.raises(LinkError, match="remote died"):
        op.wait(block=True)
