"""Write a model as OpenVINO IR. argv: MODEL IR WEIGHTS.

WEIGHTS are bf16 as they are, int8 (a scale for each output, embeddings too), int4 (groups of 128, embeddings and
lm_head in int8) or mxfp4 (of gpt-oss, as optimum-intel quantizes that: experts in int4 in groups of 32, all else in
int8).
"""

from __future__ import annotations

import sys
from pathlib import Path

import nncf
import openvino as ov
from nncf import CompressWeightsMode as Mode
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

NO_EXPERTS = nncf.IgnoredScope(patterns=[".*self_attn.*", ".*router.*"], validate=False)
QUANTIZATIONS = {
    "bf16": [],
    "int8": [{"mode": Mode.INT8_ASYM}],
    "int4": [{"mode": Mode.INT4_SYM, "group_size": 128}],
    "mxfp4": [
        {"mode": Mode.INT4_SYM, "group_size": 32, "ignored_scope": NO_EXPERTS},
        {"mode": Mode.INT8_ASYM},
    ],
}

if __name__ == "__main__":
    folder, quantizations = Path(sys.argv[2]), QUANTIZATIONS[sys.argv[3]]
    # With a config `main_export` leaves quantizing to its caller. Without one it makes large models int8.
    main_export(
        sys.argv[1],
        folder,
        task="text-generation-with-past",
        library_name="transformers",
        stateful=True,
        ov_config=OVConfig(),
    )
    if quantizations:
        dense, written = folder / "openvino_model.xml", folder / "quantized.xml"
        model = ov.Core().read_model(dense)
        for quantization in quantizations:
            model = nncf.compress_weights(model, **quantization)
        ov.save_model(model, written, compress_to_fp16=False)
        del model
        for suffix in (".xml", ".bin"):
            written.with_suffix(suffix).replace(dense.with_suffix(suffix))
