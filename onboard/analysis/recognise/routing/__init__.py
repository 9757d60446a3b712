"""Where the experts of a mixture lie, and what sends tokens to them, when neither is in one method."""
