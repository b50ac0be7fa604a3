#!/bin/bash
# hpcsync slurm jobs/digits-bsp.toml --array 'paradigm=[{name = "bsp"}, {name = "ssp", staleness = 3}]' --array 'seed=[1, 2, 3]' --nodes 2 --ntasks-per-node 2 --partition cpu --time 1:00:00 --mpi pmix
#SBATCH --job-name=digits-bsp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=1:00:00
#SBATCH --array=0-5
#SBATCH --partition=cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1

case $SLURM_ARRAY_TASK_ID in
    0) settings=(--set 'paradigm={name = "bsp"}' --set seed=1) ;;
    1) settings=(--set 'paradigm={name = "bsp"}' --set seed=2) ;;
    2) settings=(--set 'paradigm={name = "bsp"}' --set seed=3) ;;
    3) settings=(--set 'paradigm={name = "ssp", staleness = 3}' --set seed=1) ;;
    4) settings=(--set 'paradigm={name = "ssp", staleness = 3}' --set seed=2) ;;
    5) settings=(--set 'paradigm={name = "ssp", staleness = 3}' --set seed=3) ;;
esac
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpi4py -m hpcsync run jobs/digits-bsp.toml "${settings[@]}" \
    -n "$SLURM_NTASKS" --out "runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID" --resume
