"""What reports and pull requests show, made from the artifacts of a run."""
