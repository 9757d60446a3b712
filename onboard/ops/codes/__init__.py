"""Producers that write codes of low precision, and the linear layers behind them that take these."""
