"""Helpers of stage `pattern_matcher`: how mechanisms look when they are written out."""
