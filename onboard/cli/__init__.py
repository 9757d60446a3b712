"""The Typer application: one file a command, parsing and printing only."""
