"""Two processes of four devices train as one device does, and a dead process ends the others."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_process.py"


def run(*arguments):
    return subprocess.run([sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_the_losses_are_those_of_one_device():
    many, one = run("--steps", "4"), run("--steps", "4", "--single")
    assert many.returncode == 0, many.stderr[-2000:]
    found = json.loads(many.stdout.splitlines()[-1])  # Gloo prints its connections before
    assert (found["processes"], found["devices"]) == (2, 8)
    expected = json.loads(one.stdout)["losses"]
    np.testing.assert_allclose(found["losses"], expected, rtol=2e-5)
    assert expected[-1] < expected[0]


def test_a_dead_process_is_an_error_at_once():
    dead = subprocess.run([sys.executable, EXAMPLE, "--die", "7"], capture_output=True, text=True, timeout=60, check=False)
    assert dead.returncode == 1
    assert "a process ended with 7; the others are ended too" in dead.stderr
