"""Report on GitHub: comments, checks, issues and pull requests."""
