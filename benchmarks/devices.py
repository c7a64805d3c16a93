"""A K-FAC step of a 7B model on 1, 8 and 64 devices: arithmetic from stated constants.

    python -m benchmarks.devices
    python -m benchmarks.devices --rate 2e14 --node-link 900e9

Nothing is measured. ``docs/devices.md`` shows what it prints; put in the constants of your own
devices.
"""

import argparse
import dataclasses

# 32 blocks of Llama's form. A: q, k, v share one; o; gate and up share one; down. G: one of each
# matrix; q, k, v apart, gate and up apart. Embedding and head are left out.
BLOCKS, WIDTH, HIDDEN = 32, 4096, 11008
SIDES = BLOCKS * ([WIDTH] * 3 + [HIDDEN] + [WIDTH] * 5 + [HIDDEN] * 2)
PARAMETERS = 6.5e9
COLUMNS = (
    "devices",
    "gradient",
    "factors",
    "their sum",
    "decompositions, all on each device",
    "with `distribute=`",
    "their exchange",
)


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the arithmetic starts from; every time is in seconds."""

    tokens: float = 64 * 2048
    """Of a step, on all devices together."""
    factors: float = 0.5
    """What factors add to a gradient, as a part of its time."""
    rate: float = 4e14
    """Operations a second of one device: 40 % of an H100's dense bfloat16."""
    eigh: float = 9e-12
    """Of a decomposition, divided by n cubed: 9 n^3 operations at 1 TFLOP/s."""
    node_link: float = 450e9
    """Bytes a second of an all-reduce among 8 devices: NVLink."""
    cluster_link: float = 50e9
    """The same among 64: 400 Gb/s between nodes."""
    every: float = 10
    """Steps between two collections of factors."""
    refresh_every: float = 500
    """Steps between two refreshes."""


def seconds(devices: int, constants: Constants) -> list[float | None]:
    """Of each column but the first, averaged over the steps; ``None`` where there is none."""
    nbytes, cubes = sum(4 * n**2 for n in SIDES), sum(n**3 for n in SIDES)
    gradient = constants.tokens * 6 * PARAMETERS / constants.rate / devices
    collected = gradient * constants.factors / constants.every
    alone = cubes * constants.eigh / constants.refresh_every
    if devices == 1:
        return [gradient, collected, None, alone, None, None]
    link = constants.node_link if devices <= 8 else constants.cluster_link
    ring = 2 * (devices - 1) / devices / link  # seconds a byte, in an all-reduce
    summed = ring * nbytes * 2 / 3 / constants.every  # packed: two thirds of each matrix
    divided = (cubes / devices + max(SIDES) ** 3) * constants.eigh / constants.refresh_every
    return [gradient, collected, summed, alone, divided, ring * nbytes / constants.refresh_every]


def table(constants: Constants) -> list[str]:
    """The rows of the page, in Markdown."""
    rows = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for devices in (1, 8, 64):
        cells = ["–" if x is None else f"{x:.2g}" for x in seconds(devices, constants)]
        rows.append(f"| {devices} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for field in dataclasses.fields(Constants):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=float, default=field.default)
    constants = Constants(**vars(parser.parse_args()))
    print(f"factors: {sum(4 * n**2 for n in SIDES) / 1e9:.0f} GB in float32, their bases as many")
    print("seconds a step, averaged over the steps:\n")
    print("\n".join(table(constants)))


if __name__ == "__main__":
    main()
