#!/bin/bash
# hpcsync slurm jobs/digits-bsp.toml --set 'cluster.on_death="restart"' --nodes 4 --ntasks-per-node 2 --partition cpu --time 8:00:00 --mpi pmix
#SBATCH --job-name=digits-bsp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=8:00:00
#SBATCH --no-kill
#SBATCH --partition=cpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1

unset SLURM_STEP_ID PMIX_RANK PMI_SIZE
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export MPIEXEC="srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task=$SLURM_CPUS_PER_TASK"
python -m hpcsync run jobs/digits-bsp.toml --set 'cluster.on_death="restart"' -n "$SLURM_NTASKS" --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume
