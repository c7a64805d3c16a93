"""The dense net of ``benchmarks.factors`` with PyTorch and curvlinops, in a process of its own.

``python -m benchmarks._curvlinops_factors PAIRS FISHER`` prints a line of JSON: milliseconds of a
gradient, and the median over interleaved pairs of the time in which curvlinops computes all
factors, over that of the gradient. Its pass returns no gradient: who needs both pays for both.
"""

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from curvlinops import KFACLinearOperator


def main() -> None:
    pairs, fisher = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(512, 512)]
    for _ in range(7):
        layers += [torch.nn.Tanh(), torch.nn.Linear(512, 512)]
    net, loss = torch.nn.Sequential(*layers), torch.nn.CrossEntropyLoss()
    x, y = torch.randn(4096, 512), torch.randint(0, 512, (4096,))
    params = [p for p in net.parameters() if p.requires_grad]
    operator = KFACLinearOperator(
        net,
        loss,
        params,
        [(x, y)],
        fisher_type=fisher,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )

    def gradient() -> None:
        torch.autograd.grad(loss(net(x), y), params)

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    seconds(gradient), seconds(operator.compute_kronecker_factors)
    times = [(seconds(gradient), seconds(operator.compute_kronecker_factors)) for _ in range(pairs)]
    ratio = statistics.median(factors / alone for alone, factors in times)
    found = {
        "gradient_ms": 1e3 * statistics.median(alone for alone, _ in times),
        "factors_alone_ratio": ratio,
        "gradient_and_factors_ratio": 1 + ratio,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "curvlinops-for-pytorch")
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
