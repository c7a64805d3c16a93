"""What results show of themselves: a line where they are printed, a table in a notebook."""

from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk
from jaxkfac.curvature.capacity import METRICS


@pytest.fixture(scope="module")
def shown():
    """One of each, by name."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": {"kernel": jax.random.normal(keys[0], (4, 8)), "scale": jnp.ones(8)},
        "<last>": {"kernel": jax.random.normal(keys[1], (8, 3))},
    }

    def apply_fn(params, x):
        return (
            jnp.tanh(x @ params["first"]["kernel"])
            * params["first"]["scale"]
            @ (params["<last>"]["kernel"])
        )

    batch = (jax.random.normal(keys[2], (6, 4)), jnp.arange(6) % 3)
    objective = jk.Objective(apply_fn, jk.Categorical())
    stats = jk.value_grad_and_factors(objective)
    factors = stats(params, batch)[2]
    bases = jk.eigendecompose(factors)
    metrics = jk.capacity_metrics(bases, num_examples=6)
    config = jk.lslora.Config(rank=2, target=r".*kernel")
    adapters = jk.lslora.init(apply_fn, config, params, batch[0], key=keys[0])
    plan = {"device_bytes": 1e9, "compiled": "none"}
    return {
        "layers": jk.find_layers(apply_fn, params, batch[0]),
        "factors": factors,
        "factor": factors["first/kernel"],
        "diagonal": factors["first/scale"],
        "shapes": stats.factor_shapes(params, batch),
        "bases": bases,
        "basis": bases["<last>/kernel"],
        "corrected": jk.correct_eigenvalues(objective, bases)(params, batch, keys[0]),
        "metrics": metrics,
        "interval": jk.capacity_interval([metrics, metrics]),
        "comparison": jk.compare_capacity(metrics, metrics),
        "adapter": adapters["first/kernel"],
        "bank": jk.lslora.stack({"a": adapters, "b": adapters}),
        "diagnosis": jk.lslora.diagnose(adapters)["first/kernel"],
        "plan": jk.plan_memory(objective, params, batch, **plan),
        "short plan": jk.plan_memory(objective, params, batch, **{**plan, "device_bytes": 10}),
        "top": jk.influence(objective, params, bases, batch, batch, damping=1e-3, top_k=2),
        "posterior": jk.laplace(objective, params, bases, num_examples=6),
        "store": jk.gradient_store(objective, params, bases, batch, rank=1),
    }


NAMES = (
    "layers factors factor diagonal shapes bases basis corrected metrics interval comparison "
    "adapter bank diagnosis plan short\xa0plan top"
).split(" ")


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name.replace("\xa0", " ") for name in NAMES])
def test_a_result_is_printed_in_a_line_without_its_numbers(shown, name):
    line = repr(shown[name])
    assert len(line) < 260 and "\n" not in line and "Array(" not in line
    assert type(shown[name]).__name__ in line


@pytest.mark.slow
def test_printing_shows_the_answer(shown):
    top = shown["top"]
    lines = str(top).splitlines()
    assert len(lines) == 9 and max(map(len, lines)) <= 80
    best = f"{int(top.indices[0, 0])}: {float(top.scores[0, 0]):.3g}"
    assert lines[2].split("  ")[-2].strip() == best or best in lines[2]
    posterior = str(shown["posterior"])
    assert "64 parameters in 3 layers from 6 examples: prior precision 1, noise 1" in posterior
    assert "the rank loses at most" in str(shown["store"])


class _Tags(HTMLParser):
    """What is open, and the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.rows = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("layers", 4, ["<last>/kernel", "3 layers cover 64 of 64 parameters (100.0%)"]),
        ("factors", 4, ["float32[4, 4]", "float32[3, 3]", "float32[8]"]),
        ("shapes", 4, ["float32[4, 4]"]),
        ("bases", 6, ["after clipping", "float32[8]"]),
        ("corrected", 6, ["Eigenbases of 3 layers", "with measured eigenvalues"]),
        ("metrics", 5, ["<last>/kernel", "whole model", "N = 6, δ = 1"]),
        ("adapter", 5, ["coefficients", "float32[4, 2]"]),
        ("plan", None, ["parameters", "it fits as it is"]),
        ("short plan", None, ["nothing fits"]),
        ("top", 7, ["query", "place in the stream: score"]),
    ],
)
def test_a_notebook_shows_a_table(shown, name, rows, words):
    tags = _Tags()
    tags.feed(shown[name]._repr_html_())
    text = " ".join(tags.text)
    assert not tags.open
    assert rows is None or tags.rows == rows
    assert all(word in text for word in words), text


def test_traced_values_show_their_shapes(shown):
    seen = []

    @jax.jit
    def traced(bases, factors, top):
        seen.extend([*(x._repr_html_() for x in (bases, factors, top)), repr(bases["first/scale"])])
        return 0

    traced(shown["bases"], shown["factors"], shown["top"])
    assert len(seen) == 4 and "float32[8]" in seen[-1]
    assert not any("Tracer" in line for line in seen)


def test_a_tree_of_something_else_shows_itself(shown):
    halves = jax.tree.map(lambda x: None, shown["bases"])
    assert repr(halves).startswith("Eigenbases of 3 layers")
    assert "entropy_rank" in METRICS and "entropy rank" in repr(shown["metrics"])
