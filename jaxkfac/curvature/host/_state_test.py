import dataclasses
import errno
import os
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature.host import HostCurvature
from jaxkfac.curvature.host._decompose import Decomposer
from jaxkfac.curvature.host._service_test import LAYERS, LIKE, same, service, steps_of, with_nan
from jaxkfac.files import write_archive


@pytest.fixture(scope="module")
def factors():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(8)]


# When a service is saved: between two pushes of a step, with a refresh open, pending, handed over.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"stagger": 2, "lag": 1}, {"storage": "bfloat16"}])
@pytest.mark.parametrize("stop", [0, 3, 4, 5, 6])
def test_a_resumed_run_is_the_run_that_never_stopped(factors, tmp_path, options, stop):
    options = {"reuse_tolerance": 1e-3, **options}
    with service(**options) as running:
        expected = steps_of(running, factors)
        total = running.average()
    with service(**options) as first:
        steps_of(first, factors[:stop])
        first.push(factors[stop], stop)
        first.save(tmp_path / "service.npz")
        first.push(factors[0], stop)  # what comes after does not matter
    with HostCurvature.load(tmp_path / "service.npz", like=LIKE, timeout=60.0) as second:
        bases = second.bases(stop)
        assert same(bases, expected[stop])
        for step in range(stop + 1, 8):
            second.push(factors[step], step)
            bases = second.bases(step)
            assert same(bases, expected[step]), step
        assert same(second.average(), total)
    assert [p.name for p in tmp_path.iterdir()] == ["service.npz"]


def test_a_refresh_after_loading_knows_where_its_factors_are(factors, tmp_path, monkeypatch):
    """Else "auto" would decompose on the host what the run that never stopped did elsewhere."""
    with service() as running:
        running.push(factors[0], 0)
        running.save(tmp_path / "s")
    devices, decompose = [], Decomposer.decompose

    def noted(self, matrix, *, device, **options):
        devices.append(device)
        return decompose(self, matrix, device=device, **options)

    monkeypatch.setattr(Decomposer, "decompose", noted)
    with HostCurvature.load(tmp_path / "s") as again:
        again.push(factors[1], 1)  # the step grows, so that the refresh of the first begins
        again.bases(1)
    assert devices and set(devices) == {jax.devices()[0]}


def test_what_has_gone_wrong_is_saved_as_well(factors, tmp_path):
    with service(refresh_every=1, lag=1, keep_previous=1) as running:
        steps_of(running, factors[:2])
        running.push(with_nan(factors[2], "k"), 2)
        running.push(with_nan(factors[3], "k"), 3)
        with pytest.warns(RuntimeWarning, match="refresh 1 of at most 1"):
            running.bases(3)
        running.push(factors[4], 4)
        running.save(tmp_path / "s")
        left_out, kept = running.left_out, running.kept
    with HostCurvature.load(tmp_path / "s") as again:
        assert again.left_out == left_out == {"G of layer 'k'": 2}
        assert again.kept == kept == {"G of layer 'k'": 1}
        with pytest.raises(FloatingPointError, match="G of layer 'k': all 1 contributions"):
            again.bases(4)


def test_an_empty_service_and_one_with_identities_are_saved(factors, tmp_path):
    with service() as empty, service(initial="identity", like=LIKE) as identity:
        empty.save(tmp_path / "empty")
        identity.save(tmp_path / "identity")
    with HostCurvature.load(tmp_path / "empty") as empty:
        assert len(steps_of(empty, factors[:1])) == 1
    with HostCurvature.load(tmp_path / "identity") as identity:
        assert np.array_equal(identity.bases(0)["k"].a_vectors, np.eye(3))
        identity.push(factors[0], 0)
        assert np.array_equal(identity.bases(1)["k"].a_vectors, np.eye(3))
        assert not np.array_equal(identity.bases(2)["k"].a_vectors, np.eye(3))


@pytest.fixture
def saved(factors, tmp_path) -> Path:
    path = tmp_path / "service.npz"
    with service() as running:
        steps_of(running, factors[:6])
        running.save(path)
    return path


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(saved, kept):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ValueError, match="is no saved service, or only a part of one"):
        HostCurvature.load(saved)


def test_every_flipped_bit_of_an_array_is_found(saved):
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
    for member in members[:: len(members) // 6]:
        start = data.index(b"\x93NUMPY", member.header_offset)
        damaged = bytearray(data)
        damaged[start + member.file_size - 2] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match="the array '.*' is damaged"):
            HostCurvature.load(saved)


def test_an_array_that_is_not_the_manifests_is_refused(saved, tmp_path):
    """Every member is sound in itself, but one has been put in another's place."""
    swapped = tmp_path / "swapped"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            other = "averages/1/sums.npy" if name == "averages/2/sums.npy" else name
            new.writestr(name, old.read(other))
    with pytest.raises(ValueError, match="the array 'averages/2/sums' is damaged.*manifest says"):
        HostCurvature.load(swapped)


def test_a_foreign_file_is_refused(saved, tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"has no readable manifest\.json"):
        HostCurvature.load(tmp_path / "other.npz")
    write_archive(tmp_path / "later", "jaxkfac.HostCurvature", {"version": 3}, [], what="")
    with pytest.raises(ValueError, match=r"is \('jaxkfac.HostCurvature', 3\), expected .* 2\)"):
        HostCurvature.load(tmp_path / "later")
    with pytest.raises(FileNotFoundError, match="no saved service at"):
        HostCurvature.load(tmp_path / "absent")
    with pytest.raises(TypeError, match="load takes workers, .*, got decay"):
        HostCurvature.load(saved, decay=0.5)


def test_a_service_of_another_model_is_refused(saved):
    other = jax.eval_shape(lambda: random_factors((layer("w", (3, 2)),), jax.random.key(0)))
    with pytest.raises(
        CheckpointMismatchError, match="belongs to another model: factors lack.*'q'"
    ):
        HostCurvature.load(saved, like=other)
    with HostCurvature.load(saved) as running:
        wider = dataclasses.replace(LIKE, bias="separate")
        with pytest.raises(ValueError, match="bias='separate', expected 'joint'"):
            running.push(wider, 9)


def test_a_budget_that_is_too_small_is_refused_when_loading(saved):
    with pytest.raises(ValueError, match="host_bytes=100 is too small"):
        HostCurvature.load(saved, host_bytes=100)


@pytest.mark.usefixtures("x64")
def test_doubles_are_not_loaded_as_singles(tmp_path):
    with service() as running:
        steps_of(running, [random_factors(LAYERS, jax.random.key(0))])
        running.save(tmp_path / "s")
    HostCurvature.load(tmp_path / "s").close()
    with jax.enable_x64(False), pytest.raises(ValueError, match="saved with float64.*enable x64"):
        HostCurvature.load(tmp_path / "s")


def test_a_full_disk_leaves_the_older_file(factors, saved, monkeypatch):
    before = saved.read_bytes()
    with HostCurvature.load(saved) as running:
        running.push(factors[6], 6)

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="could not be saved to .*No space left"):
                running.save(saved)
        assert saved.read_bytes() == before
        assert [p.name for p in saved.parent.iterdir()] == [saved.name]
        running.save(saved)  # the service itself goes on
        assert saved.read_bytes() != before
        with pytest.raises(OSError, match="could not be saved"):
            running.save(saved.parent / "no" / "folder")


def test_a_service_beyond_host_memory_is_the_same(factors, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    tight = {"host_bytes": 1700, "disk": disk, "in_flight_bytes": 400}
    with service(**tight) as running, service() as roomy:
        seen, expected = steps_of(running, factors[:6]), steps_of(roomy, factors[:6])
        assert all(map(same, seen, expected))
        store = running._state.store
        assert store.on_disk > 0 and store.in_memory <= store.budget < 1700
        running.save(tmp_path / "s")
        roomy_after = roomy.bases(6)
    with HostCurvature.load(tmp_path / "s", **tight) as again:
        assert same(again.bases(6), roomy_after)
    assert not list(disk.iterdir())
    shutil.rmtree(disk)
    with pytest.raises(ValueError, match="is no folder"):
        HostCurvature.load(tmp_path / "s", **tight)


def test_a_disk_that_fills_up_while_training_reaches_the_caller(factors, tmp_path, monkeypatch):
    running = service(host_bytes=1700, disk=tmp_path, in_flight_bytes=400)
    running.push(factors[0], 0)
    running.flush()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="the (snapshot|basis) of .* needs .* bytes on disk"):
        running.bases(0)
    running.close()
