"""The engine: phases, their state, resume and the worklog."""
