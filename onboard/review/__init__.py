"""The checklist that a generated model file and its tests are reviewed by."""
