"""Llamas with random weights for the comparisons with PyTorch: their shapes, and the folder that `llm_finetune` reads.

`speed.py` and `profiles.py` take them from here for a GPU, and `../vs_torch.py` for a CPU. PyTorch's side is
`../torch_llama.py`. Both sides print one JSON object with `num_params`, `losses` and `step_seconds`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Steps that allocate the optimizer's state, and on a GPU compile kernels. They are not counted.
WARM_UP = 2
# Standard deviation of new matrices, in transformers and here.
INIT_STD = 0.02
# Difference of the first loss from the expected one. The mean over a batch differs by about 0.02.
LOSS_TOLERANCE = 0.2


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. The names are those of the flags of `torch_llama.py`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool

    def parameters(self) -> int:
        """Number of parameters. A tied embedding counts once."""
        keys = self.hidden // self.heads * self.kv_heads
        matrices = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.inner
        norms = (2 * self.layers + 1) * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * matrices + norms + embeddings

    def first_loss(self) -> float:
        """Expected loss before the first step, in nats.

        The last norm's output has a mean square of 1, so logits have a variance of hidden * INIT_STD^2.
        """
        return math.log(self.vocabulary) + self.hidden * INIT_STD**2 / 2

    def config(self, length: int) -> dict[str, Any]:
        """`config.json` for rows of at most `length` words."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": length,
            "hidden_act": "silu",
            "initializer_range": INIT_STD,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
        }


# Shapes of SmolLM2-135M and of TinyLlama-1.1B.
LLAMA_135M = Shape(hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocabulary=49152, tied=True)
LLAMA_1_1B = Shape(hidden=2048, layers=22, heads=32, kv_heads=4, inner=5632, vocabulary=32000, tied=False)


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """`tokenizer.json`: the words are the decimal numbers below `vocabulary`, and each is its own id."""
    words = {str(number): number for number in range(vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    }


def write_folder(folder: Path, shape: Shape, length: int, rows: int) -> None:
    """Writes the model's folder, without weights, and `rows.jsonl`: rows of `length` random words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(length)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(shape.vocabulary)))
    draw = random.Random(1)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            words = (str(draw.randrange(shape.vocabulary)) for _ in range(length))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def our_flags(folder: Path, shape: Shape, length: int, rows: int, steps: int) -> list[str]:
    """Writes the folder of a model. Returns the flags of `llm_finetune` for `steps` steps of `rows` rows each."""
    write_folder(folder, shape, length, rows * steps)
    flags = ["--model", str(folder), "--data", str(folder / "rows.jsonl"), "--eval-fraction", "0", "--no-shuffle"]
    flags += ["--token-cache", "none", "--max-length", str(length), "--batch-size", str(rows), "--steps", str(steps)]
    flags += ["--learning-rate", "1e-4", "--lr-scheduler", "constant", "--warmup", "0", "--weight-decay", "0.1"]
    return flags + ["--world-size", "1", "--engine", "local", "--json", "--quiet"]


def torch_flags(shape: Shape, length: int, rows: int, steps: int) -> list[str]:
    """The flags of `torch_llama.py` for the same steps."""
    sizes = {
        "--hidden": shape.hidden,
        "--layers": shape.layers,
        "--heads": shape.heads,
        "--kv-heads": shape.kv_heads,
        "--inner": shape.inner,
        "--vocabulary": shape.vocabulary,
        "--length": length,
        "--rows": rows,
        "--steps": steps,
    }
    flags = [text for name, size in sizes.items() for text in (name, str(size))]
    return flags + (["--tied"] if shape.tied else [])


def step_seconds(run: dict[str, Any] | None) -> float | None:
    """The median step of a run's result, without those of the warm-up."""
    seconds = (run or {}).get("step_seconds", [])[WARM_UP:]
    return statistics.median(seconds) if seconds else None


def first_loss_fits(shape: Shape, run: dict[str, Any]) -> bool:
    """Whether the first loss is that of a model with random weights."""
    return abs(run["losses"][0] - shape.first_loss()) <= LOSS_TOLERANCE
