"""What tests of sharded models share."""
