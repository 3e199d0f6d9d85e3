"""What follows from options, checkpoint and machine: device, type, lengths and sizes. Nothing is allocated here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from shared.config import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, ModelOptions, NodeConfig, ScheduleOptions
from shared.errors import ConfigError
from shared.model.config import ModelConfig
from shared.model.quantization import of_dummy_weights, quantize_on_load

HOST_KV_CAP_BYTES = 4 << 30
"""Largest host pool for retracted requests that is chosen by itself."""
FINGERPRINT_BLOCKS = 256
FINGERPRINT_BLOCK_NBYTES = 1 << 12


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU if torch sees one. A GPU always has its index. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: not a device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU here")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= (num_gpus := torch.cuda.device_count()):
            raise ConfigError(f"--device {name}: torch sees {num_gpus} GPUs here, and counts them from 0")
    return device


def resolve_dtype(options: ModelOptions, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's type; float16 becomes bfloat16 on a CPU, whose kernels prefer it."""
    name = model.dtype if options.dtype == "auto" else options.dtype
    if options.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has FP8 (e4m3)."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def resolve_quantization(
    options: ModelOptions, model: ModelConfig, *, keeps_float: bool = False
) -> ModelConfig:
    """The model, quantized as the flags say. Raises ConfigError where they do not fit its checkpoint.

    With `keeps_float` weights of FP8 stay so, on a device that `has_fp8`.
    """
    quantization = model.quantization
    if options.quantization is not None:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {options.quantization}: the model is quantized already ({quantization.name})"
            )
        quantization = quantize_on_load(options.quantization)
    if options.weight_only_quantization:
        as_shipped = quantization
        quantization = None if quantization is None else quantization.weight_only()
        if quantization == as_shipped:
            of = "not quantized" if as_shipped is None else as_shipped.name
            raise ConfigError(
                f"--weight-only-quantization: for weights of 4 or 8 bits without activations of 8, the model is {of}"
            )
    if keeps_float and quantization is not None:
        quantization = quantization.kept_float()
    if options.load_format == "dummy" and quantization is not None and options.quantization is None:
        quantization = of_dummy_weights(quantization, is_tied=model.tie_word_embeddings)
    return replace(model, quantization=quantization)


def resolve_schedule(options: ScheduleOptions, device: torch.device) -> ScheduleOptions:
    """Give a chunk the size that suits the device, unless the options have one."""
    by_itself = GPU_CHUNK_TOKENS if device.type == "cuda" else CPU_CHUNK_TOKENS
    return replace(options, chunked_prefill_size=options.chunked_prefill_size or by_itself)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def resolve_context_length(options: ModelOptions, model: ModelConfig) -> int:
    """The model's own, or a shorter one. Raises ConfigError for a longer one."""
    if options.context_length is None:
        return model.max_position_embeddings
    if options.context_length > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length {options.context_length}: the model was made for at most "
            f"{model.max_position_embeddings}"
        )
    return options.context_length


def resolve_num_host_pages(config: NodeConfig, num_pages: int, page_nbytes: int, device: torch.device) -> int:
    """Pages of the host pool: from --host-kv-tokens, or as many as the KV pool has, within a cap.

    On a CPU the KV pool is in host memory already, and a larger one serves better than a second one: there it is
    none by itself. Raises ConfigError when --retract-policy host is left without a page.
    """
    policy, tokens = config.schedule.retract_policy, config.cache.host_kv_tokens
    if policy == "recompute":
        if tokens:
            raise ConfigError(
                f"--host-kv-tokens {tokens}: --retract-policy recompute copies nothing to the host"
            )
        return 0
    if tokens is None:
        by_itself = device.type == "cuda" or policy == "host"
        return min(num_pages, max(HOST_KV_CAP_BYTES // page_nbytes, 1)) if by_itself else 0
    if policy == "host" and tokens < config.cache.page_size:
        raise ConfigError(
            f"--host-kv-tokens {tokens}: --retract-policy host needs at least one page of "
            f"{config.cache.page_size} tokens (--page-size)"
        )
    return tokens // config.cache.page_size


def fingerprint(folder: Path, dummy_seed: int | None = None) -> str:
    """A digest that tells checkpoints apart without reading them whole.

    With a `dummy_seed` the weights follow from the config and the seed, so the digest covers these.

    It covers the config, and of each file its size, the header with the names and shapes of tensors, and blocks that
    are spread evenly from the first byte to the last. So it sees every tensor that is larger than 1/255 of its file.
    """
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    if dummy_seed is not None:
        digest.update(f"dummy:{dummy_seed}".encode())
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            header_nbytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_nbytes, size)))
            last = max(size - FINGERPRINT_BLOCK_NBYTES, 0)
            for block in range(FINGERPRINT_BLOCKS):
                file.seek(last * block // (FINGERPRINT_BLOCKS - 1))
                digest.update(file.read(FINGERPRINT_BLOCK_NBYTES))
    return digest.hexdigest()
