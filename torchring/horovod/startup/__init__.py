"""A folder for PYTHONPATH, whose sitecustomize.py Python runs as it starts."""
