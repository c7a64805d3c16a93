"""The benchmarks' SOAP takes the steps of one restated in PyTorch, as its authors wrote it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks.optimizers._soap import soap

RATE, B1, B2, EPS, DECAY, FREQUENCY = 3e-3, 0.9, 0.95, 1e-8, 0.01, 2
SHAPES = {"matrix": (4, 3), "kernel": (3, 2, 3), "bias": (5,)}


class Soap:
    """Of one parameter: github.com/nikhilvyas/SOAP, but for merged axes; decay as AdamW's."""

    def __init__(self, p):
        self.p, self.t, self.vectors = p, 0, None
        self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)
        axes = p.shape if p.ndim > 1 else ()
        self.matrices = [torch.zeros(n, n, dtype=p.dtype) for n in axes]

    def rotated(self, x, back=False):
        for axis, q in enumerate(self.vectors):
            x = torch.movedim(torch.tensordot(x, q, dims=([axis], [int(back)])), -1, axis)
        return x

    def averaged(self, g):
        for axis, matrix in enumerate(self.matrices):
            rows = torch.movedim(g, axis, 0).reshape(len(matrix), -1)
            matrix.lerp_(rows @ rows.T, 1 - B2)

    def step(self, g):
        if self.vectors is None:
            self.averaged(g)
            self.vectors = [torch.linalg.eigh(x)[1].flip(1) for x in self.matrices]
            return
        self.t += 1
        self.m.mul_(B1).add_(g, alpha=1 - B1)
        self.v.mul_(B2).add_(self.rotated(g) ** 2, alpha=1 - B2)
        size = RATE * (1 - B2**self.t) ** 0.5 / (1 - B1**self.t)
        down = self.rotated(self.rotated(self.m) / (self.v.sqrt() + EPS), back=True)
        self.p = self.p * (1 - RATE * DECAY) - size * down
        self.averaged(g)
        if self.t % FREQUENCY == 0:
            self.turned()

    def turned(self):
        for axis, (matrix, q) in enumerate(zip(self.matrices, self.vectors, strict=True)):
            order = torch.argsort(torch.diag(q.T @ matrix @ q), descending=True)
            self.v = self.v.index_select(axis, order)
            self.vectors[axis] = torch.linalg.qr(matrix @ q[:, order])[0]


@pytest.mark.standard_promotion
def test_seven_steps_of_soap_are_those_of_its_authors():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    gradients = [{n: rng.normal(size=x.shape) for n, x in arrays.items()} for _ in range(7)]
    with jax.enable_x64(True):
        params = {name: jnp.asarray(x) for name, x in arrays.items()}
        tx = soap(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, frequency=FREQUENCY)
        state = tx.init(params)
        for gradient in gradients:
            updates, state = tx.update(jax.tree.map(jnp.asarray, gradient), state, params)
            params = jax.tree.map(jnp.add, params, updates)
        ours = jax.tree.map(np.asarray, params)
    for name, start in arrays.items():
        reference = Soap(torch.from_numpy(start.copy()))
        for gradient in gradients:
            reference.step(torch.from_numpy(gradient[name]))
        np.testing.assert_allclose(ours[name], reference.p.numpy(), rtol=1e-10, err_msg=name)
        assert np.abs(ours[name] - start).max() > RATE
