"""The reader of each layout."""

from __future__ import annotations

from shared.model.formats.awq import AWQ
from shared.model.formats.common import Format
from shared.model.formats.fp8 import FP8
from shared.model.formats.gptq import GPTQ
from shared.model.formats.int_quantized import INT_QUANTIZED
from shared.model.formats.mxfp4 import MXFP4
from shared.model.formats.on_load import ON_LOAD
from shared.model.formats.pack_quantized import PACK_QUANTIZED
from shared.model.quantization import Layout

FORMATS: dict[Layout, Format] = {
    Layout.ON_LOAD: ON_LOAD,
    Layout.INT_QUANTIZED: INT_QUANTIZED,
    Layout.PACK_QUANTIZED: PACK_QUANTIZED,
    Layout.FLOAT_QUANTIZED: FP8,
    Layout.FP8_BLOCKS: FP8,
    Layout.FP8_TENSOR: FP8,
    Layout.AWQ: AWQ,
    Layout.GPTQ: GPTQ,
    Layout.GPTQ_V2: GPTQ,
    Layout.MXFP4: MXFP4,
}
