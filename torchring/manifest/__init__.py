"""`torchring manifest`: from a short job file to an sbatch script, or to objects for Kubernetes.

command.py      the command
job.py          reads job files
slurm.py        sbatch scripts
kubernetes.py   Job, JobSet, and TrainJob with its ClusterTrainingRuntime
"""
