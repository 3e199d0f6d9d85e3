"""What the kill matrix counts as open files of a process."""

from __future__ import annotations

from tests.fault.matrix.resources import count_files


def test_what_the_driver_of_a_gpu_opens_is_not_counted() -> None:
    driver = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidia0"]
    links = ["socket:[17]", "socket:[18]", "pipe:[19]", "/memfd:baton-kv-slot (deleted)"]
    assert count_files([*driver, *links]) == {"socket": 2, "pipe": 1, "/memfd:baton-kv-slot (deleted)": 1}
