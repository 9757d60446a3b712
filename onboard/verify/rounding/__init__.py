"""Whose rounding an error in float32 is: ours and the reference's, both against the reference in
float64.
"""
