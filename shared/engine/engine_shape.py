"""What decides how much memory an engine takes, known from options and config.json before anything is allocated."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from shared.config import CacheOptions, NodeConfig, ScheduleOptions
from shared.engine.input_block import ForwardLimits
from shared.engine.resolve import (
    dtype_name,
    has_fp8,
    resolve_context_length,
    resolve_device,
    resolve_dtype,
    resolve_quantization,
    resolve_schedule,
)
from shared.errors import ConfigError
from shared.kvtransfer.transports.choice import links_nbytes
from shared.model.config import ModelConfig
from shared.model.weights import weights_nbytes
from shared.protocol.messages import kv_row_nbytes

MIN_PAGES = 2


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The sizes of a model, of its KV pages and of its largest forward."""

    name: str
    """The model as it was given to --model."""
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    cache: CacheOptions
    schedule: ScheduleOptions
    context_length: int
    decodes: bool
    """False for a prefill node whose role is fixed: it runs no decode step."""
    links_nbytes: int = 0
    """Device memory that is left free for links."""

    @classmethod
    def of(cls, config: NodeConfig, model: ModelConfig, decodes: bool) -> EngineShape:
        """The sizes that follow from a node's options. Raises ConfigError."""
        device = resolve_device(config.model.device)
        by_triton = device.type == "cuda" and config.model.attention_backend != "torch"
        keeps_float = by_triton and has_fp8(device)
        model = resolve_quantization(config.model, model, keeps_float=keeps_float)
        multiple, kv_cache_dtype = 16 if by_triton else 4, config.cache.kv_cache_dtype
        if kv_cache_dtype == "fp8" and not keeps_float:
            raise ConfigError(
                "--kv-cache-dtype fp8 needs Triton on a GPU of compute capability 8.9 or newer; "
                "int8 takes as few bytes and needs neither"
            )
        if kv_cache_dtype != "auto" and model.head_dim % multiple:
            raise ConfigError(
                f"--kv-cache-dtype {kv_cache_dtype}: heads of {model.head_dim} elements are no multiple of {multiple}"
            )
        context_length = resolve_context_length(config.model, model)
        return cls(
            name=config.model.model,
            model=model.made_for(context_length),
            dtype=resolve_dtype(config.model, model, device),
            device=device,
            cache=config.cache,
            schedule=resolve_schedule(config.schedule, device),
            context_length=context_length,
            decodes=decodes,
            links_nbytes=links_nbytes(config.transfer, device),
        )

    @property
    def weights_nbytes(self) -> int:
        """Of all weights, in the type of the engine where they are not quantized."""
        return weights_nbytes(self.model, self.dtype)

    @property
    def page_nbytes(self) -> int:
        """Of one KV page of all layers, K and V."""
        m = self.model
        row_nbytes = kv_row_nbytes(m.head_dim, dtype_name(self.kv_dtype))
        return 2 * m.num_layers * m.num_kv_heads * self.cache.page_size * row_nbytes

    @property
    def window(self) -> int | None:
        """The longest window of layers, whose KV has a pool of its own. None: no layer has one."""
        return self.model.longest_window

    def num_window_pages(self, num_pages: int) -> int:
        """How many window pages a pool of `num_pages` pages has, without the scratch pages (ADR 49).

        They suffice for one prompt of the longest context, and for the windows of as many requests of a quarter of
        that as the pages hold. 0 where no layer has a window.
        """
        if self.window is None:
            return 0
        page_size = self.cache.page_size
        prompt_pages = -(-self.context_length // page_size)
        num_requests = min(-(-num_pages // max(prompt_pages // 4, 1)), self.num_rows)
        return min(num_pages, prompt_pages + num_requests * (-(-self.window // page_size) + 2))

    def kv_nbytes(self, num_pages: int) -> int:
        """Of a pool of so many pages, the scratch pages not counted."""
        windows = self.model.windows
        num_windows = 0 if self.window is None else len(windows) - windows.count(None)
        num_units = num_pages * (len(windows) - num_windows) + self.num_window_pages(num_pages) * num_windows
        return self.page_nbytes // len(windows) * num_units

    def pool_nbytes(self, num_pages: int) -> int:
        """Of a pool of so many pages, with the scratch pages."""
        return self.kv_nbytes(num_pages) + self.page_nbytes

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of KV pages."""
        of_codes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
        return of_codes.get(self.cache.kv_cache_dtype, self.dtype)

    @property
    def num_rows(self) -> int:
        """Most sequences of a forward."""
        return self.schedule.max_running_requests

    @property
    def max_extend_tokens(self) -> int:
        """Most prompt tokens of a forward."""
        return min(self.schedule.chunk_tokens, self.schedule.max_prefill_tokens)

    @property
    def forward_limits(self) -> ForwardLimits:
        """Of every forward that is planned."""
        return ForwardLimits(
            num_rows=self.num_rows,
            context_length=self.context_length,
            max_tokens=self.max_extend_tokens + self.num_rows,
        )

    def useful_pages(self, budget_nbytes: int) -> int:
        """How many pages fit into a budget, and no more than all requests together can use, but two if they fit."""
        most = max(-(-self.num_rows * self.context_length // self.cache.page_size), MIN_PAGES)
        return bisect_right(range(1, most + 1), budget_nbytes, key=self.kv_nbytes)

    def given_pages(self, total_nbytes: int) -> int | None:
        """Pages of --max-total-tokens; None without it. Raises ConfigError for less than two or more than fit."""
        tokens, page_size = self.cache.max_total_tokens, self.cache.page_size
        if tokens is None:
            return None
        num_pages = tokens // page_size
        if num_pages < MIN_PAGES:
            raise ConfigError(
                f"--max-total-tokens {tokens}: at least two pages of {page_size} tokens are needed (--page-size)"
            )
        if self.kv_nbytes(num_pages) > total_nbytes:
            raise ConfigError(
                f"--max-total-tokens {tokens}: {self.kv_nbytes(num_pages)} bytes of KV do not fit into the memory "
                f"of {self.device}, which has {total_nbytes}; choose fewer"
            )
        return num_pages


def gib(nbytes: int) -> str:
    """Bytes as a text in GiB."""
    return f"{nbytes / 2**30:.2f} GiB"
