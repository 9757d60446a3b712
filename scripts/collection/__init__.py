"""The parts of `remote_collection.py`."""
