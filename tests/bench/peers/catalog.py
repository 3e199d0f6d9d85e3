"""The engines: Baton in two shapes, and its peers, what each is installed from and how its runner is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.venvs import InstallError, Venv, ready_venv

FOLDER = Path(__file__).parent
RUNNERS = FOLDER / "runners"
CACHE = Path(__file__).resolve().parents[3] / ".peers"
BATONS = {"baton-0P1D": "0P1D", "baton-1P1D": "1P1D"}
"""Baton as one node on all cores, and split: `router --local` of each."""
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""What PyPI has of these is for torch with CUDA; engines import them where they are installed, and fail."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OPENVINO_TELEMETRY": "0",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`program` names its requirements, its runner and its venv."""

    program: str
    formats: Mapping[str, str] = field(default_factory=dict)
    """Of those that read converted models: what it has for bf16, int8, int4 and mxfp4."""
    sources: tuple[str, ...] = ()
    """Packages that are built here, for this CPU."""

    @property
    def venv(self) -> Venv:
        """All bring torch, if only to convert a model."""
        return Venv(
            name=self.program,
            requirements=FOLDER / "requirements" / f"{self.program}.txt",
            torch=True,
            without_dependencies=self.sources,
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"} if self.sources else {},
            unwanted=CUDA_BUILDS,
        )

    @property
    def runner(self) -> Path:
        """The script that its venv's Python runs."""
        return RUNNERS / f"run_{self.program}.py"


LLAMACPP = ("llama-cpp-python==0.3.36",)
"""The bindings bring the sources of llama.cpp."""
PEERS = {
    "vllm": Peer(program="vllm"),
    "openvino": Peer(program="openvino", formats={name: name for name in ("bf16", "int8", "int4", "mxfp4")}),
    "llamacpp": Peer(
        program="llamacpp",
        formats={"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "mxfp4": "MXFP4_MOE"},
        sources=LLAMACPP,
    ),
    "llamacpp-k": Peer(program="llamacpp", formats={"int4": "Q4_K_M"}, sources=LLAMACPP),
    "transformers": Peer(program="transformers"),
}


@dataclass(frozen=True)
class Installed:
    """A peer whose venv is there."""

    peer: Peer
    python: Path

    def command(self, model: Path, threads: int, kv_tokens: int, weights: str) -> list[str]:
        """Of its runner."""
        words = (self.python, self.peer.runner, model, threads, kv_tokens, weights)
        return [str(word) for word in words]

    def environment(self) -> Mapping[str, str]:
        """Of its runner."""
        preloaded = _preloads(self.python.parents[1]) if self.peer.program == "vllm" else []
        return {**os.environ, **OFFLINE, **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {})}

    def converted(self, folder: Path, weights: str) -> Path:
        """A model as the engine reads it, written once. Raises InstallError where it has no such format."""
        name = self.peer.formats.get(weights)
        if name is None:
            raise InstallError(f"it has no format for {weights}")
        converted = CACHE / f"{self.peer.program}-models" / f"{folder.name}-{name}"
        if not (converted / "written").exists():
            converted.mkdir(parents=True, exist_ok=True)
            exporter = RUNNERS / f"export_{self.peer.program}.py"
            done = subprocess.run(
                (self.python, exporter, folder, converted, name),
                env=self.environment(),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if done.returncode:
                raise InstallError(f"does not convert the model: {done.stdout.strip()[-500:]}")
            (converted / "written").touch()
        return converted


def installed(name: str) -> Installed:
    """The peer, installed if it is not. Raises InstallError."""
    peer = PEERS[name]
    python = ready_venv(peer.venv, CACHE)
    if peer.program == "vllm":
        _fetch_tcmalloc(python.parents[1])
    return Installed(peer, python)


def _preloads(venv: Path) -> list[str]:
    """The OpenMP and malloc that vLLM's documentation asks for on CPUs, as far as they are there."""
    found = [*venv.glob("lib/libiomp5.so"), *venv.glob("tcmalloc/**/libtcmalloc_minimal.so.4")]
    return [str(path) for path in found]


def _fetch_tcmalloc(venv: Path) -> None:
    """Debian's package, unpacked into the venv; elsewhere vLLM runs with the C library's malloc."""
    folder = venv / "tcmalloc"
    if folder.exists():
        return
    folder.mkdir()
    try:
        download = ("apt-get", "download", "libtcmalloc-minimal4")
        subprocess.run(download, cwd=folder, check=True, capture_output=True, timeout=60)
        for package in folder.glob("*.deb"):
            subprocess.run(("dpkg", "-x", package, folder), check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"vllm runs without tcmalloc: {error}", flush=True)
