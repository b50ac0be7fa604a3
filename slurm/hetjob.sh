#!/bin/bash
# hpcsync slurm jobs/digits-ssp.toml --nodes 1 --ntasks-per-node 2 --cpus-per-task 1 --partition old --nodes 2 --ntasks-per-node 1 --cpus-per-task 2 --partition new --time 1:00:00 --mpi pmix
#SBATCH --job-name=digits-ssp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=1:00:00
#SBATCH --partition=old
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH hetjob
#SBATCH --partition=new
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2

run=(python -m mpi4py -m hpcsync run jobs/digits-ssp.toml -n $((SLURM_NTASKS_HET_GROUP_0 + SLURM_NTASKS_HET_GROUP_1)) --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume)
srun --mpi=pmix --kill-on-bad-exit=1 \
    --het-group=0 --cpus-per-task="$SLURM_CPUS_PER_TASK_HET_GROUP_0" --export="ALL,OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK_HET_GROUP_0" "${run[@]}" : \
    --het-group=1 --cpus-per-task="$SLURM_CPUS_PER_TASK_HET_GROUP_1" --export="ALL,OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK_HET_GROUP_1" "${run[@]}"
