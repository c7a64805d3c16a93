import resource
import struct
import sys
import types

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxkfac.jobs.cli.finetune._loggers import check_loggers, open_loggers


def test_tensorboard_gets_numbers_and_text(tmp_path):
    logger = open_loggers(["tensorboard"], tmp_path, config={}, step=0)
    logger.numbers(3, {"loss/train": 1.25})
    logger.text(3, "sample/0", "a → b")
    logger.close()
    (events,) = (tmp_path / "tensorboard").glob("events*")
    written = events.read_bytes()
    assert b"loss/train" in written and "a → b".encode() in written
    assert struct.pack("<f", 1.25) in written


def test_a_full_disk_is_an_error_at_once_and_once(tmp_path):
    """The limit of file sizes is the kernel's own refusal to write on."""
    logger = open_loggers(["tensorboard"], tmp_path, config={}, step=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        words = "numbers for TensorBoard could not be saved to .*tensorboard.*File too large.*--res"
        with pytest.raises(OSError, match=words):
            logger.text(4, "sample", "x" * (2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.close()


def test_what_was_logged_after_the_checkpoint_is_hidden(tmp_path):
    logger = open_loggers(["tensorboard"], tmp_path, config={}, step=7)
    logger.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert Event(step=7, session_log=SessionLog(status=1)).SerializeToString() in (
        events.read_bytes()
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_update_beside_its_numbers(name, tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType(name)
    fake.init = lambda **kwargs: calls.append(("init", kwargs))
    fake.log = lambda values: calls.append(("log", values))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, fake)
    logger = open_loggers([name], tmp_path / "mine", config={"rank": 2}, step=0)
    logger.numbers(4, {"loss": 0.5})
    logger.text(4, "sample", "words")
    logger.close()
    assert calls == [
        ("init", {"project": "jaxkfac", "name": "mine", "config": {"rank": 2}}),
        ("log", {"update": 4, "loss": 0.5}),
        ("log", {"update": 4, "sample": "words"}),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("tensorboard", "tensorboardX", r"jaxkfac\[finetune\]"),
        ("wandb", "wandb", "pip install wandb"),
        ("trackio", "trackio", "pip install trackio"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(name, package, remedy, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"{package} is not installed: .*{remedy}"):
        check_loggers([name])


def test_without_loggers_nothing_is_written(tmp_path):
    logger = open_loggers([], tmp_path, config={}, step=0)
    logger.numbers(1, {"loss": 1.0})
    logger.close()
    assert not list(tmp_path.iterdir())
