"""Which transforms a run has: the shipped pipeline, what comes from outside, what the user says."""
