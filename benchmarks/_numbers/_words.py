"""What the page says by itself."""

HEAD = """# Numbers

This page is made from the records by `python -m benchmarks.numbers --write docs/numbers.md`, and a
test holds it to them. Each section says what made its record, when, and where. On a GPU only
[parity](repository.md#how-far-to-trust-it) and one timeline have run. The other times are from two
CPU cores, shared with other work, and bytes for [other devices](accelerators.md) come from their
compilers.
Times vary from run to run. Measure them again on your own machine before you rely on one.
"""
MISSED = """## What was not reached

Goals were set before the measurements. These were missed:
"""
UNMEASURED = """Not measured at all: times of steps on a GPU or TPU; a run of a 7B model; speed
and memory beside kronfluence on large models.
"""
OTHERS = """## Other records

Optimizers are compared on [a page of their own](../benchmarks/results/optimizers/README.md), with
goals that were reached and goals that were not.

| record | command | date |
|---|---|---|"""

_HELD_BY_TESTS = (
    (
        "factors A and G, every Fisher type, both sharings",
        "curvlinops",
        "1e-10, float64",
        "pytest tests/curvlinops_test.py",
    ),
    (
        "EKFAC's matrix",
        "curvlinops",
        "1e-8, float64",
        "pytest tests/curvlinops_test.py -k ekfac",
    ),
    (
        "factors, bases, powers, averages, accumulation, adapters",
        "`torch_ref`",
        "1e-10, float64; 1e-5, float32 (3.1e-5 through nine batch normalizations), where nothing "
        "is divided by eigenvalues",
        "make parity",
    ),
    (
        "evidence, covariances of outputs, probit and bridge of a Laplace posterior",
        "laplace-torch",
        "1e-9, float64",
        "pytest tests/laplace_torch_test.py",
    ),
    (
        "scores by bases that kronfluence has saved",
        "kronfluence",
        "1e-9, float64",
        "pytest tests/kronfluence_test.py",
    ),
    (
        "updates of a small wave function, the first and ten more",
        "kfac-jax 0.0.8, its record",
        "1e-9; 1e-8, float64",
        "pytest tests/atoms_test.py -m slow -k kfac_jax",
    ),
    ("codes and scales of NF4", "bitsandbytes", "every bit", "pytest tests/nf4_test.py"),
    (
        "logits of an adapted Llama, files both ways",
        "PEFT",
        "2e-5, float32",
        "pytest tests/peft_decoder_test.py",
    ),
    ("logits of decoders", "transformers", "1e-4, float32", "pytest tests/decoder_test.py"),
    (
        "logits of encoder-decoders",
        "transformers",
        "1e-4, float32",
        "pytest tests/encoder_decoder_test.py",
    ),
)
ACCURACY = (
    "## Accuracy, beside peers",
    "",
    "CI checks each row; the command fails if one no longer holds.",
    "",
    "| what | beside | how far | command |",
    "|---|---|---|---|",
    *(f"| {what} | {peer} | {far} | `{test}` |" for what, peer, far, test in _HELD_BY_TESTS),
    "",
    "What lower precision saves, and what it costs in accuracy, is in",
    "[a record of its own](../benchmarks/results/precision.md).",
)
