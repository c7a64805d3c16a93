"""Whatever compiles for more than three seconds says so: each program behind a line that does."""

import re
import sys

import jax
import pytest

from jaxkfac.jobs.cli import _progress, main

# Programs of the size of a model, of which a large one compiles for minutes.
LARGE = {
    "jit(epoch)", "jit(evaluate)", "jit(micro_step)", "jit(each_token)", "jit(nonlinearity)",
    "jit(collect)", "jit(with_source)", "jit(product)", "jit(_run)", "jit(_program)",
}  # fmt: skip
SAYING = re.compile(
    "compiling|examining|measuring|preparing|loading|planning|preconditioning|scoring the tokens"
)
LONG = 1.0  # seconds, unoptimized and of a tiny model
VIT = "--model.width 8 --model.hidden 8 --model.depth 1 --model.num-heads 2 --model.patch-size 4"
BRIEF = "--batch-size 2 --max-length 64 --samples 1 --sample-tokens 2 --output {out}"
RUNS = {
    "train": f"train {VIT} --steps 1 --batch-size 200 --output {{out}}",
    "finetune": "finetune --model {llama} --data {lengths} --num-lengths 2 --steps 4 "
    f"--log-every 1 {BRIEF}",
    "finetune pairs": "finetune --model {t5} --data {pairs} --source-key en --target-key de "
    f"--train all --generate 1 --steps 1 {BRIEF}",
    "influence": "influence {llama} --train {texts} --queries {texts} --max-length 16 --ekfac "
    "--batch-size 4 --output {out}",
    "analyze": "analyze {llama} --data {texts} --max-length 16 --batch-size 4 --lanczos 1 "
    "--lanczos-steps 2 --output {out}",
    "analyze a checkpoint": "analyze {vit} --batches 2",
    "plan": "plan --preset llama-1b --device-bytes 1TB --compiler cpu --tokens 16 --curvature none "
    "--options",
}


class AtOnce:
    """A timer whose time is over when it starts."""

    def __init__(self, seconds, run):
        self.start, self.cancel = run, lambda: None


class Stream:
    """Standard error as a list of lines."""

    def __init__(self, log):
        self.log, self.isatty, self.flush = log, lambda: False, lambda: None

    def write(self, text):
        self.log += [line for line in text.splitlines() if line.strip()]


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adamw needs it
@pytest.mark.parametrize("name", RUNS)
def test_every_large_program_is_compiled_behind_a_line_that_says_so(
    name, small, tmp_path, monkeypatch, request
):
    lengths = tmp_path / "lengths.jsonl"
    rows = [f'{{"prompt": "what is", "completion": "{"it" * n}"}}' for n in (1, 1, 1, 22, 22, 22)]
    lengths.write_text("\n".join(rows))
    places = small | {"out": str(tmp_path / "run"), "lengths": str(lengths), "vit": str(tmp_path)}
    if "{vit}" in RUNS[name]:
        words = f"train {VIT} --optimizer kfac --steps 1 --batch-size 200 --output {tmp_path}"
        assert main(words.split()) == 0
    log, compiled, quiet, ended = [], [], [], []  # a listener stays registered

    def listen(event, seconds, **about):
        if not ended and event == "/jax/core/compile/backend_compile_duration":
            program = about.get("fun_name", "")
            is_large = program in LARGE or seconds > LONG
            compiled.append(program)
            if is_large and not (log and SAYING.search(log[-1])):
                quiet.append((program, log[-1:]))

    monkeypatch.setattr(_progress.threading, "Timer", AtOnce)
    monkeypatch.setattr(sys, "stderr", Stream(log))
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    request.addfinalizer(lambda: ended.append(True))
    assert main(RUNS[name].format(**places).split()) == 0, log
    assert quiet == []
    assert name in ("plan", "analyze a checkpoint") or LARGE & {*compiled}
