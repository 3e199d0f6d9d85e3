"""What the matrix counts of a process."""

from __future__ import annotations

from tests.fault.matrix.resources import count_files


def test_files_of_the_gpus_driver_are_not_counted() -> None:
    names = ["socket:[12]", "socket:[7]", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/shm/a"]
    assert count_files(names) == {"socket": 2, "/dev/shm/a": 1}
