#!/bin/bash
# hpcsync slurm jobs/digits-dssp.toml --nodes 2 --ntasks-per-node 2 --cpus-per-task 2 --partition cpu --time 1:00:00 --mpi pmix
#SBATCH --job-name=digits-dssp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=1:00:00
#SBATCH --partition=cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpi4py -m hpcsync run jobs/digits-dssp.toml \
    -n "$SLURM_NTASKS" --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume
