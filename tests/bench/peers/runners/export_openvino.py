"""Write a model as OpenVINO IR, weights in bfloat16 as they are. argv: MODEL IR."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export

if __name__ == "__main__":
    main_export(
        sys.argv[1], sys.argv[2], task="text-generation-with-past", library_name="transformers", stateful=True
    )
