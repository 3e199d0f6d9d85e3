"""`python -m shared.kernels.cpu` builds the native kernels now, instead of at the first start of a node."""

from __future__ import annotations

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import load_library
from shared.kernels.cpu.pages import NativePageMover


def main() -> None:
    """Print the path of each library, or why there is none. Both exit with 0, since torch works instead."""
    try:
        print(f"native CPU kernels: {load_library()._name}")
    except NativeUnavailable as reason:
        print(f"no native CPU kernels, torch computes: {reason}")
    try:
        NativePageMover()
    except NativeUnavailable as reason:
        print(f"no native page mover, torch copies: {reason}")


if __name__ == "__main__":
    main()
