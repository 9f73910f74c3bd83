"""The part of a job that runs on each node: an agent that starts the node's ranks and samples its health."""
