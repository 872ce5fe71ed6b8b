"""Write ``config.json`` folders with the dimensions of public models, to benchmark without their weights.

``python benchmarks/model_shapes.py FOLDER`` writes all of them; name some to write only those.  Start servers on one
with ``--load-format dummy --skip-tokenizer-init``.  Speed doesn't depend on the weights' values; answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """A dense Qwen3 (8 KV heads of 128)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, tied=False),
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
}


def write(name: str, folder: Path) -> Path:
    """Write one model's folder inside ``folder``; returns it."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Write the folders and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; all when left out")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SHAPES]:
        parser.error(f"NAME: got {', '.join(unknown)}, accepts {', '.join(SHAPES)}")
    for name in options.names or SHAPES:
        print(write(name, options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
