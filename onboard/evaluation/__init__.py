"""Scores of a model on the tasks of lm-evaluation-harness (extra `eval`)."""
