"""Helpers of stage `visualize`: graphs for reading."""
