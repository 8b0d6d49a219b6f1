"""All-reduce in the streams of an accelerator."""
