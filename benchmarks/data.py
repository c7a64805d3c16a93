"""Reading records that do not fit in memory: the first step, memory, speed, resuming, padding.

Run: python -m benchmarks.data [--records 6000000] [--folder DIR] [--json FILE]

A file of that many chats is written into a folder of its own, and deleted at the end. Each part
runs in a fresh process, whose processor time and resident peak (VmHWM) are its own:

- ``first_step``: `jaxkfac finetune --data FILE --steps 1` with a tiny decoder, from the start of
  Python to its end, compilation and report with it.
- ``stream``: batches of 16 chats of the file, without training: samples a second, and resident
  memory after a twentieth of what is read and after all of it. The processor's seconds are those
  of one core where nothing else uses it; ``without_generation_marks`` are samples in such a second
  with a chat template whose turns have to be told apart.
- ``resume``: the stream at the position behind these samples, in a new process: seconds until the
  next batch, which is compared with the one of the process before.
- ``padding``: the same chats padded to the longest of the batch, and all to the longest allowed:
  bytes of the batches, and processor seconds of training a small decoder on them.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._record import shown, stamp, write

MAX_LENGTH, BATCH = 512, 16
WORDS = """the of iron and copper is melted in a furnace at high temperature while water cools
slowly over many hours until crystals form which scientists measure with great care each year
because their shape depends on pressure time chemistry light salt depth wind or plain chance""".split()  # noqa: E501
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def generate(path: Path, records: int) -> None:
    """Chats whose answers have 2 to some hundred words, most of them few."""
    rng = np.random.default_rng(0)
    answers = [
        " ".join(rng.choice(WORDS, size=int(n)))
        for n in np.clip(rng.lognormal(3.2, 0.8, 4000), 2, 400)
    ]
    with path.open("w") as file:
        for start in range(0, records, 10_000):
            picked = rng.integers(len(answers), size=min(10_000, records - start))
            lines = (
                f'{{"messages": [{{"role": "user", "content": "What of number {start + i}?"}}, '
                f'{{"role": "assistant", "content": "{answers[j]}"}}]}}\n'
                for i, j in enumerate(picked)
            )
            file.writelines(lines)


def tokenizer(*, marks: bool = True) -> Any:
    """Byte-level BPE of a few thousand tokens, with a chat template that marks answers or not."""
    import tokenizers

    from jaxkfac.models import Tokenizer

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([" ".join(WORDS), "user assistant What of number"], trainer)
    template = TEMPLATE if marks else re.sub("{% (end)?generation %}", "", TEMPLATE)
    return Tokenizer(found, eos_ids=(1,), pad_id=1, chat_template=template)


def decoder(width: int) -> Any:
    """A random decoder with this tokenizer."""
    from flax import nnx

    import jaxkfac as jk
    from jaxkfac.models import Decoder, DecoderConfig, Pretrained

    config = DecoderConfig(
        vocabulary=2000, width=width, hidden=2 * width, depth=2, num_heads=2, num_kv_heads=2,
        head_size=width // 2, context=MAX_LENGTH, tied_head=True, eos_ids=(1,),
    )  # fmt: skip
    return Pretrained(config, *jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0))), tokenizer(), "tiny")


def stream_of(path: Path, num_lengths: int = 8, *, marks: bool = True) -> Any:
    from jaxkfac.jobs.data.text import record_files, token_stream

    rows, _ = record_files(path)
    return token_stream(
        rows,
        tokenizer(marks=marks),
        batch_size=BATCH,
        max_length=MAX_LENGTH,
        num_lengths=num_lengths,
    )


def crc_of(batch: Any) -> int:
    found = 0
    for part in batch:
        found = zlib.crc32(part.tobytes(), found)
    return found


def memory(name: str) -> float:
    """MiB of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) / 1024


def first_step(path: Path) -> dict[str, Any]:
    """One update by the command line, with the tiny decoder in place of a pretrained one."""
    from jaxkfac.jobs.cli import main
    from jaxkfac.jobs.cli.finetune import _run

    _run.load_model = lambda experiment: decoder(16)
    with tempfile.TemporaryDirectory() as output:
        words = ["--steps", "1", "--samples", "0", "--questions", "0", "--curvature", "None"]
        code = main(["finetune", "--data", str(path), *words, "--output", output])
    assert code == 0
    return {"peak_mib": memory("VmHWM"), "processor_s": time.process_time()}


def stream(path: Path, samples: int) -> dict[str, Any]:
    """The stream without training."""
    batches, early = samples // BATCH, samples // BATCH // 20
    it = stream_of(path).iterate()
    begun, cpu = time.perf_counter(), time.process_time()
    next(it)
    first, held, position = time.perf_counter() - begun, 0.0, {}
    for number in range(1, batches):
        _, position = next(it)
        if number == early:
            held = memory("VmRSS")
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    following = crc_of(next(it)[0])
    unmarked, begun = stream_of(path, marks=False).iterate(), time.process_time()
    for _ in itertools.islice(unmarked, early):
        pass
    without = early * BATCH / (time.process_time() - begun)
    return {
        "samples": batches * BATCH,
        "samples_per_second": batches * BATCH / seconds,
        "samples_per_processor_second": batches * BATCH / cpu,
        "without_generation_marks": without,
        "first_batch_s": first,
        "resident_early_mib": held,
        "resident_late_mib": memory("VmRSS"),
        "peak_mib": memory("VmHWM"),
        "position": position,
        "next_batch_crc32": following,
    }


def resume(path: Path, position: dict[str, Any]) -> dict[str, Any]:
    """The batch at a position, in another process than the one that gave the position."""
    begun = time.perf_counter()
    batch, _ = next(stream_of(path).iterate(position))
    return {"seconds": time.perf_counter() - begun, "next_batch_crc32": crc_of(batch)}


def padding(path: Path, batches: int) -> dict[str, Any]:
    """Bytes and processor time of padding to the batch's longest and to the longest allowed."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxkfac as jk
    from jaxkfac.models import Tokens

    model = decoder(64)
    objective = jk.Objective(model.apply_fn, jk.Categorical())

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        inputs, targets, mask = batch
        grads = jax.grad(objective)(params, (Tokens(*inputs), targets, mask))
        return optax.apply_updates(params, jax.tree.map(lambda g: -1e-3 * g, grads))

    found = {}
    for name, num_lengths in (("longest_of_batch", 8), ("fixed", 1)):
        held = [b for b, _ in itertools.islice(stream_of(path, num_lengths).iterate(), batches)]
        given = [(tuple(map(jnp.asarray, b[:3])), b.targets, b.mask) for b in held]
        shapes = {b.ids.shape: g for b, g in zip(held, given, strict=True)}
        for one in shapes.values():  # compile
            jax.block_until_ready(step(model.params, one))
        params, cpu = model.params, time.process_time()
        for one in given:
            params = step(params, one)
        jax.block_until_ready(params)
        found[name] = {
            "batch_bytes": sum(part.nbytes for b in held for part in b),
            "tokens": sum(b.num_tokens for b in held),
            "positions": sum(b.ids.size for b in held),
            "programs": len(shapes),
            "processor_s": time.process_time() - cpu,
        }
    return found


def apart(part: str, *arguments: Any) -> dict[str, Any]:
    """A part in a process of its own, with its wall time from the start of Python."""
    words = [sys.executable, "-m", "benchmarks.data", "--part", part, json.dumps(arguments)]
    begun = time.perf_counter()
    run = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1]) | {"wall_s": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=6_000_000)
    parser.add_argument("--samples", type=int, default=200_000, help="that are read for speed")
    parser.add_argument("--batches", type=int, default=40, help="of the comparison of padding")
    parser.add_argument("--folder", type=Path, help="where the file is written for the run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, arguments = options.part
        path, *rest = json.loads(arguments)
        print(json.dumps(globals()[name](Path(path), *rest)))
        return
    record = stamp(records=options.records, max_length=MAX_LENGTH, batch=BATCH)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "chats.jsonl")
        generate(path, options.records)
        record["file_bytes"] = os.path.getsize(path)
        record["first_step"] = apart("first_step", str(path))
        record["stream"] = apart("stream", str(path), options.samples)
        position = record["stream"].pop("position")
        record["resume"] = apart("resume", str(path), position)
        expected, resumed = (record[x].pop("next_batch_crc32") for x in ("stream", "resume"))
        record["resume"]["same_batch"] = expected == resumed
        record["padding"] = apart("padding", str(path), options.batches)
    for name in ("first_step", "stream", "resume", "padding"):
        shown(name, record[name])
    write(record, options.json)


if __name__ == "__main__":
    main()
