"""What runs on each node of a job: the agent that starts its ranks, and what sees how the node does."""
