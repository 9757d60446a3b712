"""Recognise what a model's modules and functions compute, by comparing them with canonical ops."""
