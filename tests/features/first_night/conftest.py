from tests.features.conftest import _here

__all__ = ["_here"]
