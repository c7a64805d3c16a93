import os
import signal

import pytest

from jaxkfac.cli._interrupts import interrupts_deferred


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_the_block_ends_before_the_interrupt_arrives(capsys):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred("saving"):
        press()
        done.append(True)
    assert done
    assert "saving, then stopping" in capsys.readouterr().err


def test_a_second_press_acts_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred("saving"):
        press()
        press()
        done.append(True)
    assert not done


def test_the_handler_before_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred("saving"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
