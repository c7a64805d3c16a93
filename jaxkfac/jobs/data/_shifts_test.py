import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.data import load_digits, shift_batch


def moved(image, down, right):
    """The image moved by whole pixels, by explicit indexing."""
    out = np.zeros_like(image)
    for i in range(8):
        for j in range(8):
            if 0 <= i - down < 8 and 0 <= j - right < 8:
                out[i, j] = image[i - down, j - right]
    return out


def test_every_image_is_one_of_its_nine_shifts_and_all_nine_occur():
    images = load_digits().images[:300]
    shifted = np.asarray(jax.jit(shift_batch)(jax.random.key(0), jnp.asarray(images)))
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    seen = set()
    for image, result in zip(images, shifted):
        matches = [s for s in steps if np.array_equal(moved(image, *s), result)]
        assert matches
        seen.update(matches[:1])
    assert seen == set(steps)


@pytest.mark.slow
def test_a_key_fixes_the_shifts():
    images = jnp.asarray(load_digits().images[:20])
    first, again, other = (shift_batch(jax.random.key(k), images) for k in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)


def test_no_shift_returns_the_images_and_a_negative_one_is_refused():
    images = jnp.ones((2, 8, 8), jnp.bfloat16)
    assert shift_batch(jax.random.key(0), images, 0) is images
    assert shift_batch(jax.random.key(0), images, 2).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="max_shift"):
        shift_batch(jax.random.key(0), images, -1)
