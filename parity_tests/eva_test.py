"""First values of A beside PEFT's EVA, run by PEFT on the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jaxkfac as jk
from parity_tests.packages import imported

RANK = 2
SCALES = np.array([3.0, 2.0, 0.3, 0.2, 0.1, 0.05])
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(64, 6)) * SCALES + 1.5).astype(np.float32)
UP, DOWN = (RNG.normal(size=shape).astype(np.float32) / 9 for shape in ((6, 6), (6, 4)))
BIASES = [RNG.normal(size=n).astype(np.float32) for n in (6, 4)]


def model(params, x):
    h = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return h @ params["down"]["kernel"] + params["down"]["bias"]


class Twin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Linear(6, 4)
        for layer, kernel, bias in ((self.up, UP, BIASES[0]), (self.down, DOWN, BIASES[1])):
            layer.weight.data = torch.tensor(kernel.T.copy())
            layer.bias.data = torch.tensor(bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def projector(columns):
    columns = np.asarray(columns, np.float64)
    return columns @ np.linalg.solve(columns.T @ columns, columns.T)


def test_eva_spans_the_subspace_of_peft():
    peft = imported("peft")
    settings = peft.LoraConfig(
        r=RANK,
        target_modules=["up", "down"],
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=1.0, adjust_scaling_factors=False),
    )
    theirs = peft.get_peft_model(Twin(), settings, low_cpu_mem_usage=True)
    batches = [{"x": torch.tensor(X)}] * 3
    peft.initialize_lora_eva_weights(
        theirs,
        batches,
        forward_fn=lambda model, batch: model(batch["x"]),
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=lambda layer_input, *_: layer_input[0],
        show_progress_bar=False,
    )
    params = {
        "up": {"kernel": jnp.asarray(UP), "bias": jnp.asarray(BIASES[0])},
        "down": {"kernel": jnp.asarray(DOWN), "bias": jnp.asarray(BIASES[1])},
    }
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Gaussian()))
    factors = stats(params, (jnp.asarray(X), jnp.zeros((64, 4)))).factors
    config = jk.lslora.Config(rank=RANK, target=".*kernel", fourier_placement="none")
    ours = jk.lslora.init(
        model, config, params, X, key=jax.random.key(0), init="eva", factors=factors
    )
    layers = theirs.base_model.model
    for name, layer in (("up/kernel", layers.up), ("down/kernel", layers.down)):
        rows = layer.lora_A["default"].weight.detach().numpy()
        assert rows.shape == (RANK, 6)
        np.testing.assert_allclose(projector(ours[name].a), projector(rows.T), atol=1e-5)
        assert not layer.lora_B["default"].weight.any()
