"""The configuration is made by the test."""

VllmConfig = object
