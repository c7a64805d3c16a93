"""`--coordinator auto`: processes that a launcher has started find one another."""

import pytest

from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli._several_processes_test import TRAIN, Run


def by_slurm(port, count, rank):
    return ["--coordinator", "auto"], {
        "JAX_COORDINATOR_PORT": port,
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": count,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }


def by_open_mpi(port, count, rank):
    return ["--coordinator", "auto"], {
        "JAX_COORDINATOR_PORT": port,
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": count,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("join", [by_slurm, by_open_mpi])
def test_the_processes_of_a_launcher_find_one_another(tmp_path, join):
    words = [*TRAIN, "--devices", "all", "--steps", "2", "--json"]
    run = Run(tmp_path / "p", [*words, "--output", str(tmp_path / "run")], join=join)
    assert run.summary()["devices"]["kfac"]["mesh"] == {"data": 2, "model": 1}
    assert load_checkpoint(tmp_path / "run" / "kfac").step == 2


@pytest.mark.slow
def test_where_there_is_no_launcher_the_command_says_what_to_give(tmp_path):
    words = [*TRAIN, "--coordinator", "auto", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", words, count=1)
    assert run.codes() == [2]
    assert "--coordinator auto: jax.distributed knows no cluster here" in run.said(0)
    assert "give --coordinator HOST:PORT, --processes and --process" in run.said(0)
