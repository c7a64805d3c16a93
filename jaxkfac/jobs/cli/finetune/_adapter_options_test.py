"""Options of the adapter reach it: its scaling, its ranks, what is saved beside it, its start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli.finetune._load import load_text
from jaxkfac.jobs.cli.finetune._loop import MicroStep, prepare
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning
from jaxkfac.jobs.cli.finetune._problem import build_problem, options_of, shaped_problem
from jaxkfac.jobs.cli.finetune._run_test import CONFIG
from jaxkfac.jobs.cli.finetune._train import _start, build_optimizer
from jaxkfac.jobs.data.text._encode_test import Letters
from jaxkfac.jobs.models import Decoder, Pretrained

QKV, HEAD = "model/layers/self_attn/qkv_proj/kernel", "model/norm/scale"
CURVE = "jaxkfac.jobs.cli.finetune._problem_test:QUADRATIC"
pytestmark = pytest.mark.standard_promotion  # optax.adamw needs it


def problem_of(**options):
    experiment = Finetuning(batch_size=2, adapter=AdapterOptions(**{"rank": 2, **options}))
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, remat=False, rngs=nnx.Rngs(0)))
    pretrained = Pretrained(CONFIG, apply_fn, params, Letters())
    return experiment, build_problem(experiment, pretrained, load_text(experiment))


def shapes_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.exhaustive
def test_ranks_and_alphas_follow_their_patterns_and_rslora_divides_by_the_root():
    patterns = {"rank_pattern": {".*qkv_proj.*": 4}, "alpha_pattern": {".*o_proj.*": 3.0}}
    _, problem = problem_of(rslora=True, alpha=6.0, **patterns)
    assert problem.adapters[QKV].a.shape[-1] == 4
    other = "model/layers/self_attn/o_proj/kernel"
    assert problem.adapters[other].a.shape[-1] == 2
    assert problem.config.scaling(QKV) == 6.0 / 2
    assert problem.config.scaling(other) == pytest.approx(3.0 / 2**0.5)


@pytest.mark.exhaustive
def test_modules_to_save_are_trained_and_the_base_keeps_its_own():
    experiment, problem = problem_of(modules_to_save=HEAD)
    tx = build_optimizer(experiment, problem, 3)
    adapters, optimizer, *_ = _start(experiment, problem, tx, None, {})
    assert shapes_of(adapters) == shapes_of(problem.adapters)
    before = np.array(adapters[HEAD])
    step = MicroStep(problem, experiment, tx)
    batches = problem.train.iterate(None)
    adapters, *_ = step(adapters, optimizer, prepare(problem, 0, batches))
    assert np.abs(np.asarray(adapters[HEAD]) - before).max() > 1e-5
    np.testing.assert_array_equal(problem.params["model"]["norm"]["scale"], before)


@pytest.mark.exhaustive
def test_sigma_from_data_is_that_many_times_the_root_mean_square():
    _, one = problem_of(sigma_from_data=1.0)
    _, three = problem_of(sigma_from_data=3.0)
    first, second = one.initial(), three.initial()
    assert shapes_of(first) == shapes_of(one.adapters)
    for name in first:
        ratio = np.asarray(second[name].sigma / first[name].sigma)
        np.testing.assert_allclose(ratio, 3.0, rtol=1e-5)
        assert float(first[name].sigma.min()) > 0 and float(first[name].sigma.max()) != 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["none", "output"])
def test_a_run_goes_on_from_a_saved_adapter(tmp_path, placement):
    """Plain LoRA goes on as it is, or with a nonlinearity that is next to linear."""
    _, plain = problem_of(fourier_placement="none", rslora=True)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape)
    adapters = jax.tree.map(noise, plain.initial())
    jk.lslora.save(tmp_path, adapters, plain.config, dialect="peft")
    _, problem = problem_of(
        start=str(tmp_path), rank=7, fourier_placement=placement, init_sigma=1e3
    )
    assert (problem.config.rank, problem.config.rslora) == (2, True)
    found = problem.initial()
    assert shapes_of(found) == shapes_of(problem.adapters)
    ids = jnp.arange(10).reshape(2, 5)
    ours = problem.adapted(problem.params, found, ids)
    theirs = plain.adapted(plain.params, adapters, ids)
    base = plain.pretrained.apply_fn(plain.params, ids)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert float(jnp.abs(ours - base).max()) > 1e-2


@pytest.mark.slow
def test_a_start_of_another_placement_is_refused(tmp_path):
    _, first = problem_of(fourier_placement="bottleneck")
    jk.lslora.save(tmp_path, first.initial(), first.config)
    with pytest.raises(ValueError, match="has fourier_placement 'bottleneck'.*different models"):
        problem_of(start=str(tmp_path))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sigma_from_data": 1.0}, "--adapter.sigma-from-data is for a new adapter"),
        ({"nonlinearity": CURVE}, "has the nonlinearity 'fourier', and .* is 'cli_quadratic'"),
    ],
)
def test_what_a_start_cannot_follow_is_refused_and_its_sizes_are_recorded(tmp_path, options, said):
    _, first = problem_of(rank=3, alpha=6.0, rslora=True)
    jk.lslora.save(tmp_path, first.initial(), first.config)
    with pytest.raises(ValueError, match=said):
        problem_of(start=str(tmp_path), **options)
    experiment, problem = problem_of(start=str(tmp_path))
    recorded = options_of(experiment, problem)["adapter"]
    assert (recorded["rank"], recorded["alpha"], recorded["rslora"]) == (3, 6.0, True)


def test_shapes_alone_make_a_plan():
    """Nothing is measured and nothing is copied of a base that is not there."""
    options = {"sigma_from_data": 1.0, "modules_to_save": HEAD}
    experiment = Finetuning(batch_size=2, adapter=AdapterOptions(rank=2, **options))
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, remat=False, rngs=nnx.Rngs(0)))
    shapes = Pretrained(CONFIG, apply_fn, jax.eval_shape(lambda: params), Letters())
    problem = shaped_problem(experiment, shapes)
    assert problem.adapters[HEAD].shape == (CONFIG.width,)
    assert problem.adapters[QKV].sigma.shape == (CONFIG.depth,)
