"""What the programs of this folder share: the job of MPI's ranks, and its run.

Each function named ``case_*`` runs on every rank; the last line of rank 0 is a JSON object of the failures by name.
"""

import json
import sys

from mpi4py import MPI
from over_ranks import Job

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
JOB = Job(COMM)


def main(found):
    failures = JOB.run(found, sys.argv[1:])
    if RANK == 0:
        print(json.dumps({"size": SIZE, "failures": failures}), flush=True)
    sys.exit(any(failures.values()))
