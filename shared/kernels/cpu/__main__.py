"""`python -m shared.kernels.cpu`: build the native kernels now, so that the first start of a node need not."""

from __future__ import annotations

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import load_library
from shared.kernels.cpu.pages import NativePageMover


def main() -> None:
    """Say where they are, or why there are none; torch computes then, so it is no failure."""
    try:
        print(f"native CPU kernels: {load_library()._name}")
    except NativeUnavailable as reason:
        print(f"no native CPU kernels, torch computes: {reason}")
    try:
        NativePageMover()
    except NativeUnavailable as reason:
        print(f"no native page mover, numpy copies: {reason}")


if __name__ == "__main__":
    main()
