#!/bin/bash
# hpcsync slurm jobs/text-allreduce.toml --nodes 2 --ntasks-per-node 2 --cpus-per-task 2 --gpus-per-node 2 --partition gpu --time 1:00:00 --mpi pmix
#SBATCH --job-name=text-allreduce
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=1:00:00
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=2

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpi4py -m hpcsync run jobs/text-allreduce.toml \
    -n "$SLURM_NTASKS" --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume
