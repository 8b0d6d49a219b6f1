"""`torchring manifest`: from a short job file to an sbatch script, or to objects for Kubernetes.

manifest.py     the command
job_file.py     reads job files
slurm.py        sbatch scripts
kubernetes.py   Job and JobSet
"""
