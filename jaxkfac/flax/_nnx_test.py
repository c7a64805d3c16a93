"""NNX models as pure functions: what a call changes comes out of it, or the call raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkfac.flax._nnx import as_state, from_nnx

X = jax.random.normal(jax.random.key(0), (6, 3))
KEY = jax.random.key(1)


class Net(nnx.Module):
    """A dense layer, a norm with running statistics, and dropout."""

    def __init__(self, rate=0.0, norm=True, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        return self.dropout(x if self.norm is None else self.norm(x))


class Deep(nnx.Module):
    """Blocks in a scan, rematerialised: NNX hands every variable on, written or not."""

    def __init__(self, **options):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Net(rngs=rngs, **options)

        self.blocks = make(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


MODELS = pytest.mark.parametrize("make", [Net, Deep])


@pytest.mark.slow
@MODELS
def test_what_a_call_changes_is_returned_and_read_by_the_next(make):
    apply_fn, params = from_nnx(make(), mutable=nnx.BatchStat)
    model, state = make(), apply_fn.state
    for _ in range(3):
        outputs, state = jax.jit(apply_fn)(params, X, state=state)
        np.testing.assert_allclose(outputs, model(X), rtol=1e-6)
    kept = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state, kept)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(0, abs(a - b)), state, apply_fn.state)


@MODELS
def test_a_change_that_nothing_names_raises_and_says_what_would(make):
    apply_fn, params = from_nnx(make())
    with pytest.raises(ValueError, match=r"norm/mean.*norm/var.*mutable=nnx\.BatchStat"):
        jax.jit(apply_fn)(params, X)


@MODELS
def test_changes_are_dropped_where_the_caller_says_so(make):
    apply_fn, params = from_nnx(make(), mutable=())
    assert apply_fn.state is None
    np.testing.assert_array_equal(apply_fn(params, X), make()(X))


@MODELS
def test_a_model_in_evaluation_mode_changes_nothing(make):
    model = make(rate=0.5)
    model.eval()
    apply_fn, params = from_nnx(model)
    np.testing.assert_allclose(apply_fn(params, X), model(X), rtol=1e-6)


@pytest.mark.default(1)
@MODELS
@pytest.mark.parametrize("mutable", [nnx.BatchStat, ()])
def test_dropout_without_a_key_raises(make, mutable):
    apply_fn, params = from_nnx(make(rate=0.5), mutable=mutable)
    with pytest.raises(ValueError, match="draws random numbers.*dropout/rngs.*key="):
        apply_fn(params, X)
    other = apply_fn(params, X, key=jax.random.key(2))
    masks = [out[0] if mutable else out for out in (apply_fn(params, X, key=KEY), other)]
    assert (masks[0] != masks[1]).any()


def test_a_model_that_takes_a_key_receives_it():
    class Noisy(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(3))

        def __call__(self, x, *, key=None):
            noise = 0.0 if key is None else jax.random.normal(key, x.shape)
            return x * self.scale[...] + noise

    class Asked(Noisy):
        def __call__(self, query, key=None):
            return super().__call__(query if key is None else key)

    apply_fn, params = from_nnx(Noisy())
    np.testing.assert_array_equal(apply_fn(params, X), X)
    own = jax.random.split(KEY)[1]  # the other is for random streams
    expected = X + jax.random.normal(own, X.shape)
    np.testing.assert_array_equal(apply_fn(params, X, key=KEY), expected)

    class Attends(Noisy):
        def __call__(self, x, *, key=None, value=None):
            return super().__call__(x if key is None else key)

    attends, params = from_nnx(Attends())
    np.testing.assert_array_equal(attends(params, X, key=KEY), X)
    asked, params = from_nnx(Asked())  # its key is no random one
    np.testing.assert_array_equal(asked(params, X, key=KEY), X)
    np.testing.assert_array_equal(asked(params, X, 2 * X, key=KEY), 2 * X)


def test_a_key_reaches_a_block_that_is_rematerialised():
    class Block(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(3))

        def __call__(self, x, *, key=None):
            noise = 0.0 if key is None else jax.random.normal(key, x.shape)
            return x * self.scale[...] + noise

    class Model(nnx.Module):
        def __init__(self, wrap):
            self.block, self.wrap = Block(), wrap

        def __call__(self, x, *, key=None):
            return self.wrap(lambda block, x, key: block(x, key=key))(self.block, x, key)

    (plain, params), (remat, _) = (from_nnx(Model(wrap)) for wrap in (lambda f: f, nnx.remat))
    for key in (None, KEY):
        np.testing.assert_array_equal(remat(params, X, key=key), plain(params, X, key=key))


@pytest.mark.slow
def test_keys_that_are_drawn_for_nothing_need_no_key():
    """A recurrent cell draws one for its zeros."""
    rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    apply_fn, params = from_nnx(rnn)
    np.testing.assert_allclose(apply_fn(params, X[None]), rnn(X[None]), rtol=1e-6)


def test_random_streams_can_be_the_state_that_is_carried():
    apply_fn, params = from_nnx(Net(0.5, norm=False), mutable=nnx.RngState)
    model, state = Net(0.5, norm=False), apply_fn.state
    for _ in range(2):
        outputs, state = apply_fn(params, X, state=state)
        np.testing.assert_array_equal(outputs, model(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_model_sows_is_left_out():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    assert from_nnx(Sowing())[0]({}, X) is X


@pytest.mark.slow
def test_several_inputs_are_passed_on():
    class Attending(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, queries, keys):
            return self.attention(queries, keys)

    q, k = jnp.ones((2, 3, 4)), jnp.arange(40.0).reshape(2, 5, 4)
    apply_fn, params = from_nnx(Attending())
    np.testing.assert_allclose(apply_fn(params, q, k), Attending()(q, k), rtol=1e-6)


def test_parameters_written_in_a_call_are_named():
    class Growing(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            self.scale.set_value(self.scale.get_value() * 2)
            return x

    apply_fn, params = from_nnx(Growing())
    with pytest.raises(ValueError, match="'scale'"):
        apply_fn(params, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: from_nnx(Net(), mutable=nnx.Cache),
            "mutable=nnx.Cache names no variable.*BatchStat",
        ),
        (lambda: from_nnx(Net(), mutable=())[0](X, X), "params: expected the dictionary"),
        (lambda: from_nnx(Net(), mutable=())[0]({}, X), "params: 'dense/bias' is missing"),
        (
            lambda: from_nnx(Net())[0](nnx.state(Net()), X),
            "params: the model has no 'dropout/rngs/count'",
        ),
        (
            lambda: from_nnx(Net())[0](from_nnx(Net())[1], X, state={}),
            "state=: jk.from_nnx split this model without one",
        ),
        (
            lambda: from_nnx(Net(), mutable=nnx.BatchStat)[0](from_nnx(Net())[1], X, state={}),
            "state: 'norm/mean' is missing",
        ),
        (lambda: as_state({}, Net()), "grads: 'dense/bias' is missing"),
    ],
)
def test_what_is_not_of_the_model_is_refused_in_words(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_gradients_become_a_state_of_the_models_parameters():
    model = Net()
    state = as_state(from_nnx(model)[1], model)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model, nnx.Param))
    np.testing.assert_array_equal(state["dense"]["kernel"].get_value(), model.dense.kernel[...])


class TakesRngs(nnx.Module):
    """As flax's own MNIST: random streams are an argument of the call."""

    def __init__(self, rngs):
        self.up, self.drop = nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5)
        self.down = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, rngs=None, *, scale):
        return scale * self.down(self.drop(self.up(x), rngs=rngs))


def test_call_says_how_the_model_is_called():
    model, x = TakesRngs(nnx.Rngs(0)), jnp.ones((5, 3))
    call = lambda model, x, *, key: model(x, nnx.Rngs(key), scale=2.0)
    apply_fn, params = from_nnx(model, call=call)
    key = jax.random.key(1)
    outputs = apply_fn(params, x, key=key)
    again = model(x, nnx.Rngs(jax.random.split(key)[1]), scale=2.0)
    np.testing.assert_allclose(outputs, again, rtol=1e-6)
    assert not np.allclose(outputs, apply_fn(params, x, key=jax.random.key(2)))
    doubled, _ = from_nnx(model, call=lambda model, x, y: model.down(model.up(x) + y))
    np.testing.assert_allclose(doubled(params, x, 1.0), model.down(model.up(x) + 1), rtol=1e-6)


def test_inputs_that_the_model_does_not_take_name_call():
    apply_fn, params = from_nnx(TakesRngs(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"TakesRngs.*'scale'.*call=lambda model, x"):
        apply_fn(params, jnp.ones((5, 3)))
    with pytest.raises(TypeError, match="call"):
        from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), call=3)
    apply_fn, params = from_nnx(
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)), call=lambda model, x, *, key: model(x)
    )
    with pytest.raises(TypeError, match="'key'.*call="):
        apply_fn(params, jnp.ones((5, 3)))
