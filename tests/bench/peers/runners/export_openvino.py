"""Write a bfloat16 model as OpenVINO IR. argv: MODEL IR WEIGHTS.

WEIGHTS are bf16 as they are, int8 (a scale for each output, embeddings too) or int4 (groups of 128, some in int8).
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

QUANTIZATIONS = {"bf16": None, "int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 128, "sym": True}}

if __name__ == "__main__":
    quantization = QUANTIZATIONS[sys.argv[3]]
    main_export(
        sys.argv[1],
        sys.argv[2],
        task="text-generation-with-past",
        library_name="transformers",
        stateful=True,
        ov_config=None if quantization is None else OVConfig(quantization_config=quantization),
    )
