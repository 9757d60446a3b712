"""One file a phase of `onboard <model>`."""
