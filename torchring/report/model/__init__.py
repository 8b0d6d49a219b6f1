"""What a trace says: steps of all ranks on one clock, who waits for whom, buckets, and cores."""
