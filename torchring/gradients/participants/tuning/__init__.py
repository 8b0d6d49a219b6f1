"""`bucket_mb="auto"` and `compression="auto"`: finds better buckets while the job trains."""
