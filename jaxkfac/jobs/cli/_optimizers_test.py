import dataclasses
import inspect
from typing import get_args

import jaxkfac as jk
from jaxkfac.jobs.cli._options import DampingMode, DigitsKfacOptions, KfacOptions
from jaxkfac.linalg.spectral import DampingMode as LibraryDampingMode
from jaxkfac.optim import SAFE_DAMPING, SAFE_NORM


def test_every_option_of_kfac_has_the_librarys_name_and_default():
    library = inspect.signature(jk.kfac).parameters
    own = {field.name: field for field in dataclasses.fields(KfacOptions)}
    assert own.pop("learning_rate").default is dataclasses.MISSING
    automatic = {  # with a learning rate, and factors at each step
        "damping": SAFE_DAMPING, "damping_mode": "exact", "decay": 0.95,
        "refresh_every": 10, "momentum": 0.9, "norm_constraint": SAFE_NORM,
    }  # fmt: skip
    defaults = {name: library[name].default for name in own}
    assert [name for name, x in defaults.items() if x == "auto"] == list(automatic)
    assert {name: field.default for name, field in own.items()} == defaults | automatic
    assert KfacOptions(1.0).arguments().keys() == own.keys()


def test_what_the_model_chooses_is_not_given():
    options = DigitsKfacOptions(0.1, damping=2.0, norm_constraint=1.0, quadratic=True)
    found = dataclasses.replace(options, adapt_damping=True).arguments()
    assert found["learning_rate"] == found["momentum"] == "quadratic"
    assert found["norm_constraint"] is None and found["damping"].initial == 2.0
    assert (
        not DigitsKfacOptions(0.1).adapts
        and "learning_rate" not in DigitsKfacOptions(0.1).arguments()
    )


def test_the_damping_modes_are_the_librarys():
    assert get_args(DampingMode) == get_args(LibraryDampingMode)
