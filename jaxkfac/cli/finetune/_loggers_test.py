import struct
import sys
import types

import pytest

from jaxkfac.cli.finetune._loggers import check_loggers, open_loggers


def test_tensorboard_gets_numbers_and_text(tmp_path):
    logger = open_loggers(["tensorboard"], tmp_path, config={}, step=0)
    logger.numbers(3, {"loss/train": 1.25})
    logger.text(3, "sample/0", "a → b")
    logger.close()
    (events,) = (tmp_path / "tensorboard").glob("events*")
    written = events.read_bytes()
    assert b"loss/train" in written and "a → b".encode() in written
    assert struct.pack("<f", 1.25) in written


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
