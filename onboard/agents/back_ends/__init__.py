"""Who plays a role beside the rules: a command behind walls, or an endpoint with tools."""
