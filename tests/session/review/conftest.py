from tests.cli.conftest import _here, clone, repository

__all__ = ["_here", "clone", "repository"]
