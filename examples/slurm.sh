#!/bin/bash
# Solve one problem on several nodes: sbatch examples/slurm.sh problem.h5 answer.h5
# One rank a socket keeps each block of rows in the memory next to its cores. A job that the time limit ends is put back
# in the queue and goes on from its checkpoint; exit code 3 says that the answer is there but not converged.
#SBATCH --job-name=mapuot
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mapuot-%j.log
# GPUs, one a rank: --ntasks-per-node as many as a node has, #SBATCH --gpus-per-task=1, and --backend cuda below;
# with mapuot[nccl] their sums go from GPU to GPU
set -euo pipefail
in=${1:?usage: sbatch slurm.sh IN OUT}
out=${2:?usage: sbatch slurm.sh IN OUT}

# the MPI library that mpi4py was built with must be the one of srun (MPICH: pmi2, Open MPI: pmix); srun does not take
# the cores of a task from sbatch, and without kill-on-bad-exit the other ranks wait for one that was killed
trap 'scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1
srun --mpi="${MAPUOT_PMI:-pmi2}" --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=1 \
    mapuot solve "$in" -o "$out" --reg 0.01 --reg-m 1 \
    --checkpoint "${out%.*}.checkpoint.npz" --resume --no-progress &
wait $!
