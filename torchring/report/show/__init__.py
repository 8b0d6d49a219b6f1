"""The report in the terminal, as a page, and as files for other programs."""
