"""The analysis of a pretrained model: time, CPU time and peak, beside its plan.

``python -m benchmarks.analysis smollm2`` analyzes SmolLM2-135M whole; ``1b`` a random model of
Llama's layout with 1.2 billion parameters, whose factors stay on the disk and of which one layer is
decomposed; ``eighth`` the same at half of the width and depth. Each prints a line for
`benchmarks/results/analysis.md`: peaks beside what was planned. With ``--plan`` the plan alone.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxkfac.memory import bytes_text

_LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "eos_token_id": 0}
SHAPES = {
    "1b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    },
    "eighth": _LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
}
_ONE_LAYER = [
    *("--texts", "4", "--max-length", "32", "--batch-size", "4", "--lanczos", "0"),
    # On a CPU, which has no arithmetic of bfloat16, XLA keeps the weights in float32 as well.
    *("--dtype", "float32", "--keep-factors"),
    *("--decompose", r"model/layers/mlp/down_proj/kernel\[0\]"),
]
WORDS = {
    "smollm2": ["--device-bytes", "6GB"],
    "1b": [*_ONE_LAYER, "--device-bytes", "14GB"],
    "eighth": [*_ONE_LAYER, "--device-bytes", "3GB"],
}


def write_model(folder: Path, config: dict) -> None:
    """A folder with random bfloat16 weights, written one tensor after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    symbols = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    header, end = {}, 0
    shapes = dict(_tensors(config))
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    rng = np.random.Generator(np.random.Philox(0))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                value = np.ones(shape, np.float32)
            else:
                value = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            file.write(value.astype(ml_dtypes.bfloat16).tobytes())


def _tensors(config: dict):
    width, hidden = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for block in range(config["num_hidden_layers"]):
        name = f"model.layers.{block}"
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        for part, rows in (("q", width), ("k", keys), ("v", keys), ("o", width)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, width)
        yield f"{name}.mlp.gate_proj.weight", (hidden, width)
        yield f"{name}.mlp.up_proj.weight", (hidden, width)
        yield f"{name}.mlp.down_proj.weight", (width, hidden)
    yield "model.norm.weight", (width,)


def measure(name: str, folder: Path, *, plan: bool = False) -> str:
    """Run the command in a process of its own; a line of the record, or of the plan its time."""
    model, output = name, folder / "analysis"
    if name in SHAPES:
        model = str(folder / name)
        write_model(folder / name, SHAPES[name])
    words = ["analyze", model, *WORDS[name], "--output", str(output), *["--plan"] * plan]
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "jaxkfac", *words], check=True)
    wall, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    if plan:
        return f"{name}: planned in {cpu:.0f} s of CPU time, {wall:.0f} s"
    record = json.loads((output / "metrics.json").read_text())
    return line_of(name, record, cpu=cpu, wall=wall)


def line_of(name: str, record: dict, *, cpu: float, wall: float) -> str:
    """A line of the record's table."""
    sums: dict[str, int] = {}
    for stage in ("gather", "Lanczos", "decompose"):
        rows = [x for x in record["plan"] if stage in x["stage"]]
        always = [x for x in record["plan"] if x["stage"] == "always"]
        sums[stage] = sum(x["nbytes"] for x in (*rows, *always)) if rows else 0
    each = "; ".join(
        f"{stage} {bytes_text(record['peaks'][stage])} of {bytes_text(planned)}, "
        f"{record['peaks'][stage] / planned:.0%}"
        for stage, planned in sums.items()
        if stage in record["peaks"] and planned
    )
    peak = bytes_text(record["host_memory"]["peak"])
    return (
        f"| {name} | {record['passes']} | {cpu:.0f} s | {wall:.0f} s | {peak} | {each} | "
        f"{bytes_text(record['disk'])} |"
    )


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORDS)
    parser.add_argument("--folder", type=Path, help="on a disk with room; by default a temporary")
    parser.add_argument("--plan", action="store_true", help="nothing is loaded or gathered")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(measure(arguments.name, Path(folder), plan=arguments.plan))


if __name__ == "__main__":
    main()
