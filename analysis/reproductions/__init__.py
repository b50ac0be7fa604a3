"""Published claims, each a table of jobs to simulate and what is to be seen in their results."""
