"""The phases of `onboard MODEL`: their order, state, resume and worklog."""
