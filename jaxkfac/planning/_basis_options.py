"""How a ``HostCurvature`` keeps eigenvectors: in fewer bits, fewer of them, or on the host."""

from jaxkfac.curvature.host import HostOptions
from jaxkfac.memory import bytes_text
from jaxkfac.planning._option import Choice, Option
from jaxkfac.planning._program_bytes import MemoryRows, ProgramBytes
from jaxkfac.planning._shapes import UnavailableError


class HalfBases(Option):
    """Eigenvectors in bfloat16."""

    name, title, needs = "half_bases", "bf16-b.", "host"

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        rows.device["bases"] = of.require_factors().bases_kept(_kept(of, choice))

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return 'HostCurvature(vectors_dtype="bfloat16"): elements of eigenvectors are off by 0.2 %'


class LowRank(Option):
    """The leading eigenvectors of each factor."""

    name, title, needs = "low_rank", "low-rank", "host"

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)
        if of.require_factors().largest_side <= of.basis_rank:
            raise UnavailableError(f"no factor has more than {of.basis_rank} rows")

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        if HostBases.name not in choice.options:
            rows.device["bases"] = of.require_factors().bases_kept(_kept(of, choice))

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return (
            f"HostCurvature(rank={of.basis_rank}): other directions have their mean eigenvalue; "
            "rank_errors of the service says what that is off by"
        )


class HostBases(Option):
    """Eigenvectors in host memory, one layer's at a time on the device."""

    name, title, needs, takes_bases = "host_bases", "host-b.", "host", True

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        held = of.require_factors()
        rows.host["bases"] = held.bases_on_host(_kept(of, choice))
        # One block's eigenvectors, those of the next on their way, and four of its matrices.
        rows.device["bases"] = 2 * held.largest_bases
        rows.device["update"] += 4 * held.largest_block

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        moved = bytes_text(of.require_factors().bases_kept(_kept(of, choice)))
        return f'HostCurvature(bases_in="host"): {moved} of bases cross to the device at every step'


def _kept(of: ProgramBytes, choice: Choice) -> HostOptions:
    """How a service keeps eigenvectors."""
    return HostOptions(
        bases_in="host",
        vectors_dtype="bfloat16" if HalfBases.name in choice.options else None,
        rank=of.basis_rank if LowRank.name in choice.options else None,
    )


def _require_bases(of: ProgramBytes) -> None:
    of.require_factors()
    if not of.preconditions:
        raise UnavailableError("no eigenvectors come back to the device")
