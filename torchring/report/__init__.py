"""`torchring report`: what a trace says about a job: what bounds it, by how much, and what would help."""
