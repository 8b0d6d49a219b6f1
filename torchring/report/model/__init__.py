"""What a trace says: steps of all ranks on one clock, who waits for whom, buckets, the network, and predictions."""
