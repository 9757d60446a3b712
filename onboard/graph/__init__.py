"""Transform framework: configuration, stages, pipeline, FX helpers, pattern matching."""
