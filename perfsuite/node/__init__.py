"""The part of a job that runs on each node: the agent that starts its ranks and samples its health."""
