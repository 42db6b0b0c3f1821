"""A short slice of the soak: one trial of each kind. The whole: make soak."""

import os
import signal
import subprocess
import sys
import zlib

import numpy as np
import pytest
from launch import HERE

from soak.trials import KINDS

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("kind", KINDS)
def test_one_trial(kind):
    KINDS[kind](np.random.default_rng(zlib.crc32(kind.encode())))


def test_an_end_before_the_time():
    """A job of a shell that has ended, told to end: counts all the same, and no failure."""
    shell = "sh", "-c", 'trap "" INT; exec "$@"', "sh"
    command = [*shell, sys.executable, *["-m", "soak", "--only", "signals", "--tell", "0"]]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        table = [job.stdout.readline() for _ in range(2)]
        os.kill(job.pid, signal.SIGTERM)
        rest = job.stdout.read()
    assert job.returncode == 0, [*table, rest]
    assert table[1].split()[:3] == ["signals", "1", "0"], table
    assert rest.count("signals  ") >= 1
    assert "4 interrupts" in rest
