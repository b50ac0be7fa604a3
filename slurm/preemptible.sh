#!/bin/bash
# hpcsync slurm jobs/digits-asp.toml --preemptible --nodes 2 --ntasks-per-node 2 --partition preemptible --time 8:00:00 --mpi pmix
#SBATCH --job-name=digits-asp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --time=8:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --partition=preemptible
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpi4py -m hpcsync run jobs/digits-asp.toml \
    -n "$SLURM_NTASKS" --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume
status=$?
if [ $status -eq 75 ] || { [ $status -gt 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
