"""What launchers of Triton's kernels share; the kernels lie with their mechanisms."""
